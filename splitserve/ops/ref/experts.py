"""Mixture of experts: choose a few experts for each token, sum their weighted outputs."""

from __future__ import annotations

import torch

from .dense import linear, swiglu


def choose_experts(
    scores: torch.Tensor,  # [num_tokens, num_experts]: the router's output
    count: int,
    *,
    normalize: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32 weights, int64 experts), each [num_tokens, count]: the best by softmax over all experts."""
    weights, experts = scores.float().softmax(-1).topk(count, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if normalize else weights), experts


def mix_experts(
    x: torch.Tensor,  # [num_tokens, hidden]
    gate_up: torch.Tensor,  # [num_experts, 2 * ffn, hidden]
    down: torch.Tensor,  # [num_experts, hidden, ffn]
    weights: torch.Tensor,  # [num_tokens, count]
    experts: torch.Tensor,  # [num_tokens, count]
) -> torch.Tensor:  # [num_tokens, hidden]
    """Each expert runs once, over all its tokens."""
    count = experts.shape[1]
    order = experts.flatten().argsort(stable=True)
    token = order // count
    sizes = experts.flatten().bincount(minlength=gate_up.shape[0]).tolist()
    out = torch.zeros_like(x)
    start = 0
    for expert, size in enumerate(sizes):
        if size:
            rows = order[start : start + size]
            mine = token[start : start + size]
            y = linear(swiglu(linear(x[mine], gate_up[expert])), down[expert])
            out.index_add_(0, mine, (y * weights.flatten()[rows, None]).to(x.dtype))
        start += size
    return out
