"""Hyper-connections of many tokens: what is read often is laid out once, and nothing is converted in a loop.

    thirds           program (columns): fn as sums of three bf16 numbers, which hc_mix (hyper.py) makes in every step
    mix_many         program (tokens, split): as hc_mix, both operands as they lie in memory
    collapse_many    the first programs: gates of as many tokens as there are threads; the others: collapse of one token

Whether that is worth it the tables say: with few tokens, thirds and more programs cost more than they save.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splitserve.ops.kernels.counts import cdiv, next_power_of_2
from splitserve.ops.kernels.launch import WARP, arch_of, interpreted, launch, num_processors
from splitserve.ops.kernels.tuned import tuned
from splitserve.ops.triton.overlap import follow

from .sinkhorn import added, gates_of_threads

STREAMS = 4
ROWS = 32  # fn's, filled up for the tensor cores: a third begins after so many
COLUMNS = 1024  # of a warp that collapses, at most: more of four streams would not fit its registers


@triton.jit
def hc_thirds(
    fn,  # [M, K] float32
    thirds,  # [3 * 32, K] bf16
    K,
    M: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    # grid: [ceil(K / BK)]
    m, k = tl.arange(0, 32)[:, None], tl.program_id(0) * BK + tl.arange(0, BK)[None, :]
    at, inside = m * K + k, k < K
    w = tl.load(fn + at, mask=(m < M) & inside, other=0.0)  # nobody writes weights: see hc_mix
    follow()
    top = w.to(tl.bfloat16)
    rest = w - top.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    tl.store(thirds + at, top, mask=inside)
    tl.store(thirds + 32 * K + at, middle, mask=inside)
    tl.store(thirds + 64 * K + at, (rest - middle.to(tl.float32)).to(tl.bfloat16), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def hc_mix_many(
    streams,  # [T, K] bf16
    thirds,  # [3 * 32, K] bf16
    parts,  # [SPLITS, T, 32] float32: M mixes, then the sum of squares
    num_tokens,
    K,  # a multiple of BK
    M: tl.constexpr,
    SPLITS: tl.constexpr,
    NATIVE: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    # grid: [ceil(T / BT), SPLITS]
    follow()
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    here = token < num_tokens
    m, k = tl.arange(0, 32), tl.arange(0, BK)
    sums = tl.zeros((BT, 32), tl.float32)
    squares = tl.zeros(
        (BT, BK // 8), tl.float32
    )  # of eight columns, which one thread has; added up at the end
    part = tl.cdiv(tl.cdiv(K, BK), SPLITS) * BK
    first = tl.program_id(1) * part
    # Without masks, so that reads need no registers on their way: a row that is not there is the last one once more.
    rows = streams + tl.minimum(token, num_tokens - 1)[:, None].to(tl.int64) * K + k[None, :]
    weights = thirds + m[:, None] * K + k[None, :]
    for k0 in range(first, tl.minimum(first + part, K), BK):
        x = tl.load(rows + k0)
        top = tl.load(weights + k0)
        middle = tl.load(weights + 32 * K + k0)
        low = tl.load(weights + 64 * K + k0)
        wide = x.to(tl.float32)
        squares += tl.sum(tl.reshape(wide * wide, (BT, BK // 8, 8)), 2)
        if NATIVE:
            sums = tl.dot(x, tl.trans(top), tl.dot(x, tl.trans(middle), tl.dot(x, tl.trans(low), sums)))
        else:
            w = top.to(tl.float32) + (middle.to(tl.float32) + low.to(tl.float32))
            sums = tl.dot(wide, tl.trans(w), sums)
    into = parts + (tl.program_id(1) * num_tokens + token) * 32
    tl.store(into[:, None] + m[None, :], sums, mask=here[:, None] & (m < M)[None, :])
    tl.store(into + M, tl.sum(squares, 1), mask=here)


@triton.jit
def _weight(mine, base, root, step, eps, SPLITS: tl.constexpr):
    """Of one stream, as a number."""
    return 1.0 / (1.0 + tl.exp(-added(mine, step, SPLITS) * root - tl.load(base))) + eps


@triton.jit(do_not_specialize=["num_tokens"])
def hc_collapse_many(
    streams,  # [T, 4, D]
    parts,  # [SPLITS, T, 32] float32
    base,  # [24] float32
    scale,  # [3] float32
    x,  # [T, D]
    norm,  # [D] float32; NORM only
    post,  # [T, 4] float32
    comb,  # [T, 4, 4] float32
    num_tokens, D, eps, norm_eps,
    NORM: tl.constexpr,
    ITERS: tl.constexpr,
    SPLITS: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,  # threads of a program
):  # fmt: skip
    # grid: [ceil(T / BT) + T]; gates take longest and go first, beside the others
    blocks, step = tl.cdiv(num_tokens, BT), num_tokens * 32
    if tl.program_id(0) < blocks:
        follow()
        some = tl.program_id(0) * BT + tl.arange(0, BT)
        gates_of_threads(
            parts, base, scale, post, comb, some, num_tokens, 4 * D, eps, norm_eps, ITERS, SPLITS
        )
    else:
        token = (tl.program_id(0) - blocks).to(tl.int64)
        col = tl.arange(0, BD)
        at = streams + token * 4 * D + col
        a = tl.load(at, mask=col < D, other=0.0)  # before `follow`: see hc_collapse
        b = tl.load(at + D, mask=col < D, other=0.0)
        c = tl.load(at + 2 * D, mask=col < D, other=0.0)
        d = tl.load(at + 3 * D, mask=col < D, other=0.0)
        weight = tl.load(norm + col, mask=col < D, other=0.0) if NORM else 0.0
        follow()
        mine = parts + token * 32
        root = tl.load(scale) / tl.sqrt(added(mine + 24, step, SPLITS) / (4 * D) + norm_eps)
        one = a.to(tl.float32) * _weight(mine, base, root, step, eps, SPLITS)
        one += b.to(tl.float32) * _weight(mine + 1, base + 1, root, step, eps, SPLITS)
        two = c.to(tl.float32) * _weight(mine + 2, base + 2, root, step, eps, SPLITS)
        two += d.to(tl.float32) * _weight(mine + 3, base + 3, root, step, eps, SPLITS)
        one += two
        if NORM:  # of what a kernel by itself would have been given
            one = one.to(a.dtype).to(tl.float32)
            one *= weight / tl.sqrt(tl.sum(one * one, 0) / D + norm_eps)
        tl.store(x + token * D + col, one, mask=col < D)


def serves(streams: torch.Tensor) -> bool:
    """Whether `pre_many` is there for [T, n, D], and faster."""
    tokens, n, size = streams.shape
    arch = arch_of(streams)
    if n != STREAMS or not tuned("hc_many", arch, tokens)["MANY"]:
        return False
    return n * size % int(tuned("hc_mix_many", arch, tokens)["BK"]) == 0


def pre_many(
    streams: torch.Tensor,  # [T, 4, D]
    fn: torch.Tensor,  # [24, 4 * D] float32
    base: torch.Tensor,  # [24] float32
    scale: torch.Tensor,  # [3] float32
    *,
    iters: int,
    eps: float,
    norm_eps: float,
    norm: torch.Tensor | None = None,  # [D] float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As hyper.hc_pre, for what `serves` says yes to."""
    streams = streams.contiguous()
    tokens, _, size = streams.shape
    parts = _mix(streams, fn)
    x = torch.empty(tokens, size, dtype=streams.dtype, device=streams.device)
    post = torch.empty(tokens, STREAMS, dtype=torch.float32, device=streams.device)
    comb = torch.empty(tokens, STREAMS, STREAMS, dtype=torch.float32, device=streams.device)
    columns = next_power_of_2(size)
    warps = max(4, columns // COLUMNS)
    launch(
        hc_collapse_many, (cdiv(tokens, warps * WARP) + tokens,),
        streams, parts, base, scale, x, base if norm is None else norm, post, comb, tokens, size, eps, norm_eps,
        NORM=norm is not None, ITERS=iters, SPLITS=parts.shape[0], BD=columns, BT=warps * WARP, num_warps=warps,
    )  # fmt: skip
    return x, post, comb


def _mix(streams: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
    """[splits, T, 32]."""
    tokens, n, size = streams.shape
    width = n * size
    thirds = torch.empty(3 * ROWS, width, dtype=torch.bfloat16, device=streams.device)
    launch(hc_thirds, (cdiv(width, 64),), fn, thirds, width, M=fn.shape[0], BK=64, num_warps=4)
    config = tuned("hc_mix_many", arch_of(streams), tokens)
    blocks, at_once = cdiv(tokens, config["BT"]), num_processors(streams)  # a program fills a multiprocessor
    splits = min(range(1, config.pop("MOST") + 1), key=lambda s: cdiv(blocks * s, at_once) / s)
    parts = torch.empty(splits, tokens, ROWS, dtype=torch.float32, device=streams.device)
    launch(
        hc_mix_many, (blocks, splits), streams, thirds, parts, tokens, width,
        M=fn.shape[0], SPLITS=splits, NATIVE=not interpreted(), **config,
    )  # fmt: skip
    return parts
