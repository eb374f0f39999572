"""What mixes DeepSeek-V4's streams: gates, and a matrix whose columns and rows are divided by their sums in turn.

    of one token     inside the kernel that needs them (hyper.py): numbers of one program
    of many tokens   a kernel by itself: hc_gates; of still more, beside the collapse (hyper_many.py): a thread a token

A token's parts are sums over splits of what hc_mix found: [SPLITS, 32], `step` apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

from splitserve.ops.triton.overlap import follow


@triton.jit
def column(parts, at, step, SPLITS: tl.constexpr):
    """[n] sums over splits of parts[:, at]."""
    split = tl.arange(0, SPLITS)[:, None]
    return tl.sum(tl.load(parts + split * step + at[None, :]), 0)


@triton.jit
def root_of(parts, step, size, norm_eps, M: tl.constexpr, SPLITS: tl.constexpr):
    """One over the root mean square of `size` numbers."""
    return 1.0 / tl.sqrt(tl.sum(tl.load(parts + tl.arange(0, SPLITS) * step + M), 0) / size + norm_eps)


@triton.jit
def mixture(
    mine,  # a token's parts: [SPLITS, 32], `step` apart
    base, scale, step, size, eps, norm_eps,
    ITERS: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """post [N] and the columns of comb, each [N]: softmax, then ITERS rounds of dividing columns and rows by their sums.

    comb's rounds are written out for numbers, since sums over parts of so small a tensor cost more than all of it.
    """
    tl.static_assert(N == 4)
    n = tl.arange(0, N)
    root = root_of(mine, step, size, norm_eps, 2 * N + N * N, SPLITS)
    gate = column(mine, N + n, step, SPLITS) * root * tl.load(scale + 1) + tl.load(base + N + n)
    root *= tl.load(scale + 2)
    a, b, c, d = _softmax4(mine + 2 * N, base + 2 * N, root, step, eps, SPLITS)
    e, f, g, h = _softmax4(mine + 3 * N, base + 3 * N, root, step, eps, SPLITS)
    i, j, k, m = _softmax4(mine + 4 * N, base + 4 * N, root, step, eps, SPLITS)
    o, p, q, r = _softmax4(mine + 5 * N, base + 5 * N, root, step, eps, SPLITS)
    a, b, c, d, e, f, g, h, i, j, k, m, o, p, q, r = _rounds(
        a, b, c, d, e, f, g, h, i, j, k, m, o, p, q, r, eps, ITERS
    )  # fmt: skip
    columns = (_four(a, e, i, o), _four(b, f, j, p), _four(c, g, k, q), _four(d, h, m, r))
    return 2.0 / (1.0 + tl.exp(-gate)), columns


@triton.jit
def _rounds(a, b, c, d, e, f, g, h, i, j, k, m, o, p, q, r, eps, ITERS: tl.constexpr):
    """Sinkhorn's, of four rows of four."""
    a, e, i, o = _shares(a, e, i, o, eps)
    b, f, j, p = _shares(b, f, j, p, eps)
    c, g, k, q = _shares(c, g, k, q, eps)
    d, h, m, r = _shares(d, h, m, r, eps)
    for _ in range(ITERS - 1):
        a, b, c, d = _shares(a, b, c, d, eps)
        e, f, g, h = _shares(e, f, g, h, eps)
        i, j, k, m = _shares(i, j, k, m, eps)
        o, p, q, r = _shares(o, p, q, r, eps)
        a, e, i, o = _shares(a, e, i, o, eps)
        b, f, j, p = _shares(b, f, j, p, eps)
        c, g, k, q = _shares(c, g, k, q, eps)
        d, h, m, r = _shares(d, h, m, r, eps)
    return a, b, c, d, e, f, g, h, i, j, k, m, o, p, q, r


@triton.jit
def _four(a, b, c, d):
    """Four numbers as a tensor."""
    n = tl.arange(0, 4)
    return tl.where(n == 0, a, tl.where(n == 1, b, tl.where(n == 2, c, d)))


@triton.jit
def _shares(a, b, c, d, eps):
    """Each of four numbers divided by their sum."""
    r = 1.0 / (a + b + (c + d) + eps)
    return a * r, b * r, c * r, d * r


@triton.jit
def _softmax4(parts, base, root, step, eps, SPLITS: tl.constexpr):
    """Softmax of four neighbours of the mixes, plus eps."""
    at = tl.arange(0, SPLITS) * step
    a = tl.sum(tl.load(parts + at), 0) * root + tl.load(base)
    b = tl.sum(tl.load(parts + at + 1), 0) * root + tl.load(base + 1)
    c = tl.sum(tl.load(parts + at + 2), 0) * root + tl.load(base + 2)
    d = tl.sum(tl.load(parts + at + 3), 0) * root + tl.load(base + 3)
    return _soft(a, b, c, d, eps)


@triton.jit
def _soft(a, b, c, d, eps):
    """Softmax of four numbers, plus eps."""
    most = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - most), tl.exp(b - most), tl.exp(c - most), tl.exp(d - most)
    r = 1.0 / (a + b + (c + d))
    return a * r + eps, b * r + eps, c * r + eps, d * r + eps


