"""Matrix products with few or many rows of inputs: each weight is read from memory once, whatever its form.

    inputs [m, k]      weights [n, k], a panel of rows at a time      results [m, n]
    m < 4              weights become float32 in registers
    m < 16             ... again for every four inputs, which is less work than keeping them anywhere
    else               ... turned into columns (see outer.py)

The results are the same bits on every way through here (see vector.py).
"""

# ruff: noqa: PLR0917 - a compiled loop takes each address and stride, by position

from __future__ import annotations

from .compiled import compiled
from .elementwise import swiglu
from .formats import BF16_ROWS, CODED, F16_ROWS, F32_ROWS, GROUP, SCALES_BYTES
from .llvm import LANES
from .memory import give_back, take_floats
from .outer import VECTOR_BYTES, finish_tile, outer_tile, pack_step
from .vector import STRETCH, dot_tile, floats_at

PANEL = 12  # rows of weights: three tiles of four or four of three; 27 KB of 576 numbers
FEW = 4  # rows of inputs from which on pairs of weights are best, if those are to be widened
MANY = 16  # rows of inputs from which on it pays to turn weights
# Columns of one tile of outer products. With four rows of inputs: twelve sums, three weights and an input, which fill
# the sixteen vector registers of AVX2.
_ROWS, _VECTORS = 4, 3
COLUMNS = _VECTORS * LANES
_AT_ONCE = 4  # steps of a loop's turn

# Tiles, weights x inputs. Twelve sums of eight lanes, three rows of weights and one of inputs fill the sixteen vector
# registers of AVX2; with one or two inputs, four rows of weights hide the latency of their sums.
_dot_4x1, _dot_4x2 = dot_tile(4, 1, ahead=2), dot_tile(4, 2, ahead=2)
_dot_2x4 = dot_tile(2, 4, ahead=2)
_dot_3x3, _dot_3x4 = dot_tile(3, 3, ahead=1), dot_tile(3, 4, ahead=1)
_dot_1x1, _dot_1x2, _dot_1x3, _dot_1x4 = (dot_tile(1, m) for m in (1, 2, 3, 4))
_outer = outer_tile(_ROWS, _VECTORS, _AT_ONCE)
_outer_end = outer_tile(_ROWS, _VECTORS, 1)
_finish = finish_tile(_ROWS, _VECTORS)
_pack_f32, _pack_f16, _pack_bf16, _pack_coded = (
    pack_step(form) for form in (F32_ROWS, F16_ROWS, BF16_ROWS, CODED)
)


@compiled()
def product(form, x, x_stride, m, w, w_bytes, n, k, out, out_stride, scales, scale_bytes):
    """out[i, j] = x[i] . w[j] for m rows of x and n rows of w of k numbers; scales and scale_bytes where CODED."""
    if m >= MANY and n >= COLUMNS:
        _many(form, x, x_stride, m, w, w_bytes, n, k, out, out_stride, scales, scale_bytes)
        return
    if form != F32_ROWS and m >= FEW and n > 1:
        _pairs(form, x, x_stride, m, w, w_bytes, n, k, out, out_stride, scales, scale_bytes)
        return
    for j in range(0, n, PANEL):
        _panel(
            form, x, x_stride, m, w + j * w_bytes, w_bytes, min(PANEL, n - j), k, out + 4 * j, out_stride,
            scales + j * scale_bytes, scale_bytes,
        )  # fmt: skip


@compiled(inline="always")
def _pairs(form, x, x_stride, m, w, w_bytes, n, k, out, out_stride, scales, scale_bytes):
    """`product` with more than three rows of inputs; tiles that would stand out are moved back, as in _many."""
    for pair in range(0, n, 2):
        j = min(pair, n - 2)
        for tile in range(0, m, 4):
            row = min(tile, m - 4)
            _dot_2x4(
                form, x + 4 * row * x_stride, x_stride, w + j * w_bytes, w_bytes, k,
                out + 4 * (row * out_stride + j), out_stride, scales + j * scale_bytes, scale_bytes,
            )  # fmt: skip


@compiled(inline="always")
def gated(form, x, x_stride, m, w, w_bytes, inner, n, k, out, out_stride, scales, scale_bytes, bias, first):
    """out[i, j] = silu(x[i] . w[j]) (x[i] . w[inner + j]) for n columns: a gate and what it lets through.

    `bias`, of gates and then of the others, is added to either where it is not 0; column 0 is its number `first`.
    """
    both = take_floats(2 * m * n)
    for half in range(2):
        past = half * inner
        product(
            form, x, x_stride, m, w + past * w_bytes, w_bytes, n, k,
            both + 4 * half * n, 2 * n, scales + past * scale_bytes, scale_bytes,
        )  # fmt: skip
    if bias != 0:
        o = floats_at(both)
        more = floats_at(bias)
        for i in range(m):
            for j in range(n):
                o[2 * i * n + j] += more[first + j]
                o[2 * i * n + n + j] += more[inner + first + j]
    swiglu(both, m, n, out, out_stride)
    give_back(both)


