"""Mixture of experts: scores by sqrt(softplus), selection by bias or by token id, clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .quant import Weight, linear

Product = Callable[[torch.Tensor, Weight], torch.Tensor]
"""x [T, in] and a weight [out, in] to [T, out]."""


def route(
    logits: torch.Tensor,  # [T, experts] float32
    bias: torch.Tensor,  # [experts] float32: counts for the selection only
    *,
    count: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # weights [T, count] float32, experts [T, count] int64
    scores = F.softplus(logits).sqrt()
    experts = (scores + bias).topk(count, dim=-1, sorted=False).indices
    return _normalised(scores.gather(1, experts), scale), experts


def route_by_token(
    logits: torch.Tensor,  # [T, experts] float32
    table: torch.Tensor,  # [vocab, count] int: experts of each token id
    tokens: torch.Tensor,  # [T] int64
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # weights [T, count] float32, experts [T, count] int64
    """The token's id says which experts, the learned gate still says how much of each."""
    experts = table[tokens].long()
    return _normalised(F.softplus(logits).sqrt().gather(1, experts), scale), experts


def _normalised(weights: torch.Tensor, scale: float) -> torch.Tensor:
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale


def clamped_swiglu(
    gate_up: torch.Tensor,  # [..., 2 * ffn]: gate, then up
    limit: float,
) -> torch.Tensor:  # [..., ffn] float32: silu(min(gate, limit)) * clamp(up, -limit, limit)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def expert_ffn(
    x: torch.Tensor,  # [n, hidden]
    gate_up: Weight,  # [2 * ffn, hidden]: gate, then up
    down: Weight,  # [hidden, ffn]
    limit: float,
    weights: torch.Tensor | None = None,  # [n, 1] float32: multiplies what goes into `down`
    *,
    product: Product = linear,
) -> torch.Tensor:  # [n, hidden]
    inner = clamped_swiglu(product(x, gate_up), limit)
    return product((inner if weights is None else inner * weights).to(x.dtype), down)


def mix_experts(
    x: torch.Tensor,  # [T, hidden]
    gate_up: Weight,  # [experts of this rank, 2 * ffn, hidden]
    down: Weight,  # [experts of this rank, hidden, ffn]
    weights: torch.Tensor,  # [T, count] float32
    experts: torch.Tensor,  # [T, count] int64, global numbers
    *,
    local: range,  # the experts that this rank holds
    limit: float,
    product: Product = linear,
) -> torch.Tensor:  # [T, hidden] float32: the sum over this rank's experts
    """Each chosen expert runs once, over all its tokens."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    sizes = flat.bincount(minlength=local.stop).tolist()
    at = 0
    for expert, size in enumerate(sizes):
        rows = order[at : at + size]
        at += size
        if size and expert in local:
            token, slot = rows // experts.shape[1], expert - local.start
            w = weights.flatten()[rows, None]
            y = expert_ffn(x[token], gate_up[slot], down[slot], limit, w, product=product)
            out.index_add_(0, token, y.float())
    return out
