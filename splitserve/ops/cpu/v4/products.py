"""Few rows of inputs through weights in codes: a panel of rows is widened and met by all inputs while in the cache.

A row of a result is the same bits whatever other rows are there (ops/cpu/vector.py).
"""

# ruff: noqa: PLR0917 - a compiled loop takes each address and stride, by position

from __future__ import annotations

import numpy as np

from splitserve.ops.cpu.compiled import compiled
from splitserve.ops.cpu.elementwise import exp
from splitserve.ops.cpu.products import PANEL, plain_product
from splitserve.ops.cpu.vector import floats_at, integers_at

from .codes import widen_rows


@compiled()
def product(x, x_stride, m, weight, n, k, out, out_stride):
    """out[i, j] = x[i] . w[j] for m rows of x and n rows of `weight` (see quant.address), of k numbers."""
    panel = np.empty(PANEL * k, dtype=np.float32)
    for j in range(0, n, PANEL):
        count = min(PANEL, n - j)
        widen_rows(weight, j, count, k, panel.ctypes.data)
        plain_product(x, x_stride, m, panel.ctypes.data, 4 * k, count, k, out + 4 * j, out_stride)


@compiled()
def grouped(x, x_token, x_group, m, weight, groups, n, k, out):
    """out[i, g, j] = x[i, g] . w[g n + j] for each of `groups`; `x_token` and `x_group` are strides."""
    panel = np.empty(PANEL * k, dtype=np.float32)
    for g in range(groups):
        for j in range(0, n, PANEL):
            count = min(PANEL, n - j)
            widen_rows(weight, g * n + j, count, k, panel.ctypes.data)
            to = out + 4 * (g * n + j)
            plain_product(x + 4 * g * x_group, x_token, m, panel.ctypes.data, 4 * k, count, k, to, groups * n)


@compiled()
def _ffn(x, m, hidden, gate_up, down, inner, limit, weights, out):
    """out[i] = down(silu(min(gate, limit)) clamp(up) weights[i]), gate and up being gate_up(x[i]); `inner` wide."""
    wide = np.empty(m * 2 * inner, dtype=np.float32)
    product(x, hidden, m, gate_up, 2 * inner, hidden, wide.ctypes.data, 2 * inner)
    _swiglu(wide.ctypes.data, m, inner, limit, weights)
    product(wide.ctypes.data, 2 * inner, m, down, hidden, inner, out, hidden)


@compiled()
def mix(
    x, m, hidden, gate_up, gate_up_bytes, down, down_bytes, inner, limit, weights, experts, count, held, out
):
    """out[i] = sum of the experts `held` (from, to) that token i chose, each run once over all its tokens.

    `gate_up` and `down` are the first expert's; to the next one it is so many bytes of codes, and of scales.
    """
    chosen, share, o, v = integers_at(experts), floats_at(weights), floats_at(out), floats_at(x)
    most = m * count
    token, by = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.float32)
    rows, y = np.empty((most, hidden), dtype=np.float32), np.empty((most, hidden), dtype=np.float32)
    for i in range(m * hidden):
        o[i] = 0
    for expert in range(held[0], held[1]):
        size = 0
        for i in range(most):
            if chosen[i] == expert:
                token[size], by[size] = i // count, share[i]
                for c in range(hidden):
                    rows[size, c] = v[i // count * hidden + c]
                size += 1
        if size == 0:
            continue
        place = expert - held[0]
        _ffn(
            rows.ctypes.data, size, hidden, _moved(gate_up, gate_up_bytes, place), _moved(down, down_bytes, place),
            inner, limit, by.ctypes.data, y.ctypes.data,
        )  # fmt: skip
        for i in range(size):
            for c in range(hidden):
                o[token[i] * hidden + c] += y[i, c]


@compiled(inline="always")
def _moved(weight, num_bytes, by):
    """A stack's matrix number `by`."""
    form, codes, scales, scales_row, powers, rows, group = weight
    return form, codes + by * num_bytes[0], scales + by * num_bytes[1], scales_row, powers, rows, group


@compiled()
def _swiglu(wide, m, inner, limit, weights):
    """Over the first half of each row: gate and up as one, times the row's weight."""
    w, v = floats_at(weights), floats_at(wide)
    most = np.float32(limit)
    for i in range(m):
        at = i * 2 * inner
        for c in range(inner):
            gate, up = min(v[at + c], most), max(min(v[at + inner + c], most), -most)
            v[at + c] = gate / (np.float32(1) + exp(-gate)) * up * w[i]