@triton.jit
def _pick(sums, m, which):
    """[BT, 32] -> [BT]: one of the numbers of each token."""
    return tl.sum(tl.where(m == which, sums, 0.0), 1)


@triton.jit
def _mixes(sums, m, first, base, root, eps):
    """_softmax4 of many tokens."""
    a = _pick(sums, m, first) * root + tl.load(base + first)
    b = _pick(sums, m, first + 1) * root + tl.load(base + first + 1)
    c = _pick(sums, m, first + 2) * root + tl.load(base + first + 2)
    d = _pick(sums, m, first + 3) * root + tl.load(base + first + 3)
    return _soft(a, b, c, d, eps)


@triton.jit
def _put4(into, a, b, c, d, here):
    tl.store(into, a, mask=here)
    tl.store(into + 1, b, mask=here)
    tl.store(into + 2, c, mask=here)
    tl.store(into + 3, d, mask=here)


@triton.jit
def _put_comb(into, a, b, c, d, e, f, g, h, i, j, k, m, o, p, q, r, here, eps, ITERS: tl.constexpr):
    """Four rows of four after their rounds, of many tokens."""
    a, b, c, d, e, f, g, h, i, j, k, m, o, p, q, r = _rounds(
        a, b, c, d, e, f, g, h, i, j, k, m, o, p, q, r, eps, ITERS
    )  # fmt: skip
    _put4(into, a, b, c, d, here)
    _put4(into + 4, e, f, g, h, here)
    _put4(into + 8, i, j, k, m, here)
    _put4(into + 12, o, p, q, r, here)


@triton.jit
def added(at, step, SPLITS: tl.constexpr):
    """The numbers `at`, over splits."""
    x = tl.load(at)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(at + split * step)
    return x


@triton.jit
def _mixes_of_threads(at, step, base, root, eps, SPLITS: tl.constexpr):
    """_softmax4 of many tokens, each one's numbers in one thread."""
    a = added(at, step, SPLITS) * root + tl.load(base)
    b = added(at + 1, step, SPLITS) * root + tl.load(base + 1)
    c = added(at + 2, step, SPLITS) * root + tl.load(base + 2)
    d = added(at + 3, step, SPLITS) * root + tl.load(base + 3)
    return _soft(a, b, c, d, eps)


@triton.jit
def gates_of_threads(
    parts, base, scale, post, comb,  # as for hc_gates
    token,  # [threads]
    num_tokens, size, eps, norm_eps,
    ITERS: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """As hc_gates, for four streams."""
    here, step = token < num_tokens, num_tokens * 32
    at = parts + tl.minimum(token, num_tokens - 1) * 32
    root = 1.0 / tl.sqrt(added(at + 24, step, SPLITS) / size + norm_eps)
    gates = root * tl.load(scale + 1)
    for n in tl.static_range(4):
        gate = added(at + 4 + n, step, SPLITS) * gates + tl.load(base + 4 + n)
        tl.store(post + token * 4 + n, 2.0 / (1.0 + tl.exp(-gate)), mask=here)
    root *= tl.load(scale + 2)
    a, b, c, d = _mixes_of_threads(at + 8, step, base + 8, root, eps, SPLITS)
    e, f, g, h = _mixes_of_threads(at + 12, step, base + 12, root, eps, SPLITS)
    i, j, k, m = _mixes_of_threads(at + 16, step, base + 16, root, eps, SPLITS)
    o, p, q, r = _mixes_of_threads(at + 20, step, base + 20, root, eps, SPLITS)
    _put_comb(comb + token * 16, a, b, c, d, e, f, g, h, i, j, k, m, o, p, q, r, here, eps, ITERS)


@triton.jit(do_not_specialize=["num_tokens"])
def hc_gates(
    parts,  # [SPLITS, T, 32] float32
    base,  # [M] float32
    scale,  # [3] float32
    post,  # [T, N] float32
    comb,  # [T, N, N] float32
    num_tokens, size, eps, norm_eps,
    ITERS: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    # grid: [ceil(T / BT)]
    tl.static_assert(N == 4)
    follow()
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    here, step = token < num_tokens, num_tokens * 32
    column = tl.arange(0, 32)[None, :]
    at = parts + tl.minimum(token, num_tokens - 1)[:, None] * 32 + column
    sums = tl.zeros((BT, 32), tl.float32)
    for split in range(SPLITS):
        sums += tl.load(at + split * step)
    root = 1.0 / tl.sqrt(_pick(sums, column, 2 * N + N * N) / size + norm_eps)
    gates = root * tl.load(scale + 1)
    for n in tl.static_range(N):
        gate = _pick(sums, column, N + n) * gates + tl.load(base + N + n)
        tl.store(post + token * N + n, 2.0 / (1.0 + tl.exp(-gate)), mask=here)
    root *= tl.load(scale + 2)
    a, b, c, d = _mixes(sums, column, 2 * N, base, root, eps)
    e, f, g, h = _mixes(sums, column, 3 * N, base, root, eps)
    i, j, k, m = _mixes(sums, column, 4 * N, base, root, eps)
    o, p, q, r = _mixes(sums, column, 5 * N, base, root, eps)
    _put_comb(comb + token * (N * N), a, b, c, d, e, f, g, h, i, j, k, m, o, p, q, r, here, eps, ITERS)
