"""Weights in memory, to eight-lane float32 vectors in registers.

    f32, f16, bf16     numbers as they are
    coded              one byte c a number; scale and least, two float32, for 32 numbers:      w = scale c + least

See ops/ref/coded.py for why `coded` is exact for what quantised checkpoints hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .llvm import F16, F32, I8, I16, I32, I64, LANES, Builder, constant, fma, load, splat, vector

GROUP = 32
SCALES_BYTES = 8


@dataclass(frozen=True)
class Format:
    """`read(builder, numbers, scales)`: the `step` numbers at one address, eight at a time; `scales`: their group's.

    `scaled`: there are such.
    """

    number_bytes: int
    step: int
    read: Callable[[Builder, Any, Any], Iterator[Any]]
    scaled: bool = False


def _read_f32(b: Builder, at: Any, _: Any) -> Iterator[Any]:
    yield load(b, at)


def _read_f16(b: Builder, at: Any, _: Any) -> Iterator[Any]:
    yield b.fpext(load(b, at, vector(F16)), vector(F32))


def _read_bf16(b: Builder, at: Any, _: Any) -> Iterator[Any]:
    bits = b.zext(load(b, at, vector(I16)), vector(I32))
    yield b.bitcast(b.shl(bits, constant(I32, 16)), vector(F32))


def _read_coded(b: Builder, at: Any, scales: Any) -> Iterator[Any]:
    scale, least = (splat(b, load(b, b.add(scales, I64(4 * i)), F32)) for i in range(2))
    for i in range(GROUP // LANES):
        code = b.zext(load(b, b.add(at, I64(LANES * i)), vector(I8)), vector(I32))
        # As a signed integer, which it fits in: AVX2 has no conversion of unsigned ones.
        yield fma(b, scale, b.sitofp(code, vector(F32)), least)


FORMATS = (
    Format(4, LANES, _read_f32),
    Format(2, LANES, _read_f16),
    Format(2, LANES, _read_bf16),
    Format(1, GROUP, _read_coded, scaled=True),
)
F32_ROWS, F16_ROWS, BF16_ROWS, CODED = range(len(FORMATS))
"""Indices into FORMATS, by which compiled loops know them."""
