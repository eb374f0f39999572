"""Few rows of inputs through weights in codes: a panel of rows is widened and met by all inputs while in the cache.

A row of a result is the same bits whatever other rows are there (ops/cpu/vector.py).
"""

# ruff: noqa: PLR0917 - a compiled loop takes each address and stride, by position

from __future__ import annotations

import numpy as np

from splitserve.ops.cpu.compiled import compiled
from splitserve.ops.cpu.elementwise import exp
from splitserve.ops.cpu.memory import give_back, take_floats, take_integers
from splitserve.ops.cpu.products import PANEL, plain_product
from splitserve.ops.cpu.vector import floats_at, integers_at

from .codes import widen_rows


@compiled()
def product(x, x_stride, m, weight, n, k, out, out_stride):
    """out[i, j] = x[i] . w[j] for m rows of x and n rows of `weight` (see quant.address), of k numbers."""
    panel = take_floats(PANEL * k)
    for j in range(0, n, PANEL):
        count = min(PANEL, n - j)
        widen_rows(weight, j, count, k, panel)
        plain_product(x, x_stride, m, panel, 4 * k, count, k, out + 4 * j, out_stride)
    give_back(panel)


@compiled()
def grouped(x, x_token, x_group, m, weight, groups, n, k, out):
    """out[i, g, j] = x[i, g] . w[g n + j] for each of `groups`; `x_token` and `x_group` are strides."""
    panel = take_floats(PANEL * k)
    for g in range(groups):
        for j in range(0, n, PANEL):
            count = min(PANEL, n - j)
            widen_rows(weight, g * n + j, count, k, panel)
            to = out + 4 * (g * n + j)
            plain_product(x + 4 * g * x_group, x_token, m, panel, 4 * k, count, k, to, groups * n)
    give_back(panel)


@compiled()
def _ffn(x, m, hidden, gate_up, down, inner, limit, weights, out):
    """out[i] = down(silu(min(gate, limit)) clamp(up) weights[i]), gate and up being gate_up(x[i]); `inner` wide."""
    wide = take_floats(m * 2 * inner)
    product(x, hidden, m, gate_up, 2 * inner, hidden, wide, 2 * inner)
    _swiglu(wide, m, inner, limit, weights)
    product(wide, 2 * inner, m, down, hidden, inner, out, hidden)
    give_back(wide)


@compiled()
def mix(
    x, m, hidden, gate_up, gate_up_bytes, down, down_bytes, inner, limit, weights, experts, count, held, out
):
    """out[i] = sum of the experts `held` (from, to) that token i chose, each run once over all its tokens.

    `gate_up` and `down` are the first expert's; to the next one it is so many bytes of codes, and of scales.
    """
    chosen, share, o, v = integers_at(experts), floats_at(weights), floats_at(out), floats_at(x)
    most = m * count
    tokens_at, by_at = take_integers(most), take_floats(most)
    rows_at, y_at = take_floats(most * hidden), take_floats(most * hidden)
    token, by, rows, y = integers_at(tokens_at), floats_at(by_at), floats_at(rows_at), floats_at(y_at)
    for i in range(m * hidden):
        o[i] = 0
    for expert in range(held[0], held[1]):
        size = 0
        for i in range(most):
            if chosen[i] == expert:
                token[size], by[size] = i // count, share[i]
                for c in range(hidden):
                    rows[size * hidden + c] = v[i // count * hidden + c]
                size += 1
        if size == 0:
            continue
        place = expert - held[0]
        _ffn(
            rows_at, size, hidden, _moved(gate_up, gate_up_bytes, place), _moved(down, down_bytes, place),
            inner, limit, by_at, y_at,
        )  # fmt: skip
        for i in range(size):
            for c in range(hidden):
                o[token[i] * hidden + c] += y[i * hidden + c]
    give_back(tokens_at)
    give_back(by_at)
    give_back(rows_at)
    give_back(y_at)


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
