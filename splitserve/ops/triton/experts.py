"""Mixture of experts of the Llama family: the twins of ops/ref/experts.py."""

from __future__ import annotations

import math

import torch

from splitserve.ops.kernels.counts import cdiv
from splitserve.ops.kernels.launch import arch_of
from splitserve.ops.kernels.tuned import tuned
from splitserve.ops.triton.grouping import group_pairs
from splitserve.ops.triton.multiply import multiply
from splitserve.ops.triton.routing import add_up, choose


def choose_experts(
    scores: torch.Tensor,  # [num_tokens, num_experts]: the router's output
    count: int,
    *,
    normalize: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # weights float32, experts int32, each [num_tokens, count]
    """Twin of ref.choose_experts."""
    return choose(scores, count, mode="softmax", normalize=normalize)


def mix_experts(
    x: torch.Tensor,  # [num_tokens, hidden] bf16
    gate_up: torch.Tensor,  # [num_experts, 2 * ffn, hidden]
    down: torch.Tensor,  # [num_experts, hidden, ffn]
    weights: torch.Tensor,  # [num_tokens, count]
    experts: torch.Tensor,  # [num_tokens, count]
) -> torch.Tensor:  # [num_tokens, hidden]
    """Twin of ref.mix_experts; the sum over a token's experts is float32."""
    experts, weights = experts.contiguous(), weights.contiguous()
    tokens, count = experts.shape
    block = tuned("group_pairs", arch_of(x), cdiv(tokens * count, len(gate_up)))["BM"]
    groups = group_pairs(experts, local=range(len(gate_up)), block=block, whole=True)
    inner = multiply(x, gate_up, groups=groups, share=count, limit=math.inf)
    parts = multiply(inner, down, groups=groups, factors=weights)
    return add_up(parts[None], experts, local=range(len(gate_up)), dtype=x.dtype)
