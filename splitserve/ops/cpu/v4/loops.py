"""The compiled loops: numbers out of codes, coefficients of hyper-connections, norms, rotation. They fill arrays."""

# ruff: noqa: PLR0917 - a compiled loop takes its arrays by position

from __future__ import annotations

import numpy as np

from splitserve.ops.cpu.compiled import ANY_ORDER, compiled

_ONE = np.float32(1)
_E4M3_SHIFT = np.float32(2.0**120)
_E2M1_SHIFT = np.float32(2.0**126)


@compiled()
def tiles(codes, scales, rows, columns, bits, out):
    """out [n, k] = e4m3 `codes` [n, k] times `scales`, one for `rows` x `columns`; `bits` is `out` as int32.

    A code's exponent and mantissa, moved to where float32 has its own, are its value times 2^-120.
    """
    n, k = codes.shape
    for r in range(n):
        for c in range(k):
            code = np.int32(codes[r, c])
            bits[r, c] = ((code & np.int32(0x7F)) << np.int32(20)) | ((code & np.int32(0x80)) << np.int32(24))
        for tile in range((k + columns - 1) // columns):
            scale = scales[r // rows, tile]
            for c in range(tile * columns, min(k, (tile + 1) * columns)):
                out[r, c] = out[r, c] * _E4M3_SHIFT * scale


@compiled()
def mxfp4(codes, scales, bits, out):
    """out [n, k] = e2m1 `codes` [n, k / 2] times `scales` [n, k / 32]; `bits` is `out` as int32."""
    n, half = codes.shape
    for r in range(n):
        for c in range(half):
            low, high = np.int32(codes[r, c] & 0xF), np.int32(codes[r, c] >> 4)
            bits[r, 2 * c] = ((low & np.int32(7)) << np.int32(22)) | ((low & np.int32(8)) << np.int32(28))
            bits[r, 2 * c + 1] = ((high & np.int32(7)) << np.int32(22)) | (
                (high & np.int32(8)) << np.int32(28)
            )
        for group in range(half // 16):
            scale = scales[r, group]
            for c in range(group * 32, group * 32 + 32):
                out[r, c] = out[r, c] * _E2M1_SHIFT * scale


@compiled()
def split(mixes, base, scale, n, iters, eps, pre, post, comb):
    """Coefficients of each token from `mixes` [T, 2n + n * n]; see ops/ref/v4/hyper.py. `comb` is [T, n, n]."""
    for t in range(mixes.shape[0]):
        for j in range(n):
            pre[t, j] = _ONE / (_ONE + np.exp(-(mixes[t, j] * scale[0] + base[j]))) + eps
            at = n + j
            post[t, j] = np.float32(2) / (_ONE + np.exp(-(mixes[t, at] * scale[1] + base[at])))
            for k in range(n):
                at = 2 * n + j * n + k
                comb[t, j, k] = mixes[t, at] * scale[2] + base[at]
        _softmax(comb[t], eps)
        for turn in range(iters):
            if turn:
                _divide_rows(comb[t], eps)
            _divide_rows(comb[t].T, eps)


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


@compiled(fastmath=ANY_ORDER)
def rms_norm(x, weight, eps, out):
    """out [n, k] = x / sqrt(mean(x^2) + eps) * weight."""
    for r in range(x.shape[0]):
        total = np.float32(0)
        for c in range(x.shape[1]):
            total += x[r, c] * x[r, c]
        scale = _ONE / np.sqrt(total / np.float32(x.shape[1]) + eps)
        for c in range(x.shape[1]):
            out[r, c] = x[r, c] * scale * weight[c]


@compiled()
def rotate_tail(x, cos, sin, sign, out):
    """out [T, heads, d] = x with the last numbers of each head, neighbours as pairs, turned by its token's angles."""
    tokens, heads, d = x.shape
    pairs = cos.shape[1]
    first = d - 2 * pairs
    for t in range(tokens):
        for h in range(heads):
            for c in range(first):
                out[t, h, c] = x[t, h, c]
            for i in range(pairs):
                even, odd = x[t, h, first + 2 * i], x[t, h, first + 2 * i + 1]
                s = sin[t, i] * sign
                out[t, h, first + 2 * i] = even * cos[t, i] - odd * s
                out[t, h, first + 2 * i + 1] = even * s + odd * cos[t, i]
