"""What is measured: a kernel at one size, with the least that any version of it must move and compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

CACHE = 200_000_000
"""Bytes of inputs to go through before the same ones come again: several times any L2 cache."""


@dataclass(frozen=True)
class Case:
    kernel: str
    shape: str
    tokens: int
    calls: Sequence[Callable[[], object]]
    bytes: float  # that one call reads and writes, each once
    flops: float = 0.0
    peak: str = "bf16"  # of which products: "bf16" or "fp8"
    per_step: float = 0.0  # calls in one step of the model
    note: str = ""


def copies(size: float) -> int:
    """How many inputs of `size` bytes a case needs so that the cache does not serve them."""
    return max(1, min(64, round(CACHE / max(size, 1.0) + 0.5)))


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)
