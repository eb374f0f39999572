"""Hyper-connections: four residual streams, mixed by weights that depend on the token.

    mix        program (tokens, split): part of fn . streams, and of the sum of squares
    collapse   program (token, columns): coefficients from the parts, the weighted sum of the streams, and its norm
    expand     program (token, columns): what a sub-layer gave, and the old streams, into the new ones

Sinkhorn's rounds follow one another and take longer than all else, and nobody needs what comes of them before a
sub-layer has ended. With few tokens every program of `expand` runs them for itself, while it waits for the sub-layer;
of many they are a kernel (sinkhorn.py), and of still more all but `expand` goes another way (hyper_many.py). `expand`
also adds up what the ranks of a group found, where they can write to each other's memory (exchange.py): then a sum
between ranks is no kernel of its own.

fn is float32. Its products are exact: it is taken apart into three bf16 numbers, and streams are bf16 already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
import triton.language as tl

from splitserve.ops.kernels.counts import cdiv, next_power_of_2
from splitserve.ops.kernels.launch import arch_of, interpreted, launch, num_processors
from splitserve.ops.kernels.tuned import tuned
from splitserve.ops.triton.exchange import Mailbox, add_ranks
from splitserve.ops.triton.overlap import follow
from splitserve.ops.triton.parts import FEW, MOST, Parts

from . import hyper_many
from .hyper_many import STREAMS
from .sinkhorn import column, hc_gates, mixture, root_of

COLUMNS = 512  # of a program that collapses: one warp, so that its sums over four streams stay in it


@triton.jit(do_not_specialize=["num_tokens"])
def hc_mix(
    streams,  # [T, K]
    fn,  # [M, K] float32
    parts,  # [SPLITS, T, 32] float32: M mixes, then the sum of squares
    num_tokens, K,
    M: tl.constexpr,
    SPLITS: tl.constexpr,
    ONCE: tl.constexpr,  # a program has one block
    NATIVE: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    # grid: [ceil(T / BT), SPLITS]
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    here = (token < num_tokens)[:, None]
    m, k = tl.arange(0, 32)[None, :], tl.arange(0, BK)
    sums = tl.zeros((BT, 32), tl.float32)
    squares = tl.zeros((BT,), tl.float32)
    part = tl.cdiv(tl.cdiv(K, BK), SPLITS) * BK
    first = tl.program_id(1) * part
    weights = fn + m * K + k[:, None]
    if ONCE:  # nobody writes weights: they may be read while the kernel before still runs
        w = tl.load(weights + first, mask=(m < M) & (first + k < K)[:, None], other=0.0)
    follow()
    for k0 in range(first, tl.minimum(first + part, K), BK):
        inside = k0 + k < K
        at = streams + token[:, None].to(tl.int64) * K + k0 + k[None, :]
        x = tl.load(at, mask=here & inside[None, :], other=0.0)
        if not ONCE:
            w = tl.load(weights + k0, mask=(m < M) & inside[:, None], other=0.0)
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


@triton.jit(do_not_specialize=["num_tokens"])
def hc_collapse(
    streams,  # [T, N, D]
    parts,  # [SPLITS, T, 32] float32
    base,  # [M] float32
    scale,  # [3] float32, or [1] where HEAD
    x,  # [T, D]
    norm,  # [D] float32; NORM only
    num_tokens, D, eps, norm_eps,
    HEAD: tl.constexpr,
    NORM: tl.constexpr,  # x is normed too: a program has a token's whole row
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    # grid: [T, ceil(D / BD)]
    token = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, N)
    mine, step = parts + token * 32, num_tokens * 32
    M: tl.constexpr = N if HEAD else 2 * N + N * N
    col = tl.program_id(1) * BD + tl.arange(0, BD)
    # Streams are older than the kernel before this one, which began only after their writer had ended.
    # One by one: as rows of one tensor they might lie in different warps, and be added up through shared memory.
    tl.static_assert(N == 4)
    at = streams + token * N * D + col
    a = tl.load(at, mask=col < D, other=0.0)
    b = tl.load(at + D, mask=col < D, other=0.0)
    c = tl.load(at + 2 * D, mask=col < D, other=0.0)
    d = tl.load(at + 3 * D, mask=col < D, other=0.0)
    if NORM:
        weight = tl.load(norm + col, mask=col < D, other=0.0)
    follow()
    root = root_of(mine, step, N * D, norm_eps, M, SPLITS)
    pre = column(mine, n, step, SPLITS) * root * tl.load(scale) + tl.load(base + n)
    pre = 1.0 / (1.0 + tl.exp(-pre)) + eps
    one = a.to(tl.float32) * tl.sum(tl.where(n == 0, pre, 0.0)) + b.to(tl.float32) * tl.sum(
        tl.where(n == 1, pre, 0.0)
    )
    one += c.to(tl.float32) * tl.sum(tl.where(n == 2, pre, 0.0)) + d.to(tl.float32) * tl.sum(
        tl.where(n == 3, pre, 0.0)
    )
    if NORM:  # of what a kernel by itself would have been given
        one = one.to(a.dtype).to(tl.float32)
        one *= weight / tl.sqrt(tl.sum(one * one, 0) / D + norm_eps)
    tl.store(x + token * D + col, one, mask=col < D)


@triton.jit(do_not_specialize=["num_tokens", "rank"])
def hc_expand(
    y,  # [PARTS, T, D]; where RANKS > 1 this rank's part, [T, D / 2] int32
    streams,  # [T, N, D]
    parts,  # [SPLITS, T, 32] float32; SPLITS only
    base, scale,  # as for hc_collapse; SPLITS only
    post,  # [T, N] float32; not where SPLITS
    comb,  # [T, N, N] float32; not where SPLITS
    out,  # [T, N, D]
    addresses, turns, rank, half,  # a mailbox; RANKS > 1 only
    num_tokens, D, eps, norm_eps,
    ITERS: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,  # 0: post and comb are there
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    # grid: [T, ceil(D / BD)]
    if not SPLITS:
        follow()
    token = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, N)
    col = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = col < D
    at = streams + (token * N + j[:, None]) * D + col[None, :]
    old = tl.load(at, mask=inside[None, :], other=0.0).to(tl.float32)
    if SPLITS:
        mine, step = parts + token * 32, num_tokens * 32
        gates, columns = mixture(mine, base, scale, step, N * D, eps, norm_eps, ITERS, N, SPLITS)
        # What was read so far is many kernels old. The one before this may not have begun its work (follow_briefly), but
        # the one before that had waited for its own forerunner when this one was let start.
        follow()
    if RANKS > 1:
        pair = tl.program_id(1) * (BD // 2) + tl.arange(0, BD // 2)
        used = turns + token * tl.num_programs(1) + tl.program_id(1)
        turn = tl.load(used) + 1
        here, at = pair < D // 2, token * (D // 2) + pair
        part = tl.load(y + at, mask=here, other=0)
        even, odd = add_ranks(part, at, here, addresses, turn, rank, half, RANKS)
        new = tl.interleave(even, odd)
        tl.store(used, turn)
    else:
        new = tl.load(y + token * D + col, mask=inside, other=0.0).to(tl.float32)
        for split in tl.static_range(1, PARTS):
            new += tl.load(y + (split * tl.num_programs(0) + token) * D + col, mask=inside, other=0.0)
    for k in tl.static_range(N):
        if SPLITS:
            weight = columns[k]
            gate = tl.sum(tl.where(j == k, gates, 0.0), 0)
        else:
            weight = tl.load(comb + (token * N + j) * N + k)
            gate = tl.load(post + token * N + k)
        tl.store(out + (token * N + k) * D + col, gate * new + tl.sum(old * weight[:, None], 0), mask=inside)


def hc_pre(
    streams: torch.Tensor,  # [T, n, D]
    fn: torch.Tensor,  # [2n + n * n, n * D] float32
    base: torch.Tensor,  # [2n + n * n] float32
    scale: torch.Tensor,  # [3] float32: of pre, post, comb
    *,
    iters: int,
    eps: float,
    norm_eps: float,
    norm: torch.Tensor | None = None,  # [D] float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Twin of ref.v4.hc_pre: (x [T, D], post [T, n], comb [T, n, n]); x goes through rms_norm where there is `norm`."""
    if hyper_many.serves(streams):
        return hyper_many.pre_many(
            streams, fn, base, scale, iters=iters, eps=eps, norm_eps=norm_eps, norm=norm
        )
    mixing = _Mixing(_mix(streams, fn), base, scale, iters, eps, norm_eps)
    return _collapse(streams, mixing, norm=norm), *_gates(streams, mixing)


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
    return _collapse(streams, _Mixing(_mix(streams, fn), base, scale, 0, eps, norm_eps))


