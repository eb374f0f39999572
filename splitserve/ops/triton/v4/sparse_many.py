"""Attention of DeepSeek-V4 of many tokens: rows are decoded once for all of them, and read once for the heads of a program.

    prepare          rows as numbers, and lists of them (sparse_scratch.py)
    attend_wide      program (token, heads): logits [heads, rows]; for heads that fill a matrix of the tensor cores
    attend_narrow    program (token, heads): logits [rows, heads]; for fewer, so that the rows fill it

Both hold a tile of rows in shared memory while the next one is on its way there, and the weighted sums in registers.
Their products stand in branches that are always taken: the compiler would otherwise see that one product follows the
other and lay the first out for the second, which makes it wait; or move the next rows' reads behind both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splitserve.ops.kernels.counts import cdiv
from splitserve.ops.kernels.launch import arch_of, interpreted, launch
from splitserve.ops.kernels.tuned import tuned
from splitserve.ops.ref.v4.sparse import Rows
from splitserve.ops.triton.overlap import follow

from .latents import LOG2E, NEVER
from .sparse_scratch import TILE, prepare


@triton.jit
def _turned(x, cos, sin, first, M: tl.constexpr, W: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr):
    """x [M, W] are columns from `first` on: the rotary ones turned back."""
    even, odd = tl.split(tl.reshape(x, (M, W // 2, 2)))
    pair = first // 2 + tl.arange(0, W // 2) - NOPE // 2
    turns = (pair >= 0) & (pair < ROPE // 2)
    c = tl.load(cos + pair, mask=turns, other=1.0)[None, :]
    s = tl.load(sin + pair, mask=turns, other=0.0)[None, :]
    return tl.reshape(tl.join(even * c + odd * s, odd * c - even * s), (M, W))


@triton.jit(do_not_specialize=["width"])
def attend_wide(
    q,  # [T, heads, NOPE + ROPE]
    numbers, lists, width,  # of Scratch
    sink,  # [heads] float32
    cos, sin,  # [T, ROPE / 2] float32, where TURN_BACK
    out,  # [T, heads, NOPE + ROPE]
    heads,
    scale,  # times log2(e)
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    D: tl.constexpr,
    TURN_BACK: tl.constexpr,
    NATIVE: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # grid: [T, ceil(heads / BH)]; later tokens, whose lists are longer, first
    follow()
    NUM: tl.constexpr = tl.bfloat16 if NATIVE else tl.float32
    token = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    ours, col = (head < heads)[:, None], tl.arange(0, D)
    at = (token * heads + head[:, None]) * (NOPE + ROPE) + col[None, :]
    exists = ours & (col < NOPE + ROPE)[None, :]
    qs = tl.load(q + at, mask=exists, other=0.0).to(NUM)
    # the sink is the first row, of weight 1
    top = tl.maximum(tl.load(sink + head, mask=head < heads, other=0.0) * 1.4426950408889634, -1e20)
    total = tl.full((BH, 2), 0.5, tl.float32)  # by halves of a tile, summed in the end
    mixed = tl.zeros((BH, D), tl.float32)
    end = tl.load(lists + tl.num_programs(0).to(tl.int64) * width + TILE + token)
    mine = lists + token * width + tl.arange(0, BK)
    index = tl.load(mine)
    for start in tl.range(0, end, BK, num_stages=STAGES):
        following = tl.load(mine + start + BK)
        k = tl.load(numbers + index[:, None] * D + col[None, :])
        weights = tl.zeros((BH, BK), NUM)
        best, shrink = top, top
        if start < width:  # always
            here = tl.load(mine + start) > 0  # once more: not kept in registers until then
            logits = tl.dot(qs, tl.trans(k))
            logits = tl.where(here[None, :], logits, NEVER)
            best = tl.maximum(top, tl.max(logits, 1) * scale)
            raw = tl.exp2(logits * scale - best[:, None])
            shrink = tl.exp2(top - best)
            total = total * shrink[:, None] + tl.sum(tl.reshape(raw, (BH, 2, BK // 2)), 2)
            weights = raw.to(NUM)
        if start < end:  # always
            mixed = tl.dot(weights, k, mixed * shrink[:, None])
        top = best
        index = following
    mixed = mixed * (1.0 / tl.sum(total, 1))[:, None]
    if TURN_BACK:
        angles = token * (ROPE // 2)
        mixed = _turned(mixed, cos + angles, sin + angles, 0, BH, D, NOPE, ROPE)
    tl.store(out + at, mixed, mask=exists)


@triton.jit(do_not_specialize=["width"])
def attend_narrow(
    q,  # [T, heads, NOPE + ROPE]
    numbers, lists, width,  # of Scratch
    sink,  # [heads] float32
    cos, sin,  # [T, ROPE / 2] float32, where TURN_BACK
    out,  # [T, heads, NOPE + ROPE]
    heads,
    scale,  # times log2(e)
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    D: tl.constexpr,
    TURN_BACK: tl.constexpr,
    NATIVE: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # grid: [T, ceil(heads / BH)]; later tokens, whose lists are longer, first; columns in two halves
    follow()
    NUM: tl.constexpr = tl.bfloat16 if NATIVE else tl.float32
    H: tl.constexpr = D // 2
    token = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    ours, col = (head < heads)[:, None], tl.arange(0, H)[None, :]
    at = (token * heads + head[:, None]) * (NOPE + ROPE) + col
    e0, e1 = ours & (col < NOPE + ROPE), ours & (col + H < NOPE + ROPE)
    q0 = tl.load(q + at, mask=e0, other=0.0).to(NUM)
    q1 = tl.load(q + at + H, mask=e1, other=0.0).to(NUM)
    top = tl.maximum(tl.load(sink + head, mask=head < heads, other=0.0) * 1.4426950408889634, -1e20)
    sunk = tl.full((BH,), 1.0, tl.float32)  # the sink, relative to `top`
    total = tl.zeros((BK, BH), tl.float32)
    m0, m1 = tl.zeros((H, BH), tl.float32), tl.zeros((H, BH), tl.float32)
    end = tl.load(lists + tl.num_programs(0).to(tl.int64) * width + TILE + token)
    mine = lists + token * width + tl.arange(0, BK)
    index = tl.load(mine)
    for start in tl.range(0, end, BK, num_stages=STAGES):
        following = tl.load(mine + start + BK)
        row = numbers + index[:, None] * D + col
        k0 = tl.load(row)
        k1 = tl.load(row + H)
        if start < width:  # always
            here = tl.load(mine + start) > 0
            logits = tl.dot(k1, tl.trans(q1), tl.dot(k0, tl.trans(q0)))
            logits = tl.where(here[:, None], logits, NEVER)
            best = tl.maximum(top, tl.max(logits, 0) * scale)
            weights = tl.exp2(logits * scale - best[None, :])
            shrink = tl.exp2(top - best)
            sunk *= shrink
            total = total * shrink[None, :] + weights
            weights = weights.to(NUM)
            m0 = tl.dot(tl.trans(k0), weights, m0 * shrink[None, :])
            m1 = tl.dot(tl.trans(k1), weights, m1 * shrink[None, :])
            top = best
        index = following
    factor = (1.0 / (sunk + tl.sum(total, 0)))[None, :]
    m0, m1 = tl.trans(m0 * factor), tl.trans(m1 * factor)
    if TURN_BACK:
        angles = token * (ROPE // 2)
        if NOPE < H:
            m0 = _turned(m0, cos + angles, sin + angles, 0, BH, H, NOPE, ROPE)
        m1 = _turned(m1, cos + angles, sin + angles, H, BH, H, NOPE, ROPE)
    tl.store(out + at, m0, mask=e0)
    tl.store(out + at + H, m1, mask=e1)


def attend_many(
    q: torch.Tensor,  # [T, heads, head_dim]
    near: Rows,
    far: Rows | None,
    sink: torch.Tensor,  # [heads] float32
    out: torch.Tensor,  # like q
    *,
    scale: float,
    rope_dim: int,
    turn_back: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """As sparse.attend, for what sparse_scratch.serves says yes to."""
    tokens, heads, dim = q.shape
    config = tuned("attend_many", arch_of(q), heads)
    scratch = prepare(near, far, dim=dim, rope_dim=rope_dim)
    cos, sin = turn_back or (sink, sink)
    launch(
        attend_wide if config.pop("WIDE") else attend_narrow, (tokens, cdiv(heads, config["BH"])),
        q, scratch.numbers, scratch.lists, scratch.width, sink, cos, sin, out, heads, scale * LOG2E,
        NOPE=dim - rope_dim, ROPE=rope_dim, D=scratch.numbers.shape[1], TURN_BACK=turn_back is not None,
        NATIVE=not interpreted(), **config,
    )  # fmt: skip
