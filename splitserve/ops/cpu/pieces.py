"""One piece of each kind of loop that threads share (shared.py), from the words that describe the loop.

All of it is one function behind an address: whoever shares loops need not hold, or compile, the loops themselves.
"""

from __future__ import annotations

from functools import cache

from numba import types

from . import elementwise, paged, products
from .atomics import get
from .compiled import compiled, entry
from .vector import floats_at

PRODUCT, SWIGLU, ATTEND, GATED, NORM, PLACE = range(6)
"""Kinds of loops. The words of each: the arguments of what it calls."""


@cache
def address() -> int:
    """Of `do`, for atomics.call. Compiles it, or finds it on disk."""
    return int(entry(types.void(*[types.intp] * 5))(do).address)


def do(kind, step, total, piece, a):
    """Piece number `piece` of `total`, of `step` rows (products: step_from), of the loop whose words are at `a`."""
    if kind == PRODUCT:
        _product(a, step, piece)
    elif kind == GATED:
        _gated(a, step, piece)
    elif kind == ATTEND:
        _attend(a, piece, total)
    elif kind == NORM:
        _norm(a, step, piece)
    elif kind == PLACE:
        _place(a, step, piece)
    else:
        _swiglu(a, step, piece)


@compiled(inline="always")
def _swiglu(a, step, piece):
    gate_up, m, n, out, out_stride = get(a, 0), get(a, 1), get(a, 2), get(a, 3), get(a, 4)
    first = piece * step
    rows = min(step, m - first)
    elementwise.swiglu(gate_up + 8 * n * first, rows, n, out + 4 * out_stride * first, out_stride)


_BITS = 24  # of rows


@compiled()
def step_from(count, large, small):
    """Pieces of a product as one word: `count` of `large` rows each, then some of `small` rows."""
    return (count << 2 * _BITS | large << _BITS | small) if large else small


@compiled()
def pieces_of(n, step):
    """Number of pieces that n rows are."""
    count, large, small = step >> 2 * _BITS, step >> _BITS & (1 << _BITS) - 1, step & (1 << _BITS) - 1
    return count + (n - count * large + small - 1) // small


@compiled()
def first_row(step, piece):
    """Where a piece begins, which is where the one before it ends."""
    count, large, small = step >> 2 * _BITS, step >> _BITS & (1 << _BITS) - 1, step & (1 << _BITS) - 1
    return min(piece, count) * large + max(piece - count, 0) * small


@compiled(inline="always")
def _product(a, step, piece):
    w_bytes, n, scale_bytes = get(a, 5), get(a, 6), get(a, 11)
    first = first_row(step, piece)
    rows = min(first_row(step, piece + 1), n) - first
    products.product(
        get(a, 0), get(a, 1), get(a, 2), get(a, 3),
        get(a, 4) + first * w_bytes, w_bytes, rows, get(a, 7),
        get(a, 8) + 4 * first, get(a, 9), get(a, 10) + first * scale_bytes, scale_bytes,
    )  # fmt: skip


@compiled(inline="always")
def _gated(a, step, piece):
    w_bytes, n, scale_bytes = get(a, 5), get(a, 6), get(a, 11)
    first = first_row(step, piece)
    rows = min(first_row(step, piece + 1), n) - first
    products.gated(
        get(a, 0), get(a, 1), get(a, 2), get(a, 3),
        get(a, 4) + first * w_bytes, w_bytes, n, rows, get(a, 7),
        get(a, 8) + 4 * first, get(a, 9), get(a, 10) + first * scale_bytes, scale_bytes, get(a, 12), first,
    )  # fmt: skip


@compiled(inline="always")
def _attend(a, piece, total):
    scale = floats_at(a + 8 * 17)[0]
    paged.attend(
        get(a, 0), get(a, 1), get(a, 2), get(a, 3), (get(a, 4), get(a, 5), get(a, 6)),
        get(a, 7), get(a, 8), get(a, 9), get(a, 10),
        (get(a, 11), get(a, 12), get(a, 13), get(a, 14), get(a, 15)),
        get(a, 16), scale, get(a, 18), piece, total,
    )  # fmt: skip


@compiled(inline="always")
def _norm(a, step, piece):
    x, y, m, n, weight, total, out = (
        get(a, 0), get(a, 1), get(a, 2), get(a, 3), get(a, 4), get(a, 6), get(a, 7)
    )  # fmt: skip
    eps = floats_at(a + 8 * 5)[0]
    first = piece * step
    past, count = 4 * n * first, min(step, m - first)
    if y == 0:
        elementwise.rms_norm(x + past, n, count, n, weight, eps, out + past)
    else:
        elementwise.add_rms_norm(x + past, y + past, count, n, weight, eps, total + past, out + past)


@compiled(inline="always")
def _place(a, step, piece):
    """Keys and queries normed where they are, and turned, keys and values into their pages, for some of the tokens."""
    qkv, m, kv_heads, size = get(a, 0), get(a, 1), get(a, 3), get(a, 4)
    turning = get(a, 2) + kv_heads
    width = (turning + kv_heads) * size
    first = piece * step
    count = min(step, m - first)
    rows, angles = qkv + 4 * first * width, 2 * first * size
    turned = get(a, 7) + 4 * first * turning * size
    if get(a, 14) != 0:
        eps = floats_at(a + 8 * 16)[0]
        for t in range(count):
            row = rows + 4 * t * width
            keys = row + 4 * get(a, 2) * size
            elementwise.rms_norm(row, size, get(a, 2), size, get(a, 14), eps, row)
            elementwise.rms_norm(keys, size, kv_heads, size, get(a, 15), eps, keys)
    elementwise.rotate(
        rows, width, size, count, turning, size // 2, get(a, 5) + angles, get(a, 6) + angles, turned
    )
    elementwise.write_rows(
        get(a, 8), get(a, 9), get(a, 10), get(a, 11),
        turned + 4 * get(a, 2) * size, turning * size, size, rows + 4 * turning * size, width, size,
        get(a, 12) + 8 * first, get(a, 13) + 8 * first, (count, kv_heads, size),
    )  # fmt: skip
