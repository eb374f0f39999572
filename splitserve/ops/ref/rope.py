"""Rotary embedding over halves of a head: pair i is (x[i], x[i + half]), turned by position * frequency[i]."""

from __future__ import annotations

import torch


def rope_table(
    positions: torch.Tensor,  # [num_tokens] int64
    inverse: torch.Tensor,  # [head_dim / 2] float32
    scale: float = 1.0,
) -> tuple[
    torch.Tensor, torch.Tensor
]:  # cos and sin, each [num_tokens, 1, head_dim / 2] float32, times scale
    angles = positions.float()[:, None, None] * inverse
    return angles.cos() * scale, angles.sin() * scale


def rotate(
    x: torch.Tensor,  # [num_tokens, num_heads, head_dim], any strides
    table: tuple[torch.Tensor, torch.Tensor],  # of rope_table
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    cos, sin = (t.to(x.dtype) for t in table)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
