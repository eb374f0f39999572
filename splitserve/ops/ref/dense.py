"""The dense parts of a layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .coded import Coded, Weight, widen


def embed(
    tokens: torch.Tensor,  # [num_tokens] int64
    table: Weight,  # [rows, hidden]: rows [first, first + rows) of the vocabulary
    first: int = 0,
) -> torch.Tensor:  # [num_tokens, hidden], zero for tokens of other shards
    local = tokens - first
    ours = (local >= 0) & (local < table.shape[0])
    row = local.where(ours, 0)
    if isinstance(table, Coded):
        return widen(Coded(table.codes[row], table.scales[row]), torch.float32) * ours[:, None]
    return F.embedding(row, table) * ours[:, None]


def linear(
    x: torch.Tensor,  # [num_tokens, in]
    weight: Weight,  # [out, in]
    bias: torch.Tensor | None = None,  # [out]
) -> torch.Tensor:  # [num_tokens, out]
    return F.linear(x, widen(weight, x.dtype), bias)


def rms_norm(
    x: torch.Tensor,  # [..., size]
    weight: torch.Tensor,  # [size]
    eps: float,
) -> torch.Tensor:  # [..., size]: x / sqrt(mean(x^2) + eps) * weight, the quotient in float32
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor,  # [num_tokens, size]
    y: torch.Tensor,  # [num_tokens, size]
    weight: torch.Tensor,  # [size]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # x + y, and its norm
    total = x + y
    return total, rms_norm(total, weight, eps)


def swiglu(
    gate_up: torch.Tensor,  # [..., 2 * ffn]: gate, then up
) -> torch.Tensor:  # [..., ffn]: silu(gate) * up
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
