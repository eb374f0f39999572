"""A product whose parts nobody has added up yet: the kernel that reads it does, and a kernel is saved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from splitserve.ops.triton.multiply import Matrix, add_up_parts, multiply_parts
from splitserve.ops.triton.rounding import Rounded

FEW = 64
"""Rows up to which products are handed on in parts: with more, few are split, and adding up takes as long as reading."""


MOST = 8
"""Parts that a kernel adds up beside other work; more take its registers, and are added up before."""


@dataclass(frozen=True)
class Parts:
    """Stands for a tensor [rows, ...]."""

    sums: torch.Tensor  # [splits, rows, ...] float32
    dtype: torch.dtype  # of what it stands for

    @property
    def shape(self) -> torch.Size:
        return self.sums.shape[1:]

    def numel(self) -> int:
        return self.shape.numel()

    def __getitem__(self, key: tuple[Any, ...]) -> Parts:
        return replace(self, sums=self.sums[(slice(None), *key)])

    def unsqueeze(self, dim: int) -> Parts:
        """`dim` counts from the front."""
        return replace(self, sums=self.sums.unsqueeze(dim + 1))

    def total(self) -> torch.Tensor:
        """[rows, width], added up."""
        return add_up_parts(self.sums, self.dtype)


def linear_parts(
    x: torch.Tensor | Rounded,  # [rows, in]
    weight: Matrix,  # [out, in]
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor | Parts:  # [rows, out]
    """A product of few rows, in parts where it is split."""
    sums = multiply_parts(x, weight, dtype=dtype)
    return sums[0] if len(sums) == 1 else Parts(sums, dtype)