def hc_enter(
    streams: torch.Tensor,  # [T, n, D]
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    iters: int,
    eps: float,
    norm_eps: float,
    norm: torch.Tensor | None = None,  # [D] float32
) -> tuple[torch.Tensor, Callable[[Any, Group | None], torch.Tensor]]:
    """hc_pre's x, rms_norm of it where there is a weight for that, and hc_post of what comes of it, summed over a
    group's ranks (None: there are no others). With few tokens the mixture is worked out there, and the sum is part of
    the same kernel where the group has a mailbox for it.
    """
    if streams.shape[0] > FEW:
        x, post, comb = hc_pre(streams, fn, base, scale, iters=iters, eps=eps, norm_eps=norm_eps, norm=norm)
        return x, lambda y, group: hc_post(group.all_reduce(y) if group else y, streams, post, comb)
    mixing = _Mixing(_mix(streams, fn), base, scale, iters, eps, norm_eps)

    def leave(y: torch.Tensor | Parts, group: Group | None) -> torch.Tensor:
        mailbox = group.mailbox(y) if group else None
        if mailbox is None and group and group.size > 1:
            y = group.all_reduce(y.total() if isinstance(y, Parts) else y)
        return _expand(y, streams, mixing.parts, mixing.parts, mixing, mailbox)

    return _collapse(streams, mixing, norm=norm), leave


