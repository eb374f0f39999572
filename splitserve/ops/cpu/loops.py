"""The compiled loops behind ops/cpu: products, norms, rotation and attention on addresses of float32 rows.

Compiled for the machine they run on, when `ops.cpu.prepare` asks for it, and kept on disk by numba. They release the
interpreter lock, allocate nothing but scratch of a few rows, and compute a row of a result from its own inputs only, in
an order that the batch has no part in.
"""

# ruff: noqa: PLR0917 - a compiled loop takes each address and stride, by position

from __future__ import annotations

import numpy as np
from numba import njit

from .vector import dot_tile, float_from_bits, floats_at, integers_at, mix_tile

# Tiles: weights x inputs. Twelve sums of eight lanes, three rows of weights and one of inputs fill the sixteen vector
# registers of AVX2; with one or two inputs, four rows of weights hide the latency of their sums.
_dot_4x1, _dot_4x2, _dot_3x3, _dot_3x4 = (
    dot_tile(4, 1, 2),
    dot_tile(4, 2, 2),
    dot_tile(3, 3, 1),
    dot_tile(3, 4, 1),
)
_dot_1x1 = dot_tile(1, 1)
_mix_3x2, _mix_1x2, _mix_1x1 = mix_tile(3, 2), mix_tile(1, 2), mix_tile(1, 1)

_ANY_ORDER = {"reassoc", "nsz", "contract"}
"""Sums of a row may be reordered: such a loop is compiled once, so that the order is the row length's alone."""

QUERIES = 16  # tokens of a chunk whose scores are computed together

PANEL = 12  # rows of weights that stay in the L1 cache while all inputs pass by: 27 KB of 576 numbers


@njit(nogil=True, cache=True)
def product(x, x_stride, m, w, w_stride, n, k, out, out_stride):
    """out[i, j] = x[i] . w[j] for m rows of x and n rows of w, all of length k; w is read from memory once."""
    whole = n // PANEL * PANEL
    for first in range(0, whole, PANEL):
        panel, column = w + 4 * first * w_stride, out + 4 * first
        row = 0
        while row < m:
            here, there = x + 4 * row * x_stride, column + 4 * row * out_stride
            left = m - row
            if left >= 3:
                for j in range(0, PANEL, 3):
                    v = panel + 4 * j * w_stride
                    if left == 3:
                        _dot_3x3(here, x_stride, v, w_stride, k, there + 4 * j, out_stride)
                    else:
                        _dot_3x4(here, x_stride, v, w_stride, k, there + 4 * j, out_stride)
                row += min(left, 4)
            else:
                for j in range(0, PANEL, 4):
                    v = panel + 4 * j * w_stride
                    if left == 1:
                        _dot_4x1(here, x_stride, v, w_stride, k, there + 4 * j, out_stride)
                    else:
                        _dot_4x2(here, x_stride, v, w_stride, k, there + 4 * j, out_stride)
                row += left
    for j in range(whole, n):
        for row in range(m):
            _dot_1x1(
                x + 4 * row * x_stride,
                x_stride,
                w + 4 * j * w_stride,
                w_stride,
                k,
                out + 4 * (row * out_stride + j),
                1,
            )


@njit(nogil=True, cache=True)
def add_rows(out, m, n, bias):
    """out[i] += bias for m rows of n."""
    o, a = floats_at(out), floats_at(bias)
    for i in range(m):
        for j in range(n):
            o[i * n + j] += a[j]


@njit(nogil=True, cache=True, fastmath=_ANY_ORDER)
def rms_norm(x, x_stride, m, n, weight, eps, out):
    """out[i] = x[i] / sqrt(mean(x[i]^2) + eps) * weight for m rows of n, out without gaps."""
    v, w, o = floats_at(x), floats_at(weight), floats_at(out)
    for i in range(m):
        at, to = i * x_stride, i * n
        total = np.float32(0)
        for j in range(n):
            total += v[at + j] * v[at + j]
        scale = np.float32(1 / np.sqrt(total / np.float32(n) + np.float32(eps)))
        for j in range(n):
            o[to + j] = w[j] * (v[at + j] * scale)


@njit(nogil=True, cache=True, fastmath=_ANY_ORDER)
def add_rms_norm(x, y, m, n, weight, eps, total, out):
    """total = x + y, then its norm; all without gaps."""
    a, b, t = floats_at(x), floats_at(y), floats_at(total)
    for i in range(m * n):
        t[i] = a[i] + b[i]
    rms_norm(total, n, m, n, weight, eps, out)


@njit(nogil=True, cache=True)
def swiglu(gate_up, m, n, out):
    """out[i, j] = silu(gate_up[i, j]) * gate_up[i, n + j] for m rows, all without gaps."""
    v, o = floats_at(gate_up), floats_at(out)
    for i in range(m):
        at, to = 2 * i * n, i * n
        for j in range(n):
            gate = v[at + j]
            o[to + j] = gate / (np.float32(1) + _exp(-gate)) * v[at + n + j]


@njit(nogil=True, cache=True)
def rotate(x, x_token, x_head, tokens, heads, half, cosines, sines, out):
    """Pair (j, j + half) of each head turned by its token's angle; out without gaps."""
    v, c, s, o = floats_at(x), floats_at(cosines), floats_at(sines), floats_at(out)
    for t in range(tokens):
        angle = t * half
        for h in range(heads):
            at, to = t * x_token + h * x_head, (t * heads + h) * 2 * half
            for j in range(half):
                first, second = v[at + j], v[at + half + j]
                o[to + j] = first * c[angle + j] - second * s[angle + j]
                o[to + half + j] = second * c[angle + j] + first * s[angle + j]


