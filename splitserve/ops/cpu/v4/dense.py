"""Norms, rotation, grouped products, rows into slots: twins of ops/ref/v4/dense.py and rows.py.

Each token's numbers are the same bits in any batch (grouped products: of few tokens).
"""

from __future__ import annotations

import torch

from splitserve.ops.ref.v4 import dense as ref
from splitserve.ops.ref.v4 import rows as ref_rows
from splitserve.ops.ref.v4.dense import Table
from splitserve.ops.ref.v4.quant import Weight

from . import loops, products
from .quant import address, dequantise, few, is_coded


def rms_norm(
    x: torch.Tensor,  # [..., size] float32
    weight: torch.Tensor | None,  # [size] float32, or None for no weight
    eps: float,
) -> torch.Tensor:  # [..., size]
    x = x.contiguous()
    out = torch.empty_like(x)
    size = x.shape[-1]
    by = 0 if weight is None else weight.data_ptr()
    loops.rms_norm(x.data_ptr(), x.numel() // size, size, by, eps, out.data_ptr())
    return out


def rotate_tail(
    x: torch.Tensor,  # [T, heads, head_dim] float32
    table: Table,
    *,
    inverse: bool = False,
) -> torch.Tensor:  # [T, heads, head_dim]
    """Turn the last numbers of every head by its token's angles; `inverse` turns them back."""
    x = x.contiguous()
    out = torch.empty_like(x)
    cos, sin = table
    sign = -1.0 if inverse else 1.0
    loops.rotate_tail(
        x.data_ptr(), *x.shape, cos.data_ptr(), sin.data_ptr(), cos.shape[1], sign, out.data_ptr()
    )
    return out


def grouped_linear(
    x: torch.Tensor,  # [T, groups, in] float32
    weight: Weight,  # [groups * out, in]
) -> torch.Tensor:  # [T, groups * out]: each group of inputs through its own matrix
    if not (is_coded(weight, x.dtype) and few(x, x.shape[-1]) and x.stride(-1) == 1):
        return ref.grouped_linear(x, dequantise(weight, x.dtype))
    tokens, groups, size = x.shape
    rows = len(weight.codes)
    out = torch.empty(tokens, rows)
    products.grouped(
        x.data_ptr(),
        *x.stride()[:2],
        tokens,
        address(weight),
        groups,
        rows // groups,
        size,
        out.data_ptr(),
    )
    return out


def write_rows(
    view: torch.Tensor,  # [units, rows_per_unit, width], any strides
    rows: torch.Tensor,  # [N, width]
    unit: torch.Tensor,  # [N] int64; -1: the row is not kept
    row: torch.Tensor,  # [N] int64; (unit, row) pairs must differ
) -> None:
    plain = view.dtype == rows.dtype == torch.float32 and view.stride(-1) == 1
    if not plain or rows.stride(-1) != 1:
        ref_rows.write_rows(view, rows, unit, row)
        return
    unit, row = unit.contiguous(), row.contiguous()
    loops.write_rows(
        view.data_ptr(),
        *view.stride()[:2],
        rows.data_ptr(),
        rows.stride(0),
        *rows.shape,
        unit.data_ptr(),
        row.data_ptr(),
    )
