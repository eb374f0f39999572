"""Hyper-connections: four residual streams, mixed by weights that depend on the token.

    mix        program (tokens, split): part of fn . streams, and of the sum of squares
    collapse   program (token, columns): coefficients from the parts, Sinkhorn, the weighted sum of the streams
    expand     program (token, columns): what a sub-layer gave, and the old streams, into the new ones

fn is float32. Its products are exact: it is taken apart into three bf16 numbers, and streams are bf16 already.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splitserve.ops.kernels.launch import arch_of, interpreted, launch, num_processors
from splitserve.ops.kernels.tuned import tuned
from splitserve.ops.triton.overlap import follow

STREAMS = 4
COLUMNS = 512  # of a program that collapses: one warp, so that its sums over four streams stay in it


@triton.jit(do_not_specialize=["num_tokens"])
def hc_mix(
    streams,  # [T, K]
    fn,  # [M, K] float32
    parts,  # [SPLITS, T, 32] float32: M mixes, then the sum of squares
    num_tokens, K,
    M: tl.constexpr,
    SPLITS: tl.constexpr,
    NATIVE: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    # grid: [ceil(T / BT), SPLITS]
    follow()
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    here = (token < num_tokens)[:, None]
    m, k = tl.arange(0, 32)[None, :], tl.arange(0, BK)
    sums = tl.zeros((BT, 32), tl.float32)
    squares = tl.zeros((BT,), tl.float32)
    part = tl.cdiv(tl.cdiv(K, BK), SPLITS) * BK
    first = tl.program_id(1) * part
    for k0 in range(first, tl.minimum(first + part, K), BK):
        inside = k0 + k < K
        at = streams + token[:, None].to(tl.int64) * K + k0 + k[None, :]
        x = tl.load(at, mask=here & inside[None, :], other=0.0)
        w = tl.load(fn + m * K + k0 + k[:, None], mask=(m < M) & inside[:, None], other=0.0)
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        if NATIVE:
            top = w.to(tl.bfloat16)
            rest = w - top.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            x = x.to(tl.bfloat16)
            sums = tl.dot(x, top, tl.dot(x, middle, tl.dot(x, low, sums)))
        else:
            sums = tl.dot(wide, w, sums)
    into = parts + (tl.program_id(1) * num_tokens + token[:, None]) * 32 + m
    tl.store(into, tl.where(m == M, squares[:, None], sums), mask=here & (m <= M))


@triton.jit
def _column(parts, at, step, SPLITS: tl.constexpr):
    """[n] sums over splits of parts[:, at]."""
    split = tl.arange(0, SPLITS)[:, None]
    return tl.sum(tl.load(parts + split * step + at[None, :]), 0)


@triton.jit
def _root(parts, step, size, norm_eps, M: tl.constexpr, SPLITS: tl.constexpr):
    """One over the root mean square of `size` numbers."""
    return 1.0 / tl.sqrt(tl.sum(tl.load(parts + tl.arange(0, SPLITS) * step + M), 0) / size + norm_eps)


@triton.jit(do_not_specialize=["num_tokens"])
def hc_collapse(
    streams,  # [T, N, D]
    parts,  # [SPLITS, T, 32] float32
    base,  # [M] float32
    scale,  # [3] float32, or [1] where HEAD
    x,  # [T, D]
    post,  # [T, N] float32; not where HEAD
    comb,  # [T, N, N] float32; not where HEAD
    num_tokens, D, eps, norm_eps,
    ITERS: tl.constexpr,
    HEAD: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    # grid: [T, ceil(D / BD)], and one more program of each token, for post and comb, unless HEAD
    follow()
    token = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, N)
    mine, step = parts + token * 32, num_tokens * 32
    M: tl.constexpr = N if HEAD else 2 * N + N * N
    first = tl.program_id(1) * BD
    if first < D:
        col = first + tl.arange(0, BD)
        old = tl.load(streams + (token * N + n[:, None]) * D + col[None, :], mask=col[None, :] < D, other=0.0)
        root = _root(mine, step, N * D, norm_eps, M, SPLITS)
        pre = _column(mine, n, step, SPLITS) * root * tl.load(scale) + tl.load(base + n)
        pre = 1.0 / (1.0 + tl.exp(-pre)) + eps
        tl.store(x + token * D + col, tl.sum(old.to(tl.float32) * pre[:, None], 0), mask=col < D)
    if not HEAD and first >= D:
        at = 2 * N + n
        gate = _column(mine, N + n, step, SPLITS)
        a, b = _column(mine, at, step, SPLITS), _column(mine, at + N, step, SPLITS)
        c, d = _column(mine, at + 2 * N, step, SPLITS), _column(mine, at + 3 * N, step, SPLITS)
        root = _root(mine, step, N * D, norm_eps, M, SPLITS)
        gate = gate * root * tl.load(scale + 1) + tl.load(base + N + n)
        tl.store(post + token * N + n, 2.0 / (1.0 + tl.exp(-gate)))
        root *= tl.load(scale + 2)
        a, b = a * root + tl.load(base + at), b * root + tl.load(base + at + N)
        c, d = c * root + tl.load(base + at + 2 * N), d * root + tl.load(base + at + 3 * N)
        a, b, c, d = _softmax(a) + eps, _softmax(b) + eps, _softmax(c) + eps, _softmax(d) + eps
        r = 1.0 / (a + b + c + d + eps)
        a, b, c, d = a * r, b * r, c * r, d * r
        for _ in range(ITERS - 1):
            a, b = a / (tl.sum(a, 0) + eps), b / (tl.sum(b, 0) + eps)
            c, d = c / (tl.sum(c, 0) + eps), d / (tl.sum(d, 0) + eps)
            r = 1.0 / (a + b + c + d + eps)
            a, b, c, d = a * r, b * r, c * r, d * r
        into = comb + token * N * N + n
        tl.store(into, a)
        tl.store(into + N, b)
        tl.store(into + 2 * N, c)
        tl.store(into + 3 * N, d)


@triton.jit
def _softmax(x):
    e = tl.exp(x - tl.max(x, 0))
    return e / tl.sum(e, 0)


@triton.jit
def hc_expand(
    y,  # [T, D]
    streams,  # [T, N, D]
    post,  # [T, N] float32
    comb,  # [T, N, N] float32
    out,  # [T, N, D]
    D,
    N: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    # grid: [T, ceil(D / BD)]
    follow()
    token = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, N)
    col = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = col < D
    old = tl.load(streams + (token * N + j[:, None]) * D + col[None, :], mask=inside[None, :], other=0.0).to(
        tl.float32
    )
    new = tl.load(y + token * D + col, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(N):
        weight = tl.load(comb + (token * N + j) * N + k)
        mixed = tl.load(post + token * N + k) * new + tl.sum(old * weight[:, None], 0)
        tl.store(out + (token * N + k) * D + col, mixed, mask=inside)


def hc_pre(
    streams: torch.Tensor,  # [T, n, D]
    fn: torch.Tensor,  # [2n + n * n, n * D] float32
    base: torch.Tensor,  # [2n + n * n] float32
    scale: torch.Tensor,  # [3] float32: of pre, post, comb
    *,
    iters: int,
    eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Twin of ref.v4.hc_pre: (x [T, D], post [T, n], comb [T, n, n])."""
    tokens, n = streams.shape[:2]
    post = torch.empty(tokens, n, dtype=torch.float32, device=streams.device)
    comb = torch.empty(tokens, n, n, dtype=torch.float32, device=streams.device)
    x = _collapse(streams, fn, base, scale, (post, comb), iters=iters, eps=eps, norm_eps=norm_eps)
    return x, post, comb


