"""Attention over pages where they lie, in float32: scores, softmax and mix of a few queries at a time.

A query by itself (its group of heads shares the keys) and sixteen queries of a chunk go the same way. A query's sums
run over its own keys, in their order: what else is computed has no part in them.
"""

# ruff: noqa: PLR0917 - a compiled loop takes each address and stride, by position

from __future__ import annotations

import numpy as np

from .compiled import ANY_ORDER, compiled
from .elementwise import exp
from .formats import F32_ROWS
from .memory import give_back, take_floats
from .products import product, streaming_product
from .vector import floats_at, integers_at, mix_tile

QUERIES = 24  # tokens of a chunk whose scores are computed together

_mix_6x2, _mix_3x4, _mix_1x4, _mix_1x1 = (mix_tile(*shape) for shape in ((6, 2), (3, 4), (1, 4), (1, 1)))


@compiled()
def attend(
    q,
    q_token,
    q_head,
    view,
    strides,
    pages,
    pages_stride,
    starts,
    counts,
    shape,
    window,
    scale,
    out,
    part,
    parts,
):
    """Attention of sequences over their pages: counts[i] tokens from position starts[i] on, one after the other in q.

    `strides` are the view's by page, head and row, `shape` is (sequences, kv heads, group, head size, page tokens).
    The work falls into items, of which every parts-th is done, from item `part` on.
    """
    num_seqs, kv_heads, group, size, page_tokens = shape
    page_stride, head_stride, row_stride = strides
    start_of, count_of = integers_at(starts), integers_at(counts)
    longest = 0
    for i in range(num_seqs):
        longest = max(longest, start_of[i] + count_of[i])
    width = longest + page_tokens
    scores = take_floats(QUERIES * width)
    token, item = 0, 0
    for i in range(num_seqs):
        table, count = pages + 8 * i * pages_stride, count_of[i]
        alone = count == 1  # then the queries that share keys are the heads of a group, else a head's tokens
        rows, others = (group, 1) if alone else (count, group)
        row_stride_q, row_stride_out, step = (
            (q_head, size, 0) if alone else (q_token, kv_heads * group * size, 1)
        )
        for g in range(kv_heads):
            keys = view + 4 * g * head_stride
            for j in range(others):
                head = g * group + j
                for row in range(0, rows, QUERIES):
                    item += 1
                    if (item - 1) % parts != part:
                        continue
                    _attend_rows(
                        q + 4 * (token * q_token + head * q_head + row * row_stride_q), row_stride_q,
                        min(QUERIES, rows - row), keys, page_stride, row_stride, table, page_tokens,
                        start_of[i] + step * row, step, window, size, scale, scores, width,
                        out + 4 * ((token * kv_heads * group + head) * size + row * row_stride_out), row_stride_out,
                    )  # fmt: skip
        token += count
    give_back(scores)


@compiled(inline="always")
def _attend_rows(
    q, q_stride, m, keys, page_stride, row_stride, pages, page_tokens, position, step,
    window, size, scale, scores, width, out, out_stride,
):  # fmt: skip
    """m queries at position, position + step, ...: scores, softmax, mix. Sums run over keys in their order."""
    page, o = integers_at(pages), floats_at(out)
    stop = position + step * (m - 1) + 1
    first = max(position + 1 - window, 0) // page_tokens if window else 0
    origin = first * page_tokens
    for p in range(first, (stop + page_tokens - 1) // page_tokens):
        at = p * page_tokens
        keys_at, to = keys + 4 * page[p] * page_stride, scores + 4 * (at - origin)
        n = min(page_tokens, stop - at)
        if step:
            product(F32_ROWS, q, q_stride, m, keys_at, 4 * row_stride, n, size, to, width, 0, 0)
        else:
            streaming_product(q, q_stride, m, keys_at, 4 * row_stride, n, size, to, width)
    for i in range(m):
        here = position + step * i
        oldest = max(here + 1 - window, 0) if window else 0
        _softmax(scores + 4 * i * width, oldest - origin, here + 1 - origin, stop - origin, scale)
        for j in range(size):
            o[i * out_stride + j] = 0
    for p in range(first, (stop + page_tokens - 1) // page_tokens):
        at = p * page_tokens
        values = keys + 4 * (page[p] * page_stride + size)
        n = min(page_tokens, stop - at)
        mix(scores + 4 * (at - origin), width, m, values, row_stride, n, size, out, out_stride)


@compiled(fastmath=ANY_ORDER)
def _softmax(row, first, stop, end, scale):
    """row[first:stop] to weights that add up to one; the rest of row[:end] counts for nothing."""
    s = floats_at(row)
    best = s[first]
    for i in range(first, stop):
        best = max(best, s[i])
    total = np.float32(0)
    factor = np.float32(scale)
    for i in range(first, stop):
        s[i] = exp((s[i] - best) * factor)
    for i in range(first, stop):
        total += s[i]
    share = np.float32(1) / total
    for i in range(first, stop):
        s[i] *= share
    for i in range(first):
        s[i] = 0
    for i in range(stop, end):
        s[i] = 0


@compiled()
def mix(p, p_stride, m, v, v_stride, n, size, out, out_stride):
    """out[i] += sum over j of p[i, j] v[j] for m rows of weights and n rows of v."""
    i = 0
    while i < m:
        at, to, left = p + 4 * i * p_stride, out + 4 * i * out_stride, m - i
        if left >= 6 and size % 16 == 0:
            for c in range(0, size, 16):
                _mix_6x2(at, p_stride, v + 4 * c, v_stride, n, to + 4 * c, out_stride)
            i += 6
        elif left >= 3 and size % 32 == 0:
            for c in range(0, size, 32):
                _mix_3x4(at, p_stride, v + 4 * c, v_stride, n, to + 4 * c, out_stride)
            i += 3
        elif size % 32 == 0:
            for c in range(0, size, 32):
                _mix_1x4(at, 0, v + 4 * c, v_stride, n, to + 4 * c, 0)
            i += 1
        else:
            for c in range(0, size, 8):
                _mix_1x1(at, 0, v + 4 * c, v_stride, n, to + 4 * c, 0)
            i += 1
