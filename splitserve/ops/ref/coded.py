"""Quantised weights as kernels like them: a byte for each number, a scale and a least number for each group.

    w = scale c + least         c in 0..255, scale and least float32, for 32 neighbouring numbers of a row

Exact for ggml's linear types: their w is d (q - zero) or d q + m, with d of 11 bits and q of at most 8. So d q fits in
float32, and d q + m is rounded once however it is computed. A byte and a quarter for each number, where ggml's four-bit
types take five eighths: a byte becomes a float in two instructions, half a byte takes four.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP = 32


@dataclass(frozen=True)
class Coded:
    """A matrix [out, in]."""

    codes: torch.Tensor  # [out, in] uint8
    scales: torch.Tensor  # [out, in / 32, 2] float32: scale, least

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape


Weight = torch.Tensor | Coded
"""A matrix of a linear map: float32, or anything smaller that kernels widen (float16, bfloat16, codes)."""


def widen(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """[out, in] in `dtype`."""
    if isinstance(weight, torch.Tensor):
        return weight.to(dtype)
    groups = weight.codes.view(*weight.scales.shape[:2], GROUP)
    scale, least = weight.scales.split(1, dim=-1)
    return (scale * groups + least).flatten(1).to(dtype)
