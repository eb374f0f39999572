"""Attention over listed rows, and ratings of index keys, for one token after the other. In float32.

What a token's list names is copied side by side and then met as by ops/cpu/paged.py: a token's numbers are the same
bits whatever else is in the batch, and rows that nobody names are never read.
"""

# ruff: noqa: PLR0917 - a compiled loop takes each address and stride, by position

from __future__ import annotations

import numpy as np

from splitserve.ops.cpu.compiled import ANY_ORDER, compiled
from splitserve.ops.cpu.elementwise import exp
from splitserve.ops.cpu.memory import give_back, take_floats
from splitserve.ops.cpu.paged import mix
from splitserve.ops.cpu.products import plain_product
from splitserve.ops.cpu.vector import floats_at, integers_at


@compiled()
def attend(q, tokens, heads, size, near, far, sink, scale, out):
    """out[t, h]: softmax over the rows that token t lists in `near` and `far`, and the head's sink.

    A source is (view, unit stride, row stride, rows of a unit, lists, their length); strides in numbers.
    """
    most = near[5] + far[5]
    latents, weights = take_floats(most * size), take_floats(heads * most)
    for t in range(tokens):
        at, to = q + 4 * t * heads * size, out + 4 * t * heads * size
        count = _gather(near, t, size, latents)
        count += _gather(far, t, size, latents + 4 * count * size)
        zero = floats_at(to)
        for i in range(heads * size):
            zero[i] = 0
        if count == 0:
            continue
        plain_product(at, size, heads, latents, 4 * size, count, size, weights, most)
        for h in range(heads):
            _softmax(weights + 4 * h * most, count, scale, floats_at(sink)[h])
        mix(weights, most, heads, latents, size, count, size, to, size)
    give_back(latents)
    give_back(weights)


@compiled()
def _gather(source, t, size, to):
    """Copy the rows of token t's list; returns how many it names."""
    view, unit_stride, row_stride, per_unit, lists, length = source
    index = integers_at(lists + 8 * t * length)
    count = 0
    for i in range(length):
        if index[i] < 0:
            continue
        unit, row = index[i] // per_unit, index[i] % per_unit
        src = floats_at(view + 4 * (unit * unit_stride + row * row_stride))
        dst = floats_at(to + 4 * count * size)
        for c in range(size):
            dst[c] = src[c]
        count += 1
    return count


@compiled(fastmath=ANY_ORDER)
def _softmax(row, count, scale, sink):
    """row[:count] to weights that, with the sink's, add up to one."""
    s = floats_at(row)
    factor = np.float32(scale)
    best = sink
    for i in range(count):
        best = max(best, s[i] * factor)
    total = exp(sink - best)
    for i in range(count):
        s[i] = exp(s[i] * factor - best)
    for i in range(count):
        total += s[i]
    share = np.float32(1) / total
    for i in range(count):
        s[i] *= share


@compiled()
def rate(
    q,
    tokens,
    heads,
    size,
    weights,
    keys,
    unit_stride,
    row_stride,
    per_unit,
    pages,
    pages_stride,
    seen,
    out,
    longest,
):
    """out[t, i] = sum over heads of weight relu(q . key) for the first seen[t] entries of token t's pages."""
    scores = take_floats(heads * per_unit)
    for t in range(tokens):
        page, count = integers_at(pages + 8 * t * pages_stride), integers_at(seen)[t]
        at = q + 4 * t * heads * size
        for first in range(0, count, per_unit):
            n = min(per_unit, count - first)
            here = keys + 4 * page[first // per_unit] * unit_stride
            plain_product(at, size, heads, here, 4 * row_stride, n, size, scores, per_unit)
            _add_up(scores, heads, n, per_unit, weights + 4 * t * heads, out + 4 * (t * longest + first))
    give_back(scores)


@compiled()
def _add_up(scores, heads, n, stride, weights, out):
    s, w, o = floats_at(scores), floats_at(weights), floats_at(out)
    for i in range(n):
        o[i] = 0
    for h in range(heads):
        for i in range(n):
            o[i] += w[h] * max(s[h * stride + i], np.float32(0))
