"""Attention of DeepSeek-V4 over lists of rows, near and far, under one softmax with a sink.

    lists    near[t] ++ far[t], cut into tiles of BK rows
    rate     program (token, some tiles, heads): logits of a tile, its maximum, weights relative to that, their sum
    mix      program (token, columns, heads): weights brought to the maximum of all tiles, times the rows' columns

Heads of 512 numbers are too wide for one program to hold weighted rows of all columns beside everything else, so rows
are read twice, the second time from the cache and column by column. sparse_few.py does it in one pass: for few tokens,
and for many where shared memory has room. sparse_many.py decodes rows once for many tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from splitserve.ops.kernels.counts import cdiv, next_power_of_2
from splitserve.ops.kernels.launch import arch_of, interpreted, launch, num_processors
from splitserve.ops.kernels.tuned import tuned
from splitserve.ops.ref.v4.sparse import Rows
from splitserve.ops.triton.overlap import follow

from .latents import (
    LOG2E,
    NEVER,
    WIDE,
    alignment_of,
    list_arguments,
    numbers_of,
    row_pointers,
    row_scales,
    stored_columns,
)
from .sparse_few import attend_few
from .sparse_many import attend_many
from .sparse_scratch import serves


@triton.jit(
    do_not_specialize=[
        "tiles",
        "share",
        "num_near",
        "num_far",
        "near_per_unit",
        "near_unit",
        "far_per_unit",
        "far_unit",
    ]
)
def attend_rate(
    q,  # [T, heads, NOPE + ROPE]
    near, near_index, num_near, near_per_unit, near_unit, near_row,  # strides in steps of ALIGN elements
    far, far_index, num_far, far_per_unit, far_unit, far_row,
    weights,  # [T, heads, tiles * BK] bf16
    tops, totals,  # [T, tiles, heads] float32
    heads, tiles, share,
    scale,  # times log2(e)
    PACKED: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    CHUNKS: tl.constexpr,  # of C columns
    C: tl.constexpr,
    ALIGN: tl.constexpr,
    NATIVE: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # grid: [T, ceil(tiles / share), ceil(heads / BH)]
    follow()
    NUM: tl.constexpr = tl.bfloat16 if NATIVE else tl.float32
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(2) * BH + tl.arange(0, BH)
    ours = head < heads
    col = tl.arange(0, C)[None, :]
    queries = q + (token * heads + head[:, None]) * (NOPE + ROPE) + col
    q0 = tl.load(queries, mask=ours[:, None] & (col < NOPE + ROPE), other=0.0).to(NUM)
    if CHUNKS == 4:
        q1 = tl.load(queries + C, mask=ours[:, None], other=0.0).to(NUM)
        q2 = tl.load(queries + 2 * C, mask=ours[:, None], other=0.0).to(NUM)
        q3 = tl.load(queries + 3 * C, mask=ours[:, None], other=0.0).to(NUM)
    near_tiles = tl.cdiv(num_near, BK)
    first = tl.program_id(1) * share
    for tile in tl.range(first, tl.minimum(first + share, tiles), num_stages=STAGES):
        rows, here = row_pointers(
            tile, token,
            near, near_index, num_near, near_per_unit, near_unit, near_row,
            far, far_index, num_far, far_per_unit, far_unit, far_row, near_tiles, ALIGN, BK,
        )  # fmt: skip
        scales = row_scales(rows, here, PACKED, NOPE, ROPE)
        # all loads before the first use, so that they are under way together
        c0, r0 = stored_columns(rows, here, 0, CHUNKS == 1, C, PACKED, NOPE, ROPE)
        if CHUNKS == 4:
            c1, r1 = stored_columns(rows, here, C, False, C, PACKED, NOPE, ROPE)
            c2, r2 = stored_columns(rows, here, 2 * C, False, C, PACKED, NOPE, ROPE)
            c3, r3 = stored_columns(rows, here, 3 * C, True, C, PACKED, NOPE, ROPE)
        logits = tl.dot(q0, tl.trans(numbers_of(c0, r0, scales, 0, CHUNKS == 1, C, BK, PACKED, NOPE, NATIVE)))
        if CHUNKS == 4:
            logits = tl.dot(
                q1, tl.trans(numbers_of(c1, r1, scales, C, False, C, BK, PACKED, NOPE, NATIVE)), logits
            )
            logits = tl.dot(
                q2, tl.trans(numbers_of(c2, r2, scales, 2 * C, False, C, BK, PACKED, NOPE, NATIVE)), logits
            )
            logits = tl.dot(
                q3, tl.trans(numbers_of(c3, r3, scales, 3 * C, True, C, BK, PACKED, NOPE, NATIVE)), logits
            )
        logits = tl.where(here[None, :], logits * scale, NEVER)
        top = tl.max(logits, 1)
        weight = tl.where(here[None, :], tl.exp2(logits - top[:, None]), 0.0)
        into = (
            weights + (token * heads + head[:, None]) * (tiles * BK) + tile * BK + tl.arange(0, BK)[None, :]
        )
        tl.store(into, weight, mask=ours[:, None])
        at = (token * tiles + tile) * heads + head
        tl.store(tops + at, top, mask=ours)
        tl.store(totals + at, tl.sum(weight, 1), mask=ours)


@triton.jit
def _mix_tiles(
    weights, tops, totals, near, near_index, num_near, near_per_unit, near_unit, near_row,
    far, far_index, num_far, far_per_unit, far_unit, far_row, heads, tiles,
    token, column, head, mine, best, total, mixed, near_tiles,
    TURNS: tl.constexpr, PACKED: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, C: tl.constexpr,
    ALIGN: tl.constexpr, NATIVE: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Weighted columns of all tiles, and the sum of weights."""
    NUM: tl.constexpr = tl.bfloat16 if NATIVE else tl.float32
    ours = head < heads
    for tile in tl.range(0, tiles, num_stages=STAGES):
        rows, here = row_pointers(
            tile, token,
            near, near_index, num_near, near_per_unit, near_unit, near_row,
            far, far_index, num_far, far_per_unit, far_unit, far_row, near_tiles, ALIGN, BK,
        )  # fmt: skip
        scales = row_scales(rows, here, PACKED, NOPE, ROPE)
        codes, rope = stored_columns(rows, here, column, TURNS, C, PACKED, NOPE, ROPE)
        at = weights + (token * heads + head[:, None]) * (tiles * BK) + tile * BK + tl.arange(0, BK)[None, :]
        weight = tl.load(at, mask=ours[:, None], other=0.0)
        shrink = tl.exp2(tl.load(tops + mine + tile * heads, mask=ours, other=0.0) - best)
        total += tl.load(totals + mine + tile * heads, mask=ours, other=0.0) * shrink
        weight = (weight.to(tl.float32) * shrink[:, None]).to(NUM)
        mixed = tl.dot(
            weight, numbers_of(codes, rope, scales, column, TURNS, C, BK, PACKED, NOPE, NATIVE), mixed
        )
    return mixed, total


