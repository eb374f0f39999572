"""Matrix products with few or many rows of inputs: each weight is read from memory once, whatever its form.

    inputs [m, k]      weights [n, k], a panel of rows at a time      results [m, n]
    m <= 4             weights become float32 in registers
    m > 4              ... in a scratch panel that stays in the cache while all inputs pass by

The results are the same bits on every way through here (see vector.py).
"""

# ruff: noqa: PLR0917 - a compiled loop takes each address and stride, by position

from __future__ import annotations

import numpy as np

from .compiled import compiled
from .formats import BF16_ROWS, CODED, F16_ROWS, F32_ROWS, GROUP, SCALES_BYTES
from .llvm import LANES
from .vector import dot_tile, unpack_step

PANEL = 12  # rows of weights: three tiles of four or four of three; 27 KB of 576 numbers
FEW = 4  # rows of inputs that are one tile, so that each weight is widened once anyway

# Tiles, weights x inputs. Twelve sums of eight lanes, three rows of weights and one of inputs fill the sixteen vector
# registers of AVX2; with one or two inputs, four rows of weights hide the latency of their sums.
_dot_4x1, _dot_4x2 = dot_tile(4, 1, ahead=2), dot_tile(4, 2, ahead=2)
_dot_3x3, _dot_3x4 = dot_tile(3, 3, ahead=1), dot_tile(3, 4, ahead=1)
_dot_1x1, _dot_1x2, _dot_1x3, _dot_1x4 = (dot_tile(1, m) for m in (1, 2, 3, 4))
_unpack_f16, _unpack_bf16, _unpack_coded = (unpack_step(form) for form in (F16_ROWS, BF16_ROWS, CODED))


@compiled()
def product(form, x, x_stride, m, w, w_bytes, n, k, out, out_stride, scales, scale_bytes):
    """out[i, j] = x[i] . w[j] for m rows of x and n rows of w of k numbers; scales and scale_bytes where CODED."""
    widen = form != F32_ROWS and m > FEW
    scratch = np.empty(PANEL * k if widen else 0, dtype=np.float32)
    for j in range(0, n, PANEL):
        count = min(PANEL, n - j)
        panel, panel_form, panel_bytes = w + j * w_bytes, form, w_bytes
        if widen:
            panel, panel_form, panel_bytes = scratch.ctypes.data, F32_ROWS, 4 * k
            for i in range(count):
                _unpack(
                    form, w + (j + i) * w_bytes, k, panel + i * panel_bytes, scales + (j + i) * scale_bytes
                )
        _panel(
            panel_form, x, x_stride, m, panel, panel_bytes, count, k, out + 4 * j, out_stride,
            scales + j * scale_bytes, scale_bytes,
        )  # fmt: skip


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


@compiled()
def _unpack(form, w, k, out, scales):
    """One row of k numbers to float32."""
    if form == CODED:
        for j in range(0, k, GROUP):
            _unpack_coded(w + j, scales + j // GROUP * SCALES_BYTES, out + 4 * j)
    elif form == BF16_ROWS:
        for j in range(0, k, LANES):
            _unpack_bf16(w + 2 * j, 0, out + 4 * j)
    else:
        for j in range(0, k, LANES):
            _unpack_f16(w + 2 * j, 0, out + 4 * j)