@njit(nogil=True, cache=True)
def write_rows(
    view, page_stride, head_stride, row_stride, k, k_token, k_head, v, v_token, v_head, pages, rows, shape
):
    """Keys and values of each token side by side into row rows[t] of page pages[t]."""
    tokens, heads, size = shape
    to, key, value = floats_at(view), floats_at(k), floats_at(v)
    page, row = integers_at(pages), integers_at(rows)
    for t in range(tokens):
        for h in range(heads):
            at = page[t] * page_stride + h * head_stride + row[t] * row_stride
            for j in range(size):
                to[at + j] = key[t * k_token + h * k_head + j]
            for j in range(size):
                to[at + size + j] = value[t * v_token + h * v_head + j]


@njit(nogil=True, cache=True)
def attend(q, q_token, q_head, view, strides, pages, pages_stride, starts, counts, shape, window, scale, out):
    """Attention of sequences over their pages: counts[i] tokens from position starts[i] on, one after the other in q.

    `strides` are the view's by page, head and row, `shape` is (sequences, kv heads, group, head size, page tokens).
    """
    num_seqs, kv_heads, group, size, page_tokens = shape
    page_stride, head_stride, row_stride = strides
    start_of, count_of = integers_at(starts), integers_at(counts)
    longest = 0
    for i in range(num_seqs):
        longest = max(longest, start_of[i] + count_of[i])
    width = longest + page_tokens
    scores = np.empty(max(QUERIES, group) * width, dtype=np.float32)
    token = 0
    for i in range(num_seqs):
        table = pages + 8 * i * pages_stride
        for g in range(kv_heads):
            keys = view + 4 * g * head_stride
            heads = q + 4 * (token * q_token + g * group * q_head)
            to = out + 4 * (token * kv_heads + g) * group * size
            if count_of[i] == 1:
                # The heads of a group share their keys.
                _attend_rows(
                    heads, q_head, group, keys, page_stride, row_stride, table, page_tokens, start_of[i], 0,
                    window, size, scale, scores.ctypes.data, width, to, size,
                )  # fmt: skip
                continue
            for j in range(group):
                for t in range(0, count_of[i], QUERIES):
                    _attend_rows(
                        heads + 4 * (t * q_token + j * q_head), q_token, min(QUERIES, count_of[i] - t),
                        keys, page_stride, row_stride, table, page_tokens, start_of[i] + t, 1,
                        window, size, scale, scores.ctypes.data, width,
                        to + 4 * (t * kv_heads * group + j) * size, kv_heads * group * size,
                    )  # fmt: skip
        token += count_of[i]


@njit(nogil=True, cache=True)
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
        product(
            q, q_stride, m, keys + 4 * page[p] * page_stride, row_stride, min(page_tokens, stop - at), size,
            scores + 4 * (at - origin), width,
        )  # fmt: skip
    for i in range(m):
        here = position + step * i
        oldest = max(here + 1 - window, 0) if window else 0
        _softmax(scores + 4 * i * width, oldest - origin, here + 1 - origin, stop - origin, scale)
        for j in range(size):
            o[i * out_stride + j] = 0
    for p in range(first, (stop + page_tokens - 1) // page_tokens):
        at = p * page_tokens
        values = keys + 4 * (page[p] * page_stride + size)
        _mix(
            scores + 4 * (at - origin),
            width,
            m,
            values,
            row_stride,
            min(page_tokens, stop - at),
            size,
            out,
            out_stride,
        )


@njit(nogil=True, cache=True, fastmath=_ANY_ORDER)
def _softmax(row, first, stop, end, scale):
    """row[first:stop] to weights that add up to one; the rest of row[:end] counts for nothing."""
    s = floats_at(row)
    best = s[first]
    for i in range(first, stop):
        best = max(best, s[i])
    total = np.float32(0)
    factor = np.float32(scale)
    for i in range(first, stop):
        s[i] = _exp((s[i] - best) * factor)
    for i in range(first, stop):
        total += s[i]
    share = np.float32(1) / total
    for i in range(first, stop):
        s[i] *= share
    for i in range(first):
        s[i] = 0
    for i in range(stop, end):
        s[i] = 0


@njit(nogil=True, cache=True)
def _mix(p, p_stride, m, v, v_stride, n, size, out, out_stride):
    """out[i] += sum over j of p[i, j] v[j] for m rows of weights and n rows of v."""
    pairs = size // 16 * 16
    whole = m // 3 * 3
    for c in range(0, pairs, 16):
        for i in range(0, whole, 3):
            _mix_3x2(
                p + 4 * i * p_stride,
                p_stride,
                v + 4 * c,
                v_stride,
                n,
                out + 4 * (i * out_stride + c),
                out_stride,
            )
        for i in range(whole, m):
            _mix_1x2(
                p + 4 * i * p_stride,
                p_stride,
                v + 4 * c,
                v_stride,
                n,
                out + 4 * (i * out_stride + c),
                out_stride,
            )
    for c in range(pairs, size, 8):
        for i in range(m):
            _mix_1x1(
                p + 4 * i * p_stride,
                p_stride,
                v + 4 * c,
                v_stride,
                n,
                out + 4 * (i * out_stride + c),
                out_stride,
            )


@njit(nogil=True, cache=True, inline="always")
def _exp(x):
    """e^x in float32 to about one unit in the last place, for |x| < 87; beyond, the value there.

    x = n ln 2 + r, then a polynomial on |r| <= ln 2 / 2 (the minimax one of Cephes' expf) times 2^n.
    """
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375)
    r = r + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    y = p * r * r + r + np.float32(1)
    return y * float_from_bits((np.int32(n) + np.int32(127)) << np.int32(23))
