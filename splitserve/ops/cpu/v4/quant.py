"""Weights in codes: twin of ops/ref/v4/quant.py. Numbers are exact, so the same bits.

Few rows of inputs meet the codes as they are, and a row of the result is the same bits in any batch of that size; for
more, the matrix is widened once and torch multiplies.
"""

from __future__ import annotations

import threading
from typing import TypeGuard

import torch
import torch.nn.functional as F

from splitserve.ops.cpu.llvm import LANES
from splitserve.ops.ref.v4 import quant as ref
from splitserve.ops.ref.v4.quant import MXFP4_GROUP, Mxfp4, Tiles, Weight

from . import codes, products

FEW = 32
"""Rows of inputs up to which a product reads codes. Beyond, torch's product makes up for widening, also by threads."""

_SCRATCH_NUMBERS = 1 << 22
"""Matrices up to this size are widened in memory that is kept: fresh pages cost more than the numbers in them."""

_scratch = threading.local()

Address = tuple[int, int, int, int, int, int, int]
"""A matrix for compiled loops: form, codes, scales, bytes to the next row of scales, whether these are powers of two,
and the rows and neighbours that share one."""


def dequantise(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The whole matrix [out, in]; stacks of matrices and other types than float32 are ref's."""
    if not is_coded(weight, dtype):
        return ref.dequantise(weight, dtype)
    return _widen(weight, torch.empty(shape(weight)))


def linear(
    x: torch.Tensor,  # [T, in]
    weight: Weight,  # [out, in]
) -> torch.Tensor:  # [T, out] in x's dtype
    if not is_coded(weight, x.dtype):
        return ref.linear(x, weight)
    rows, columns = shape(weight)
    if few(x, columns):
        x = x.contiguous()
        out = torch.empty(len(x), rows)
        products.product(x.data_ptr(), columns, len(x), address(weight), rows, columns, out.data_ptr(), rows)
        return out
    if rows * columns > _SCRATCH_NUMBERS:
        return F.linear(x, dequantise(weight, x.dtype))
    kept = getattr(_scratch, "numbers", None)
    if kept is None:
        kept = _scratch.numbers = torch.empty(_SCRATCH_NUMBERS)
    return F.linear(x, _widen(weight, kept[: rows * columns].view(rows, columns)))


def few(x: torch.Tensor, columns: int) -> bool:
    """Whether rows of `columns` numbers are to meet codes as they are."""
    return 0 < len(x) <= FEW and columns % LANES == 0


def shape(weight: Tiles | Mxfp4) -> tuple[int, int]:
    """Rows and columns of a matrix, or of each in a stack."""
    rows, columns = weight.codes.shape[-2:]
    return rows, columns if isinstance(weight, Tiles) else 2 * columns


def address(weight: Tiles | Mxfp4) -> Address:
    """Of a matrix, or of the first in a stack, without gaps."""
    scales = weight.scales
    row_bytes = scales.shape[-1] * scales.element_size()
    form, rows, group = (
        (codes.E4M3, *weight.tile) if isinstance(weight, Tiles) else (codes.MXFP4, 1, MXFP4_GROUP)
    )
    powers = int(scales.dtype == torch.uint8)
    return form, weight.codes.data_ptr(), scales.data_ptr(), row_bytes, powers, rows, group


def is_coded(weight: Weight, dtype: torch.dtype) -> TypeGuard[Tiles | Mxfp4]:
    """Whether it is a matrix that loops read as it lies."""
    if dtype != torch.float32 or isinstance(weight, torch.Tensor) or weight.codes.dim() != 2:
        return False
    return weight.codes.is_contiguous() and weight.scales.is_contiguous()


def _widen(weight: Tiles | Mxfp4, out: torch.Tensor) -> torch.Tensor:
    """Fill `out` [rows, columns] float32."""
    codes.widen_rows(address(weight), 0, *out.shape, out.data_ptr())
    return out
