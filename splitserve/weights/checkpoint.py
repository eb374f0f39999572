"""What the two checkpoint formats have in common: named tensors in mapped files, read by rows. Torch-free."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from splitserve.errors import WeightsError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Rows:
    """Rows of one tensor as they lie in the file or as they were dequantised.

    `encoding` is f32, f16 or bf16; numpy has no bf16, so those arrive as their uint16 bit patterns.
    """

    array: Array
    encoding: str


class Checkpoint(Protocol):
    """One open checkpoint. All errors are WeightsErrors that name the tensor and the file."""

    format: str
    path: Path

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Rows first: [out_features, in_features] for a matrix."""
        ...

    def file(self, name: str) -> Path: ...

    def span(self, name: str) -> Array:
        """A tensor's bytes as they lie in the file, mapped: uint8 [nbytes]."""
        ...

    def read(self, name: str, start: int, stop: int) -> Rows:
        """Rows [start, stop) of dimension 0."""
        ...

    def form(self, name: str) -> str:
        """How the file keeps a tensor: f32, f16, bf16, "coded" where `read_coded` reads it, or "" for anything else."""
        ...

    def read_coded(self, name: str, start: int, stop: int) -> tuple[Array, Array]:
        """Rows [start, stop) of a coded matrix: codes [n, k] uint8, scales [n, k / 32, 2] float32 (see coded.py)."""
        ...


def map_file(path: Path) -> Array:
    """The bytes of a file as a read-only uint8 array that the kernel pages in when touched."""
    try:
        if path.stat().st_size == 0:
            raise WeightsError(f"{path} is empty", fix="fetch the file again")
        return np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as e:
        raise WeightsError(f"{path} cannot be read: {e.strerror or e}") from e


def check_inside(name: str, path: Path, *, start: int, stop: int, size: int) -> None:
    """Raise WeightsError when a tensor's bytes [start, stop) are not all inside a file of `size` bytes."""
    if start < 0 or stop < start:
        raise WeightsError(
            f"{path}: tensor {name!r} claims the impossible bytes [{start}, {stop}): corrupted"
        )
    if stop > size:
        raise WeightsError(
            f"{path}: tensor {name!r} ends at byte {stop}, the file at {size}: truncated by {stop - size} bytes",
            fix="fetch the file again",
        )
