"""Attention of DeepSeek-V4 in one pass: each row is read once for the heads of a program.

    split    program (token, split, heads): running maximum, sum and weighted latents of its tiles; where there is one
             split only, the sink too, and the result
    join     program (token, head): the splits and the sink together, divided

Few tokens are cut into splits, so that all processors have work. Where shared memory has room (KEEP) a program keeps its
queries there; elsewhere it holds few heads and reads them again for each tile: they would not fit beside the sums.
"""

from __future__ import annotations

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
    alignment_of,
    list_arguments,
    numbers_of,
    row_pointers,
    row_scales,
    stored_columns,
)


@triton.jit(
    do_not_specialize=[
        "splits",
        "num_near",
        "num_far",
        "near_per_unit",
        "near_unit",
        "far_per_unit",
        "far_unit",
    ]
)
def attend_split(
    q,  # [T, heads, NOPE + ROPE]
    near, near_index, num_near, near_per_unit, near_unit, near_row,  # strides in steps of ALIGN elements
    far, far_index, num_far, far_per_unit, far_unit, far_row,
    part,  # [T, splits, heads, NOPE + ROPE] float32; the result, in q's type, where WHOLE
    part_top, part_total,  # [T, splits, heads] float32; not where WHOLE
    sink,  # [heads] float32, where WHOLE
    cos, sin,  # [T, ROPE / 2] float32, where WHOLE and TURN_BACK
    heads, splits,
    scale,  # times log2(e)
    PACKED: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    LONG: tl.constexpr,  # columns are 3 * 128 + 64 + ROPE; else 64 + ROPE
    ALIGN: tl.constexpr,
    NATIVE: tl.constexpr,
    WHOLE: tl.constexpr,  # there is one split
    TURN_BACK: tl.constexpr,
    KEEP: tl.constexpr,  # queries are read once
    BH: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # grid: [T, splits, ceil(heads / BH)]
    follow()
    NUM: tl.constexpr = tl.bfloat16 if NATIVE else tl.float32
    TAIL: tl.constexpr = 384 if LONG else 0
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = tl.program_id(2) * BH + tl.arange(0, BH)
    ours = (head < heads)[:, None]
    queries = q + (token * heads + head[:, None]) * (NOPE + ROPE)
    wide, short, turn = tl.arange(0, 128)[None, :], tl.arange(0, 64)[None, :], tl.arange(0, ROPE)[None, :]
    exists = ours & (TAIL + short < NOPE)
    top = tl.full((BH,), NEVER, tl.float32)
    total = tl.zeros((BH,), tl.float32)
    mt, mr = tl.zeros((BH, 64), tl.float32), tl.zeros((BH, ROPE), tl.float32)
    if LONG:
        m0 = tl.zeros((BH, 128), tl.float32)
        m1 = tl.zeros((BH, 128), tl.float32)
        m2 = tl.zeros((BH, 128), tl.float32)
    if KEEP:
        qt = tl.load(queries + TAIL + short, mask=exists, other=0.0).to(NUM)
        qr = tl.load(queries + NOPE + turn, mask=ours, other=0.0).to(NUM)
        if LONG:
            q0 = tl.load(queries + wide, mask=ours, other=0.0).to(NUM)
            q1 = tl.load(queries + 128 + wide, mask=ours, other=0.0).to(NUM)
            q2 = tl.load(queries + 256 + wide, mask=ours, other=0.0).to(NUM)
    near_tiles = tl.cdiv(num_near, BK)
    far_end = num_far
    if WHOLE:  # lists of early tokens end in entries that are not there
        far_end = num_far * 0
        for start in range(0, num_far, 512):
            at = start + tl.arange(0, 512)
            entry = tl.load(far_index + token * num_far + at, mask=at < num_far, other=-1)
            far_end = tl.maximum(far_end, tl.max(tl.where(entry >= 0, at + 1, 0), 0))
    tiles = near_tiles + tl.cdiv(far_end, BK)
    share = tl.cdiv(tiles, splits)
    for tile in tl.range(split * share, tl.minimum((split + 1) * share, tiles), num_stages=STAGES):
        rows, here = row_pointers(
            tile, token,
            near, near_index, num_near, near_per_unit, near_unit, near_row,
            far, far_index, num_far, far_per_unit, far_unit, far_row, near_tiles, ALIGN, BK,
        )  # fmt: skip
        scales = row_scales(rows, here, PACKED, NOPE, ROPE)
        # all loads before their first use, so that they are under way together
        if LONG:
            c0, _ = stored_columns(rows, here, 0, False, 128, PACKED, NOPE, ROPE)
            c1, _ = stored_columns(rows, here, 128, False, 128, PACKED, NOPE, ROPE)
            c2, _ = stored_columns(rows, here, 256, False, 128, PACKED, NOPE, ROPE)
        group = tl.arange(0, 64)[None, None, :]
        ct = tl.load(
            rows[:, None, None] + TAIL + group, mask=here[:, None, None] & (TAIL + group < NOPE), other=0
        )
        turned = (rows + NOPE).to(tl.pointer_type(tl.bfloat16)) if PACKED else rows + NOPE
        kr = tl.load(tl.multiple_of(turned, 8)[:, None] + turn, mask=here[:, None], other=0.0).to(NUM)
        if not KEEP:
            qt = tl.load(queries + TAIL + short, mask=exists, other=0.0, volatile=True).to(NUM)
            qr = tl.load(queries + NOPE + turn, mask=ours, other=0.0, volatile=True).to(NUM)
        kt = numbers_of(ct, ct, scales, TAIL, False, 64, BK, PACKED, NOPE, NATIVE)
        logits = tl.dot(qt, tl.trans(kt), tl.dot(qr, tl.trans(kr)))
        if LONG:
            if not KEEP:
                q0 = tl.load(queries + wide, mask=ours, other=0.0, volatile=True).to(NUM)
            k0 = numbers_of(c0, c0, scales, 0, False, 128, BK, PACKED, NOPE, NATIVE)
            logits = tl.dot(q0, tl.trans(k0), logits)
            if not KEEP:
                q1 = tl.load(queries + 128 + wide, mask=ours, other=0.0, volatile=True).to(NUM)
            k1 = numbers_of(c1, c1, scales, 128, False, 128, BK, PACKED, NOPE, NATIVE)
            logits = tl.dot(q1, tl.trans(k1), logits)
            if not KEEP:
                q2 = tl.load(queries + 256 + wide, mask=ours, other=0.0, volatile=True).to(NUM)
            k2 = numbers_of(c2, c2, scales, 256, False, 128, BK, PACKED, NOPE, NATIVE)
            logits = tl.dot(q2, tl.trans(k2), logits)
        logits = tl.where(here[None, :], logits * scale, NEVER)
        best = tl.maximum(top, tl.max(logits, 1))
        weights = tl.where(here[None, :], tl.exp2(logits - best[:, None]), 0.0)
        shrink = tl.exp2(top - best)
        total = total * shrink + tl.sum(weights, 1)
        shrink, weights, top = shrink[:, None], weights.to(NUM), best
        mt = tl.dot(weights, kt, mt * shrink)
        mr = tl.dot(weights, kr, mr * shrink)
        if LONG:
            m0 = tl.dot(weights, k0, m0 * shrink)
            m1 = tl.dot(weights, k1, m1 * shrink)
            m2 = tl.dot(weights, k2, m2 * shrink)
    if WHOLE:
        share = tl.load(sink + head, mask=head < heads, other=0.0) * 1.4426950408889634
        best = tl.maximum(top, share)
        shrink = tl.exp2(top - best)
        factor = (shrink / (total * shrink + tl.exp2(share - best)))[:, None]
        if TURN_BACK:
            even, odd = tl.split(tl.reshape(mr, (BH, ROPE // 2, 2)))
            pair = token * (ROPE // 2) + tl.arange(0, ROPE // 2)
            c, s = tl.load(cos + pair)[None, :], tl.load(sin + pair)[None, :]
            mr = tl.reshape(tl.join(even * c + odd * s, odd * c - even * s), (BH, ROPE))
        out = token * heads + head
    else:
        out = (token * splits + split) * heads + head
        tl.store(part_top + out, top, mask=head < heads)
        tl.store(part_total + out, total, mask=head < heads)
        factor = tl.full((1, 1), 1.0, tl.float32)
    into = part + out[:, None] * (NOPE + ROPE)
    tl.store(into + TAIL + short, mt * factor, mask=exists)
    tl.store(into + NOPE + turn, mr * factor, mask=ours)
    if LONG:
        tl.store(into + wide, m0 * factor, mask=ours)
        tl.store(into + 128 + wide, m1 * factor, mask=ours)
        tl.store(into + 256 + wide, m2 * factor, mask=ours)


@triton.jit(do_not_specialize=["splits"])
def attend_join(
    part,  # [T, splits, heads, NOPE + ROPE] float32
    part_top, part_total,  # [T, splits, heads] float32
    sink,  # [heads] float32
    cos, sin,  # [T, ROPE / 2] float32, where TURN_BACK
    out,  # [T, heads, NOPE + ROPE]
    heads, splits,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    D: tl.constexpr,
    BS: tl.constexpr,  # splits at once
    TURN_BACK: tl.constexpr,
):  # fmt: skip
    # grid: [T, heads]
    follow()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.load(sink + head) * 1.4426950408889634
    total = tl.full((), 1.0, tl.float32)  # the sink, relative to itself
    col, pair = tl.arange(0, D), tl.arange(0, ROPE // 2)
    size: tl.constexpr = NOPE if TURN_BACK else NOPE + ROPE
    mixed = tl.zeros((D,), tl.float32)
    even, odd = tl.zeros((ROPE // 2,), tl.float32), tl.zeros((ROPE // 2,), tl.float32)
    for start in range(0, splits, BS):
        split = start + tl.arange(0, BS)
        there = split < splits
        at = (token * splits + split) * heads + head
        tops = tl.load(part_top + at, mask=there, other=NEVER)
        totals = tl.load(part_total + at, mask=there, other=0.0)
        places = part + at[:, None] * (NOPE + ROPE)
        parts = tl.load(places + col[None, :], mask=there[:, None] & (col < size)[None, :], other=0.0)
        if TURN_BACK:
            evens = tl.load(places + NOPE + 2 * pair[None, :], mask=there[:, None], other=0.0)
            odds = tl.load(places + NOPE + 2 * pair[None, :] + 1, mask=there[:, None], other=0.0)
        top = tl.maximum(best, tl.max(tops, 0))
        shrink, weight = tl.exp2(best - top), tl.exp2(tops - top)
        total = total * shrink + tl.sum(totals * weight, 0)
        mixed = mixed * shrink + tl.sum(parts * weight[:, None], 0)
        if TURN_BACK:
            even = even * shrink + tl.sum(evens * weight[:, None], 0)
            odd = odd * shrink + tl.sum(odds * weight[:, None], 0)
        best = top
    into = out + (token * heads + head) * (NOPE + ROPE)
    tl.store(into + col, mixed / total, mask=col < size)
    if TURN_BACK:
        c, s = tl.load(cos + token * (ROPE // 2) + pair), tl.load(sin + token * (ROPE // 2) + pair)
        tl.store(into + NOPE + 2 * pair, (even * c + odd * s) / total)
        tl.store(into + NOPE + 2 * pair + 1, (odd * c - even * s) / total)


def attend_few(
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
    """As sparse.attend. Raises ValueError for heads whose numbers without rotation are neither up to 64 nor 385 to 448."""
    tokens, heads, dim = q.shape
    nope = dim - rope_dim
    if not (nope <= 64 or 384 < nope <= 448):
        raise ValueError(
            f"heads of {nope} + {rope_dim} numbers: up to 64, or 385 to 448, may be without rotation"
        )
    far = far or Rows(near.view, near.index[:, :0])
    config = tuned("attend_split", arch_of(q), tokens)
    config["STAGES"] = config.pop("num_stages")
    programs = tokens * cdiv(heads, config["BH"])
    tiles = cdiv(near.index.shape[1], config["BK"]) + cdiv(far.index.shape[1], config["BK"])
    splits = max(1, min(tiles, int(num_processors(q) * config.pop("FILL")) // max(programs, 1)))
    splits = cdiv(tiles, cdiv(tiles, splits))  # none without a tile
    cos, sin = turn_back or (sink, sink)
    whole = splits == 1
    part, top, total = out, sink, sink
    if not whole:
        part = torch.empty(tokens, splits, heads, dim, dtype=torch.float32, device=q.device)
        top, total = (
            torch.empty(tokens, splits, heads, dtype=torch.float32, device=q.device) for _ in range(2)
        )
    align = min(alignment_of(near.view), alignment_of(far.view))
    launch(
        attend_split, (tokens, splits, cdiv(heads, config["BH"])),
        q, *list_arguments(near, align), *list_arguments(far, align),
        part, top, total, sink, cos, sin, heads, splits, scale * LOG2E,
        PACKED=near.view.dtype == torch.uint8, NOPE=nope, ROPE=rope_dim, LONG=nope > 64, ALIGN=align,
        NATIVE=not interpreted(), WHOLE=whole, TURN_BACK=whole and turn_back is not None, **config,
    )  # fmt: skip
    if whole:
        return
    launch(
        attend_join, (tokens, heads),
        part, top, total, sink, cos, sin, out, heads, splits,
        NOPE=nope, ROPE=rope_dim, D=next_power_of_2(dim), BS=16,
        TURN_BACK=turn_back is not None, num_warps=4,
    )  # fmt: skip
