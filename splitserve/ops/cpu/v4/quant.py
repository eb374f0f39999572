"""Weights as float32 numbers: twin of ops/ref/v4/quant.py. Exact, so the same bits."""

from __future__ import annotations

import threading
from typing import TypeGuard

import numpy as np
import torch
import torch.nn.functional as F

from splitserve.ops.ref.v4 import quant as ref
from splitserve.ops.ref.v4.quant import Mxfp4, Tiles, Weight

from . import loops

_SCRATCH_NUMBERS = 1 << 22
"""Matrices up to this size are widened in memory that is kept: fresh pages cost more than the numbers in them."""

_scratch = threading.local()


def dequantise(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The whole matrix [out, in]; stacks of matrices and other types than float32 are ref's."""
    if not _is_compiled(weight, dtype):
        return ref.dequantise(weight, dtype)
    return _widen(weight, torch.empty(_shape(weight)))


def linear(
    x: torch.Tensor,  # [T, in]
    weight: Weight,  # [out, in]
) -> torch.Tensor:  # [T, out] in x's dtype
    if not _is_compiled(weight, x.dtype):
        return ref.linear(x, weight)
    rows, columns = _shape(weight)
    if rows * columns > _SCRATCH_NUMBERS:
        return F.linear(x, dequantise(weight, x.dtype))
    kept = getattr(_scratch, "numbers", None)
    if kept is None:
        kept = _scratch.numbers = torch.empty(_SCRATCH_NUMBERS)
    return F.linear(x, _widen(weight, kept[: rows * columns].view(rows, columns)))


def _is_compiled(weight: Weight, dtype: torch.dtype) -> TypeGuard[Tiles | Mxfp4]:
    return dtype == torch.float32 and not isinstance(weight, torch.Tensor) and weight.codes.dim() == 2


def _shape(weight: Tiles | Mxfp4) -> list[int]:
    rows, columns = weight.codes.shape
    return [rows, columns if isinstance(weight, Tiles) else 2 * columns]


def _widen(weight: Tiles | Mxfp4, out: torch.Tensor) -> torch.Tensor:
    """Fill `out` [rows, columns] float32."""
    codes, scales, numbers = weight.codes.view(torch.uint8).numpy(), _numbers(weight.scales), out.numpy()
    if isinstance(weight, Tiles):
        loops.tiles(codes, scales, *weight.tile, numbers.view(np.int32), numbers)
    else:
        loops.mxfp4(codes, scales, numbers.view(np.int32), numbers)
    return out


_POWERS = ref.ue8m0_to_float(torch.arange(256, dtype=torch.uint8)).numpy()


def _numbers(scales: torch.Tensor) -> np.ndarray:
    """The scales as float32."""
    return _POWERS[scales.numpy()] if scales.dtype == torch.uint8 else scales.numpy()