class Group(Protocol):
    """What a sum between ranks takes (layers/forward.py)."""

    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor: ...

    def mailbox(self, x: Any) -> Mailbox | None: ...


@dataclass(frozen=True)
class _Mixing:
    """What the weights of streams are worked out from."""

    parts: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    iters: int
    eps: float
    norm_eps: float


def _mix(streams: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
    """[splits, T, 32]."""
    tokens, n, size = streams.shape
    if n != STREAMS:
        raise ValueError(f"{n} residual streams; {STREAMS} are served")
    config = tuned("hc_mix", arch_of(streams), tokens)
    blocks = cdiv(tokens, config["BT"])
    wanted = config.pop("FILL") * num_processors(streams) // max(blocks, 1)
    splits = max(1, min(wanted, n * size // config["BK"], config.pop("MOST")))
    splits = 1 << (splits.bit_length() - 1)
    parts = torch.empty(splits, tokens, 32, dtype=torch.float32, device=streams.device)
    launch(
        hc_mix, (blocks, splits), streams.contiguous(), fn, parts, tokens, n * size,
        M=fn.shape[0], SPLITS=splits, ONCE=splits * config["BK"] >= n * size, NATIVE=not interpreted(), **config,
    )  # fmt: skip
    return parts


def _collapse(streams: torch.Tensor, mixing: _Mixing, norm: torch.Tensor | None = None) -> torch.Tensor:
    tokens, n, size = streams.shape
    x = torch.empty(tokens, size, dtype=streams.dtype, device=streams.device)
    parts, base, scale = mixing.parts, mixing.base, mixing.scale
    columns, warps = (COLUMNS, 1) if norm is None else (next_power_of_2(size), 16)
    launch(
        hc_collapse, (tokens, cdiv(size, columns)),
        streams.contiguous(), parts, base, scale, x, base if norm is None else norm, tokens, size,
        mixing.eps, mixing.norm_eps,
        HEAD=base.shape[0] == n, NORM=norm is not None, N=n, SPLITS=parts.shape[0], BD=columns, num_warps=warps,
    )  # fmt: skip
    return x


def _gates(streams: torch.Tensor, mixing: _Mixing) -> tuple[torch.Tensor, torch.Tensor]:
    """post [T, n] and comb [T, n, n]."""
    tokens, n, size = streams.shape
    post = torch.empty(tokens, n, dtype=torch.float32, device=streams.device)
    comb = torch.empty(tokens, n, n, dtype=torch.float32, device=streams.device)
    launch(
        hc_gates, (cdiv(tokens, 16),),
        mixing.parts, mixing.base, mixing.scale, post, comb, tokens, n * size, mixing.eps, mixing.norm_eps,
        ITERS=mixing.iters, N=n, SPLITS=mixing.parts.shape[0], BT=16, num_warps=4,
    )  # fmt: skip
    return post, comb


def hc_post(
    y: torch.Tensor,  # [T, D]
    streams: torch.Tensor,  # [T, n, D]
    post: torch.Tensor,  # [T, n] float32
    comb: torch.Tensor,  # [T, n, n] float32
) -> torch.Tensor:  # [T, n, D]
    """Twin of ref.v4.hc_post."""
    return _expand(y, streams, post, comb, None)


def _expand(
    y: torch.Tensor | Parts, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor,
    mixing: _Mixing | None, mailbox: Mailbox | None = None,
) -> torch.Tensor:  # fmt: skip
    """`mixing`: post and comb are not there yet. `mailbox`: y is this rank's part, to be added to the others'."""
    if isinstance(y, Parts) and (mailbox or len(y.sums) > MOST):  # the other ranks wait for what is sent
        y = y.total()
    streams, given = streams.contiguous(), (y.sums if isinstance(y, Parts) else y[None]).contiguous()
    tokens, n, size = streams.shape
    out = torch.empty_like(streams)
    parts, base, scale = (mixing.parts, mixing.base, mixing.scale) if mixing else (post, post, post)
    columns, warps = (COLUMNS, 1) if mixing else (1024, 4)
    ranks, mail = 1, (post, post, 0, 0)
    if mailbox is not None:
        ranks, given = mailbox.size, given.view(torch.int32)
        if ranks > 4:  # each rank's place takes registers
            columns //= 2
        mail = (mailbox.addresses, mailbox.turns, mailbox.rank, mailbox.half)
    launch(
        hc_expand, (tokens, cdiv(size, columns)),
        given, streams, parts, base, scale, post, comb, out, *mail, tokens, size,
        mixing.eps if mixing else 0.0, mixing.norm_eps if mixing else 0.0,
        ITERS=mixing.iters if mixing else 0, N=n, SPLITS=parts.shape[0] if mixing else 0, RANKS=ranks,
        PARTS=len(given), BD=columns,
        num_warps=warps,
    )  # fmt: skip
    return out
