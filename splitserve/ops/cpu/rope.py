"""Rotary embedding on a CPU, in float32: twin of ops/ref/rope.py."""

from __future__ import annotations

import torch

from splitserve.ops.ref.rope import rope_table

from . import elementwise

__all__ = ["rope_table", "rotate"]


def rotate(
    x: torch.Tensor,  # [num_tokens, num_heads, head_dim], without gaps in its rows
    table: tuple[torch.Tensor, torch.Tensor],  # of rope_table
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    tokens, heads, size = x.shape
    cosines, sines = table
    out = torch.empty(tokens, heads, size)
    elementwise.rotate(
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        tokens,
        heads,
        size // 2,
        cosines.data_ptr(),
        sines.data_ptr(),
        out.data_ptr(),
    )
    return out