@triton.jit(
    do_not_specialize=[
        "tiles",
        "num_near",
        "num_far",
        "near_per_unit",
        "near_unit",
        "far_per_unit",
        "far_unit",
    ]
)
def attend_mix(
    weights,  # [T, heads, tiles * BK] bf16
    tops, totals,  # [T, tiles, heads] float32
    near, near_index, num_near, near_per_unit, near_unit, near_row,
    far, far_index, num_far, far_per_unit, far_unit, far_row,
    sink,  # [heads] float32
    cos, sin,  # [T, ROPE / 2] float32, where TURN_BACK
    out,  # [T, heads, NOPE + ROPE]
    heads, tiles,
    PACKED: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    C: tl.constexpr,
    TURN_BACK: tl.constexpr,
    ALIGN: tl.constexpr,
    NATIVE: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # grid: [T, chunks of C columns, ceil(heads / BH)]; products in _mix_tiles: tl.dot(...)
    follow()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * C
    head = tl.program_id(2) * BH + tl.arange(0, BH)
    ours = head < heads
    mine = (token * tiles) * heads + head
    share = tl.load(sink + head, mask=ours, other=0.0) * 1.4426950408889634
    best = share
    for tile in range(tiles):
        best = tl.maximum(best, tl.load(tops + mine + tile * heads, mask=ours, other=0.0))
    total = tl.exp2(share - best)
    mixed = tl.zeros((BH, C), tl.float32)
    near_tiles = tl.cdiv(num_near, BK)
    if column + C <= NOPE:  # no rotary numbers here: less to load and to choose from
        mixed, total = _mix_tiles(
            weights, tops, totals, near, near_index, num_near, near_per_unit, near_unit, near_row,
            far, far_index, num_far, far_per_unit, far_unit, far_row, heads, tiles,
            token, column, head, mine, best, total, mixed, near_tiles,
            False, PACKED, NOPE, ROPE, C, ALIGN, NATIVE, BK, STAGES,
        )  # fmt: skip
    else:
        mixed, total = _mix_tiles(
            weights, tops, totals, near, near_index, num_near, near_per_unit, near_unit, near_row,
            far, far_index, num_far, far_per_unit, far_unit, far_row, heads, tiles,
            token, column, head, mine, best, total, mixed, near_tiles,
            True, PACKED, NOPE, ROPE, C, ALIGN, NATIVE, BK, STAGES,
        )  # fmt: skip
    mixed /= total[:, None]
    if TURN_BACK:
        even, odd = tl.split(tl.reshape(mixed, (BH, C // 2, 2)))
        pair = column // 2 + tl.arange(0, C // 2) - NOPE // 2
        turns = (pair >= 0) & (pair < ROPE // 2)
        c = tl.load(cos + token * (ROPE // 2) + pair, mask=turns, other=1.0)[None, :]
        s = tl.load(sin + token * (ROPE // 2) + pair, mask=turns, other=0.0)[None, :]
        mixed = tl.reshape(tl.join(even * c + odd * s, odd * c - even * s), (BH, C))
    col = column + tl.arange(0, C)[None, :]
    into = out + (token * heads + head[:, None]) * (NOPE + ROPE) + col
    tl.store(into, mixed, mask=ours[:, None] & (col < NOPE + ROPE))


def attend(
    q: torch.Tensor,  # [T, heads, head_dim]
    near: Rows,
    far: Rows | None,
    sink: torch.Tensor,  # [heads] float32: a logit as it enters the softmax, not scaled
    *,
    scale: float,
    rope_dim: int,
    turn_back: tuple[torch.Tensor, torch.Tensor] | None = None,  # cos and sin of rope_table
    out: torch.Tensor | None = None,  # contiguous, like q: where the result is to be
) -> torch.Tensor:  # [T, heads, head_dim] in q's dtype; sums in float32
    """Twin of ref.v4.attend. With `turn_back` the result is also rotated back, as rotate_tail(inverse=True) does.

    Raises ValueError for heads of other sizes than up to 128 numbers, or 385 to 512, and for an `out` with gaps.
    """
    dim = q.shape[-1]
    if not (dim <= WIDE.value or 3 * WIDE.value < dim <= 4 * WIDE.value):
        raise ValueError(f"heads of {dim} numbers: up to 128, or 385 to 512, are served")
    q = q.contiguous()
    out = torch.empty_like(q) if out is None else out
    if not out.is_contiguous():
        raise ValueError(f"out has strides {out.stride()}: it must be contiguous")
    way = _way(q, near, far, rope_dim)
    way(q, near, far, sink, out, scale=scale, rope_dim=rope_dim, turn_back=turn_back)
    return out


def _way(q: torch.Tensor, near: Rows, far: Rows | None, rope_dim: int) -> Callable[..., None]:
    arch, tokens = arch_of(q), len(q)
    if tuned("attend_scratch", arch, tokens)["SCRATCH"] and serves(q, near, far, rope_dim):
        return attend_many
    return attend_few if tuned("attend_one_pass", arch, tokens)["ONE_PASS"] else attend_twice


def attend_twice(
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
    """As `attend`."""
    tokens, heads, dim = q.shape
    far = far or Rows(near.view, near.index[:, :0])
    columns = min(WIDE.value, next_power_of_2(dim))
    config = tuned("attend", arch_of(q), tokens)
    block, fill = config["BK"], config["FILL"]
    tiles = cdiv(near.index.shape[1], block) + cdiv(far.index.shape[1], block)
    share = cdiv(tiles, max(1, min(tiles, int(fill * num_processors(q)) // max(tokens, 1))))
    weights = torch.empty(tokens, heads, tiles * block, dtype=q.dtype, device=q.device)
    tops, totals = (torch.empty(tokens, tiles, heads, dtype=torch.float32, device=q.device) for _ in range(2))
    align = min(alignment_of(near.view), alignment_of(far.view))
    lists = (*list_arguments(near, align), *list_arguments(far, align))
    constants = {
        "PACKED": near.view.dtype == torch.uint8, "NOPE": dim - rope_dim, "ROPE": rope_dim, "C": columns,
        "ALIGN": align, "NATIVE": not interpreted(), "BK": block,
    }  # fmt: skip
    blocks = cdiv(heads, config["RATE_BH"])
    launch(
        attend_rate, (tokens, cdiv(tiles, share), blocks),
        q, *lists, weights, tops, totals, heads, tiles, share, scale * LOG2E,
        **constants, CHUNKS=cdiv(dim, columns), BH=config["RATE_BH"], STAGES=config["RATE_STAGES"],
        num_warps=config["RATE_WARPS"],
    )  # fmt: skip
    cos, sin = turn_back or (sink, sink)
    launch(
        attend_mix, (tokens, cdiv(dim, columns), cdiv(heads, config["MIX_BH"])),
        weights, tops, totals, *lists, sink, cos, sin, out, heads, tiles,
        **constants, TURN_BACK=turn_back is not None, BH=config["MIX_BH"], STAGES=config["MIX_STAGES"],
        num_warps=config["MIX_WARPS"],
    )  # fmt: skip
