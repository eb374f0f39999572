"""The compiled loops over tokens by themselves: hyper-connections, norms, rotation, rows into slots. In float32."""

# ruff: noqa: PLR0917 - a compiled loop takes each address and stride, by position

from __future__ import annotations

import numpy as np
from numba import carray

from splitserve.ops.cpu.compiled import ANY_ORDER, compiled
from splitserve.ops.cpu.memory import give_back, take_floats
from splitserve.ops.cpu.products import plain_product
from splitserve.ops.cpu.vector import floats_at, integers_at

_ONE = np.float32(1)


@compiled()
def hc_pre(streams, tokens, n, size, fn, base, scale, iters, eps, norm_eps, x, post, comb):
    """x [T, size], post [T, n] and comb [T, n, n] of `streams` [T, n, size]; see ops/ref/v4/hyper.py."""
    count = 2 * n + n * n
    mixes_at, pre_at = take_floats(count), take_floats(n)
    mixes, pre = carray(floats_at(mixes_at), count), carray(floats_at(pre_at), n)
    by, shift = carray(floats_at(scale), 3), carray(floats_at(base), count)
    for t in range(tokens):
        at = streams + 4 * t * n * size
        plain_product(at, n * size, 1, fn, 4 * n * size, count, n * size, mixes_at, count)
        shrink = _inverse_root(at, n * size, np.float32(norm_eps))
        for i in range(count):
            mixes[i] *= shrink
        spread = carray(floats_at(post + 4 * t * n), n)
        swap = carray(floats_at(comb + 4 * t * n * n), (n, n))
        _split(mixes, shift, by, n, iters, np.float32(eps), pre, spread, swap)
        _weigh(at, pre_at, n, size, x + 4 * t * size)
    give_back(mixes_at)
    give_back(pre_at)


@compiled(fastmath=ANY_ORDER)
def _inverse_root(x, count, eps):
    """Of the mean square of `count` numbers."""
    v = floats_at(x)
    total = np.float32(0)
    for i in range(count):
        total += v[i] * v[i]
    return _ONE / np.sqrt(total / np.float32(count) + eps)


@compiled()
def _split(mixes, base, scale, n, iters, eps, pre, post, comb):
    for j in range(n):
        pre[j] = _ONE / (_ONE + np.exp(-(mixes[j] * scale[0] + base[j]))) + eps
        post[j] = np.float32(2) / (_ONE + np.exp(-(mixes[n + j] * scale[1] + base[n + j])))
        for k in range(n):
            at = 2 * n + j * n + k
            comb[j, k] = mixes[at] * scale[2] + base[at]
    _softmax(comb, eps)
    for turn in range(iters):
        if turn:
            _divide_rows(comb, eps)
        _divide_columns(comb, eps)


@compiled()
def _softmax(c, eps):
    """Of each row of `c` [n, n], plus eps."""
    for j in range(c.shape[0]):
        best, total = c[j].max(), np.float32(0)
        for k in range(c.shape[1]):
            c[j, k] = np.exp(c[j, k] - best)
            total += c[j, k]
        for k in range(c.shape[1]):
            c[j, k] = c[j, k] / total + eps


@compiled()
def _divide_rows(c, eps):
    """Each row of `c` [n, n] by its sum and eps."""
    for j in range(c.shape[0]):
        total = np.float32(0)
        for k in range(c.shape[1]):
            total += c[j, k]
        for k in range(c.shape[1]):
            c[j, k] /= total + eps


@compiled()
def _divide_columns(c, eps):
    for k in range(c.shape[1]):
        total = np.float32(0)
        for j in range(c.shape[0]):
            total += c[j, k]
        for j in range(c.shape[0]):
            c[j, k] /= total + eps


@compiled()
def hc_post(y, streams, tokens, n, size, post, comb, out):
    """out[t, k] = post[t, k] y[t] + sum over j of comb[t, j, k] streams[t, j]."""
    for t in range(tokens):
        for k in range(n):
            to = out + 4 * (t * n + k) * size
            _weigh_one(y + 4 * t * size, floats_at(post)[t * n + k], size, to, False)
            for j in range(n):
                by = floats_at(comb)[(t * n + j) * n + k]
                _weigh_one(streams + 4 * (t * n + j) * size, by, size, to, True)


@compiled()
def _weigh(rows, weights, n, size, out):
    """out [size] = sum over n rows of weight times row."""
    for j in range(n):
        _weigh_one(rows + 4 * j * size, floats_at(weights)[j], size, out, j > 0)


@compiled()
def _weigh_one(row, by, size, out, add):
    v, o = floats_at(row), floats_at(out)
    if add:
        for c in range(size):
            o[c] += by * v[c]
    else:
        for c in range(size):
            o[c] = by * v[c]


@compiled(fastmath=ANY_ORDER)
def rms_norm(x, rows, size, weight, eps, out):
    """out = x / sqrt(mean(x^2) + eps) * weight for rows without gaps; `weight` 0: none."""
    for r in range(rows):
        at = x + 4 * r * size
        scale = _inverse_root(at, size, np.float32(eps))
        v, o = floats_at(at), floats_at(out + 4 * r * size)
        if weight:
            w = floats_at(weight)
            for c in range(size):
                o[c] = v[c] * scale * w[c]
        else:
            for c in range(size):
                o[c] = v[c] * scale


@compiled()
def rotate_tail(x, tokens, heads, d, cos, sin, pairs, sign, out):
    """out = x with the last numbers of each head, neighbours as pairs, turned by its token's angles."""
    first = d - 2 * pairs
    for t in range(tokens):
        c, s = floats_at(cos + 4 * t * pairs), floats_at(sin + 4 * t * pairs)
        for h in range(heads):
            at = 4 * (t * heads + h) * d
            v, o = floats_at(x + at), floats_at(out + at)
            for i in range(first):
                o[i] = v[i]
            for i in range(pairs):
                even, odd = v[first + 2 * i], v[first + 2 * i + 1]
                o[first + 2 * i] = even * c[i] - odd * (s[i] * sign)
                o[first + 2 * i + 1] = even * (s[i] * sign) + odd * c[i]


@compiled()
def write_rows(view, unit_stride, row_stride, rows, row_gap, count, size, unit, row):
    """view[unit[i], row[i]] = rows[i] for units that are not -1; `row_gap` numbers from one row to the next."""
    units, places = integers_at(unit), integers_at(row)
    for i in range(count):
        if units[i] < 0:
            continue
        v, o = (
            floats_at(rows + 4 * i * row_gap),
            floats_at(view + 4 * (units[i] * unit_stride + places[i] * row_stride)),
        )
        for c in range(size):
            o[c] = v[c]