def hc_head(
    streams: torch.Tensor,  # [T, n, D]
    fn: torch.Tensor,  # [n, n * D] float32
    base: torch.Tensor,  # [n] float32
    scale: torch.Tensor,  # [1] float32
    *,
    eps: float,
    norm_eps: float,
) -> torch.Tensor:  # [T, D]
    """Twin of ref.v4.hc_head."""
    return _collapse(streams, fn, base, scale, None, iters=0, eps=eps, norm_eps=norm_eps)


def _collapse(
    streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor,
    result: tuple[torch.Tensor, torch.Tensor] | None, *, iters: int, eps: float, norm_eps: float,
) -> torch.Tensor:  # fmt: skip
    """`result` takes post and comb; None: there are none."""
    streams = streams.contiguous()
    tokens, n, size = streams.shape
    if n != STREAMS:
        raise ValueError(f"{n} residual streams; {STREAMS} are served")
    config = tuned("hc_mix", arch_of(streams), tokens)
    blocks = triton.cdiv(tokens, config["BT"])
    wanted = config.pop("FILL") * num_processors(streams) // max(blocks, 1)
    splits = max(1, min(wanted, n * size // config["BK"], 32))
    splits = 1 << (splits.bit_length() - 1)
    parts = torch.empty(splits, tokens, 32, dtype=torch.float32, device=streams.device)
    launch(
        hc_mix, (blocks, splits), streams, fn, parts, tokens, n * size,
        M=len(fn), SPLITS=splits, NATIVE=not interpreted(), **config,
    )  # fmt: skip
    x = torch.empty(tokens, size, dtype=streams.dtype, device=streams.device)
    post, comb = result or (parts, parts)
    launch(
        hc_collapse, (tokens, triton.cdiv(size, COLUMNS) + (result is not None)),
        streams, parts, base, scale, x, post, comb, tokens, size, eps, norm_eps,
        ITERS=iters, HEAD=result is None, N=n, SPLITS=splits, BD=COLUMNS, num_warps=1,
    )  # fmt: skip
    return x


def hc_post(
    y: torch.Tensor,  # [T, D]
    streams: torch.Tensor,  # [T, n, D]
    post: torch.Tensor,  # [T, n] float32
    comb: torch.Tensor,  # [T, n, n] float32
) -> torch.Tensor:  # [T, n, D]
    """Twin of ref.v4.hc_post."""
    streams, y = streams.contiguous(), y.contiguous()
    tokens, n, size = streams.shape
    out = torch.empty_like(streams)
    launch(
        hc_expand, (tokens, triton.cdiv(size, 1024)), y, streams, post, comb, out, size, N=n, BD=1024, num_warps=4
    )  # fmt: skip
    return out
