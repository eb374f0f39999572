"""Codes of DeepSeek-V4's weights to float32, exactly: vectors of eight where a row allows it, else one by one.

    e4m3    a byte a number; exponent and mantissa, moved to where float32 has its own, are its value times 2^-120
    mxfp4   half a byte a number, the even one of a pair in the low half

A scale counts for `group` neighbours of a row: a byte, the exponent of a power of two, or a float32.
"""

# ruff: noqa: ARG001 - numba takes the parameters of an intrinsic from names in a signature

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from splitserve.ops.cpu.compiled import compiled
from splitserve.ops.cpu.llvm import (
    F32,
    I8,
    I32,
    I64,
    LANES,
    VECTOR,
    Builder,
    constant,
    load,
    splat,
    store,
    vector,
)
from splitserve.ops.cpu.vector import floats_at
from splitserve.ops.ref.v4.quant import MXFP4_GROUP, ue8m0_to_float

E4M3, MXFP4 = 0, 1
"""Forms, by which compiled loops know them."""

_POWERS = ue8m0_to_float(torch.arange(256, dtype=torch.uint8)).numpy()
_E4M3_SHIFT = np.float32(2.0**120)


@compiled()
def widen_rows(weight, first, count, k, out):
    """Rows of `weight` (see quant.address) from `first` on, k numbers each, one behind the other at `out`."""
    form, codes, scales, scales_row, powers, rows, group = weight
    row_bytes = k if form == E4M3 else k // 2
    for r in range(first, first + count):
        here = scales + r // rows * scales_row
        to = out + 4 * (r - first) * k
        at = codes + r * row_bytes
        for g in range((k + group - 1) // group):
            scale = _POWERS[bytes_at(here)[g]] if powers else floats_at(here)[g]
            begin, end = g * group, min(k, (g + 1) * group)
            if form == MXFP4:
                _unpack_mxfp4(at + begin // 2, scale, to + 4 * begin)
            else:
                _e4m3(at + begin, end - begin, scale, to + 4 * begin)


@compiled(inline="always")
def _e4m3(at, n, scale, out):
    for i in range(0, n - LANES + 1, LANES):
        _unpack_e4m3(at + i, scale, out + 4 * i)
    for i in range(n // LANES * LANES, n):
        floats_at(out)[i] = _value(bytes_at(at)[i]) * _E4M3_SHIFT * scale


@intrinsic
def _value(_context, code):
    """One code with its bits moved."""

    def lower(_: Any, b: Builder, _signature: Any, args: Any) -> Any:
        code = b.zext(args[0], I32)
        magnitude = b.shl(b.and_(code, I32(0x7F)), I32(20))
        return b.bitcast(b.or_(magnitude, b.shl(b.lshr(code, I32(7)), I32(31))), F32)

    return types.float32(types.uint8), lower


@intrinsic
def _unpack_e4m3(_context, at, scale, out):
    """Eight codes."""

    def lower(_: Any, b: Builder, _signature: Any, args: Any) -> Any:
        at, scale, out = args
        code = b.zext(load(b, at, vector(I8)), vector(I32))
        magnitude = b.shl(b.and_(code, constant(I32, 0x7F)), constant(I32, 20))
        numbers = _signed(b, magnitude, code, 7)
        # In two steps: the first makes a subnormal a number, and the product of both may be too large for one.
        store(b, b.fmul(b.fmul(numbers, splat(b, F32(float(_E4M3_SHIFT)))), splat(b, scale)), out)
        return I32(0)

    return types.int32(types.intp, types.float32, types.intp), lower


@intrinsic
def _unpack_mxfp4(_context, at, scale, out):
    """The 32 codes of a group."""

    def lower(_: Any, b: Builder, _signature: Any, args: Any) -> Any:
        at, scale, out = args
        for i in range(0, MXFP4_GROUP // 2, LANES):
            pair = b.zext(load(b, b.add(at, I64(i)), vector(I8)), vector(I32))
            halves = [
                b.fmul(_e2m1(b, code), splat(b, scale))
                for code in (b.and_(pair, constant(I32, 0xF)), b.lshr(pair, constant(I32, 4)))
            ]
            for j, numbers in enumerate(_in_turn(b, *halves)):
                store(b, numbers, b.add(out, I64(4 * (2 * i + LANES * j))))
        return I32(0)

    return types.int32(types.intp, types.float32, types.intp), lower


def _e2m1(b: Builder, code: Any) -> Any:
    """Numbers of codes below 16. The least but zero is set apart: as a subnormal it would take processors long."""
    magnitude = b.and_(code, constant(I32, 7))
    normal = b.add(b.shl(magnitude, constant(I32, 22)), constant(I32, 126 << 23))
    least = b.and_(b.neg(magnitude), constant(I32, 126 << 23))  # of 0 and 1: 0 and 0.5
    small = b.icmp_signed("<", magnitude, constant(I32, 2))
    return _signed(b, b.select(small, least, normal), code, 3)


def _signed(b: Builder, magnitude: Any, code: Any, sign: int) -> Any:
    """Bits of magnitudes as numbers, with the sign that is bit `sign` of a code."""
    negative = b.shl(b.lshr(code, constant(I32, sign)), constant(I32, 31))
    return b.bitcast(b.or_(magnitude, negative), VECTOR)


def _in_turn(b: Builder, low: Any, high: Any) -> Iterator[Any]:
    """low 0, high 0, low 1, ... as two vectors."""
    for start in (0, LANES // 2):
        order = [i + LANES * odd for i in range(start, start + LANES // 2) for odd in (0, 1)]
        yield b.shuffle_vector(low, high, ir.Constant(vector(I32), order))


@intrinsic
def bytes_at(_context, address):
    """A pointer to bytes from an address."""

    def lower(context: Any, b: Builder, signature: Any, args: Any) -> Any:
        return b.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.uint8)(types.intp), lower
