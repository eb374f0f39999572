"""Norms and rotation: twins of ops/ref/v4/dense.py. Each token's numbers are the same bits in any batch."""

from __future__ import annotations

import numpy as np
import torch

from splitserve.ops.ref.v4.dense import Table

from . import loops


def rms_norm(
    x: torch.Tensor,  # [..., size] float32
    weight: torch.Tensor | None,  # [size] float32, or None for no weight
    eps: float,
) -> torch.Tensor:  # [..., size]
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    by = torch.ones(x.shape[-1]) if weight is None else weight
    loops.rms_norm(rows.numpy(), by.numpy(), np.float32(eps), out.numpy())
    return out.view(x.shape)


def rotate_tail(
    x: torch.Tensor,  # [T, heads, head_dim] float32
    table: Table,
    *,
    inverse: bool = False,
) -> torch.Tensor:  # [T, heads, head_dim]
    """Turn the last numbers of every head by its token's angles; `inverse` turns them back."""
    x = x.contiguous()
    out = torch.empty_like(x)
    cos, sin = (t.numpy() for t in table)
    loops.rotate_tail(x.numpy(), cos, sin, np.float32(-1 if inverse else 1), out.numpy())
    return out
