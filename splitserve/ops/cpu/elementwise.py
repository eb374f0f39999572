"""What is done to each number or each row by itself: norms, activations, rotation, rows into pages. In float32."""

# ruff: noqa: PLR0917 - a compiled loop takes each address and stride, by position

from __future__ import annotations

import numpy as np

from .compiled import ANY_ORDER, compiled
from .vector import floats_at, integers_at, times_power


@compiled(inline="always")
def exp(x):
    """e^x in float32 to about one unit in the last place, for |x| < 86; beyond, the value there.

    x = n ln 2 + r, then a polynomial on |r| <= ln 2 / 2 (the minimax one of Cephes' expf) times 2^n. Loops of it
    become vector code.
    """
    x = x if x > np.float32(-86) else np.float32(-86)
    x = x if x < np.float32(86) else np.float32(86)
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375)
    r = r + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    return times_power(p * r * r + r + np.float32(1), n)


@compiled()
def add_rows(out, m, n, bias):
    """out[i] += bias for m rows of n."""
    o, a = floats_at(out), floats_at(bias)
    for i in range(m):
        for j in range(n):
            o[i * n + j] += a[j]


@compiled(fastmath=ANY_ORDER)
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


@compiled(fastmath=ANY_ORDER)
def add_rms_norm(x, y, m, n, weight, eps, total, out):
    """total = x + y, then its norm; all without gaps."""
    a, b, t = floats_at(x), floats_at(y), floats_at(total)
    for i in range(m * n):
        t[i] = a[i] + b[i]
    rms_norm(total, n, m, n, weight, eps, out)


@compiled()
def swiglu(gate_up, m, n, out, out_stride):
    """out[i, j] = silu(gate_up[i, j]) * gate_up[i, n + j] for m rows, inputs without gaps."""
    v, o = floats_at(gate_up), floats_at(out)
    for i in range(m):
        at, to = 2 * i * n, i * out_stride
        for j in range(n):
            gate = v[at + j]
            o[to + j] = gate / (np.float32(1) + exp(-gate)) * v[at + n + j]


@compiled()
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


@compiled()
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