@compiled(inline="always")
def _many(form, x, x_stride, m, w, w_bytes, n, k, out, out_stride, scales, scale_bytes):
    """`product` in whole tiles: those that would stand out are moved back, over results they compute again."""
    columns = take_floats(COLUMNS * k + LANES * _ROWS * COLUMNS)
    sums = columns + 4 * COLUMNS * k
    zeros = floats_at(sums)
    for i in range(LANES * _ROWS * COLUMNS):
        zeros[i] = 0
    for panel in range(0, n, COLUMNS):
        j = min(panel, n - COLUMNS)
        _pack(form, w + j * w_bytes, w_bytes, k, scales + j * scale_bytes, scale_bytes, columns)
        for tile in range(0, m, _ROWS):
            row = min(tile, m - _ROWS)
            for first in range(0, k, STRETCH):
                steps = min(STRETCH, k - first) // LANES
                here, there = x + 4 * (row * x_stride + first), columns + 4 * COLUMNS * first
                if steps % _AT_ONCE == 0:
                    _outer(here, x_stride, there, steps, sums)
                else:
                    _outer_end(here, x_stride, there, steps, sums)
            _finish(sums, out + 4 * (row * out_stride + j), out_stride)
    give_back(columns)


@compiled(inline="always")
def _pack(form, w, w_bytes, k, scales, scale_bytes, columns):
    """COLUMNS rows of k numbers, turned, stretch after stretch."""
    step_bytes = _VECTORS * VECTOR_BYTES
    for first in range(0, k, STRETCH):
        stop = min(first + STRETCH, k)
        lane_bytes = (stop - first) // LANES * step_bytes
        for row in range(0, COLUMNS, LANES):
            at, its = w + row * w_bytes, scales + row * scale_bytes
            to = columns + 4 * COLUMNS * first + 4 * row
            if form == CODED:
                for j in range(first, stop, GROUP):
                    scale = its + j // GROUP * SCALES_BYTES
                    there = to + (j - first) // LANES * step_bytes
                    _pack_coded(at + j, w_bytes, scale, scale_bytes, there, lane_bytes, step_bytes)
            else:
                for j in range(first, stop, LANES):
                    there = to + (j - first) // LANES * step_bytes
                    if form == F32_ROWS:
                        _pack_f32(at + 4 * j, w_bytes, 0, 0, there, lane_bytes, step_bytes)
                    elif form == BF16_ROWS:
                        _pack_bf16(at + 2 * j, w_bytes, 0, 0, there, lane_bytes, step_bytes)
                    else:
                        _pack_f16(at + 2 * j, w_bytes, 0, 0, there, lane_bytes, step_bytes)


@compiled()
def plain_product(x, x_stride, m, w, w_bytes, n, k, out, out_stride):
    """`product` with float32 rows."""
    for j in range(0, n, PANEL):
        at, count = w + j * w_bytes, min(PANEL, n - j)
        _panel(F32_ROWS, x, x_stride, m, at, w_bytes, count, k, out + 4 * j, out_stride, 0, 0)


@compiled()
def streaming_product(x, x_stride, m, w, w_bytes, n, k, out, out_stride):
    """`plain_product` for few inputs and rows with gaps between them: one after the other, as hardware expects."""
    for j in range(n):
        at = w + j * w_bytes
        for i in range(0, m, 4):
            here, to, left = x + 4 * i * x_stride, out + 4 * (i * out_stride + j), m - i
            if left >= 4:
                _dot_1x4(F32_ROWS, here, x_stride, at, 0, k, to, out_stride, 0, 0)
            elif left == 3:
                _dot_1x3(F32_ROWS, here, x_stride, at, 0, k, to, out_stride, 0, 0)
            elif left == 2:
                _dot_1x2(F32_ROWS, here, x_stride, at, 0, k, to, out_stride, 0, 0)
            else:
                _dot_1x1(F32_ROWS, here, x_stride, at, 0, k, to, out_stride, 0, 0)


@compiled()
def _panel(form, x, x_stride, m, w, w_bytes, n, k, out, out_stride, scales, scale_bytes):
    """`product` with at most PANEL rows of weights: they stay in the cache while the inputs pass by."""
    row = 0
    while row < m:
        here, there = x + 4 * row * x_stride, out + 4 * row * out_stride
        left = min(m - row, 4)
        step = 3 if left > 2 else 4
        whole = n // step * step
        for j in range(0, whole, step):
            at, its, to = w + j * w_bytes, scales + j * scale_bytes, there + 4 * j
            if left == 4:
                _dot_3x4(form, here, x_stride, at, w_bytes, k, to, out_stride, its, scale_bytes)
            elif left == 3:
                _dot_3x3(form, here, x_stride, at, w_bytes, k, to, out_stride, its, scale_bytes)
            elif left == 2:
                _dot_4x2(form, here, x_stride, at, w_bytes, k, to, out_stride, its, scale_bytes)
            else:
                _dot_4x1(form, here, x_stride, at, w_bytes, k, to, out_stride, its, scale_bytes)
        for i in range(left):
            for j in range(whole, n):
                to = there + 4 * (i * out_stride + j)
                _dot_1x1(
                    form,
                    here + 4 * i * x_stride,
                    0,
                    w + j * w_bytes,
                    0,
                    k,
                    to,
                    0,
                    scales + j * scale_bytes,
                    0,
                )
        row += left
