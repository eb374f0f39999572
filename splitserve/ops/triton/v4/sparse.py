"""Attention of DeepSeek-V4 over lists of rows, near and far, under one softmax with a sink.

    lists    near[t] ++ far[t], cut into tiles of BK rows; a split takes some of the tiles
    split    program (token, split, heads): running maximum, sum and weighted latents of its tiles
    join     program (token, heads): the splits and the sink together, divided

A latent is key and value at once, for all heads: one tile of rows serves both products. Packed rows become bf16 by
bits: an e4m3 code moved to the top of a bf16 is its value times 2 ** -120, and one bf16 product takes that and the
ue8m0 scale together, exactly (scales up to 2 ** 7, latents up to 57,344).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splitserve.ops.kernels.launch import arch_of, interpreted, launch, num_processors
from splitserve.ops.kernels.tuned import tuned
from splitserve.ops.ref.v4.sparse import Rows
from splitserve.ops.triton.codes import E4M3_BIAS, e4m3_bits, power_of_two

LOG2E = 1.4426950408889634
NEVER = tl.constexpr(-1.0e30)  # finite: a split without a visible row gives weight 0, not NaN
GROUP = tl.constexpr(64)  # numbers of a latent that share a scale


@triton.jit
def _codes(rows, here, FIRST: tl.constexpr, C: tl.constexpr, NOPE: tl.constexpr):
    """[BK, C / GROUP, GROUP]: columns FIRST.. of rows as they are stored."""
    group = FIRST // GROUP + tl.arange(0, C // GROUP)[None, :, None]
    col = group * GROUP + tl.arange(0, GROUP)[None, None, :]
    if FIRST + C > NOPE:
        return tl.load(rows[:, None, None] + col, mask=here[:, None, None] & (col < NOPE), other=0)
    else:
        return tl.load(rows[:, None, None] + col, mask=here[:, None, None], other=0)


@triton.jit
def _latents(
    codes,
    scales,
    FIRST: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    PACKED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """[BK, C] numbers; `scales` [BK] int64: eight ue8m0."""
    NUM: tl.constexpr = tl.bfloat16 if NATIVE else tl.float32
    if PACKED:
        group = FIRST // GROUP + tl.arange(0, C // GROUP)
        exponent = ((scales[:, None] >> (8 * group)[None, :]) & 0xFF).to(tl.int32) + E4M3_BIAS
        numbers = e4m3_bits(codes, NATIVE) * power_of_two(exponent, NATIVE)[:, :, None]
    else:
        numbers = codes.to(NUM)
    return tl.reshape(numbers, (BK, C))


@triton.jit(do_not_specialize=["splits"])
def attend_split(
    q,  # [T, heads, NOPE + ROPE]
    near, near_index, num_near, near_per_unit, near_unit, near_row,  # strides in steps of ALIGN elements
    far, far_index, num_far, far_per_unit, far_unit, far_row,
    part,  # [T, splits, heads, NOPE + ROPE] float32
    part_top, part_total,  # [T, splits, heads] float32
    heads, splits,
    scale,  # times log2(e)
    PACKED: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    LONG: tl.constexpr,  # columns are 3 * 128 + 64 + ROPE; else 64 + ROPE
    ALIGN: tl.constexpr,
    NATIVE: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    HOLD: tl.constexpr,  # queries stay in shared memory; else they are read again for each tile
    STAGES: tl.constexpr,
):  # fmt: skip
    # grid: [T, splits, ceil(heads / BH)]
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
        m0, m1, m2 = (
            tl.zeros((BH, 128), tl.float32),
            tl.zeros((BH, 128), tl.float32),
            tl.zeros((BH, 128), tl.float32),
        )
    if HOLD:
        qt = tl.load(queries + TAIL + short, mask=exists, other=0.0).to(NUM)
        qr = tl.load(queries + NOPE + turn, mask=ours, other=0.0).to(NUM)
        if LONG:
            q0 = tl.load(queries + wide, mask=ours, other=0.0).to(NUM)
            q1 = tl.load(queries + 128 + wide, mask=ours, other=0.0).to(NUM)
            q2 = tl.load(queries + 256 + wide, mask=ours, other=0.0).to(NUM)
    near_tiles = tl.cdiv(num_near, BK)
    tiles = near_tiles + tl.cdiv(num_far, BK)
    share = tl.cdiv(tiles, splits)
    for tile in tl.range(split * share, tl.minimum((split + 1) * share, tiles), num_stages=STAGES):
        is_near = tile < near_tiles
        at = (tile - tl.where(is_near, 0, near_tiles)) * BK + tl.arange(0, BK)
        count = tl.where(is_near, num_near, num_far)
        entries = tl.where(is_near, near_index, far_index) + token * count
        index = tl.load(entries + at, mask=at < count, other=-1).to(tl.int32)
        here = index >= 0
        spot = tl.maximum(index, 0)
        per_unit = tl.where(is_near, near_per_unit, far_per_unit)
        start = (spot // per_unit).to(tl.int64) * (
            tl.where(is_near, near_unit, far_unit).to(tl.int64) * ALIGN
        )
        start += (spot % per_unit).to(tl.int64) * (tl.where(is_near, near_row, far_row) * ALIGN)
        rows = tl.multiple_of(tl.where(is_near, near, far) + start, 8)
        # all loads before their first use, so that they are under way together
        if PACKED:
            scales = tl.load((rows + NOPE + 2 * ROPE).to(tl.pointer_type(tl.int64)), mask=here, other=0)
            turned = (rows + NOPE).to(tl.pointer_type(tl.bfloat16))
        else:
            scales = index.to(tl.int64)
            turned = rows + NOPE
        if LONG:
            c0 = _codes(rows, here, 0, 128, NOPE)
            c1 = _codes(rows, here, 128, 128, NOPE)
            c2 = _codes(rows, here, 256, 128, NOPE)
        ct = _codes(rows, here, TAIL, 64, NOPE)
        kr = tl.load(tl.multiple_of(turned, 8)[:, None] + turn, mask=here[:, None], other=0.0).to(NUM)
        if not HOLD:
            qt = tl.load(queries + TAIL + short, mask=exists, other=0.0, volatile=True).to(NUM)
            qr = tl.load(queries + NOPE + turn, mask=ours, other=0.0, volatile=True).to(NUM)
        kt = _latents(ct, scales, TAIL, 64, BK, PACKED, NATIVE)
        logits = tl.dot(qt, tl.trans(kt), tl.dot(qr, tl.trans(kr)))
        if LONG:
            if not HOLD:
                q0 = tl.load(queries + wide, mask=ours, other=0.0, volatile=True).to(NUM)
            k0 = _latents(c0, scales, 0, 128, BK, PACKED, NATIVE)
            logits = tl.dot(q0, tl.trans(k0), logits)
            if not HOLD:
                q1 = tl.load(queries + 128 + wide, mask=ours, other=0.0, volatile=True).to(NUM)
            k1 = _latents(c1, scales, 128, 128, BK, PACKED, NATIVE)
            logits = tl.dot(q1, tl.trans(k1), logits)
            if not HOLD:
                q2 = tl.load(queries + 256 + wide, mask=ours, other=0.0, volatile=True).to(NUM)
            k2 = _latents(c2, scales, 256, 128, BK, PACKED, NATIVE)
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
    out = (token * splits + split) * heads + head
    tl.store(part_top + out, top, mask=head < heads)
    tl.store(part_total + out, total, mask=head < heads)
    into = part + out[:, None] * (NOPE + ROPE)
    tl.store(into + TAIL + short, mt, mask=exists)
    tl.store(into + NOPE + turn, mr, mask=ours)
    if LONG:
        tl.store(into + wide, m0, mask=ours)
        tl.store(into + 128 + wide, m1, mask=ours)
        tl.store(into + 256 + wide, m2, mask=ours)


@triton.jit
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
    SPLITS: tl.constexpr,  # `splits` as a power of two
    TURN_BACK: tl.constexpr,
):  # fmt: skip
    # grid: [T, heads]
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    LOG2E: tl.constexpr = 1.4426950408889634
    split = tl.arange(0, SPLITS)
    there = split < splits
    at = (token * splits + split) * heads + head
    tops = tl.load(part_top + at, mask=there, other=NEVER)
    totals = tl.load(part_total + at, mask=there, other=0.0)
    col, pair = tl.arange(0, D)[None, :], tl.arange(0, ROPE // 2)[None, :]
    places = part + at[:, None] * (NOPE + ROPE)
    size: tl.constexpr = NOPE if TURN_BACK else NOPE + ROPE
    parts = tl.load(places + col, mask=there[:, None] & (col < size), other=0.0)
    share = tl.load(sink + head) * LOG2E
    best = tl.maximum(tl.max(tops, 0), share)
    weight = tl.exp2(tops - best)
    total = tl.sum(totals * weight, 0) + tl.exp2(share - best)
    weight = (weight / total)[:, None]
    into = out + (token * heads + head) * (NOPE + ROPE)
    tl.store(into + tl.arange(0, D), tl.sum(parts * weight, 0), mask=tl.arange(0, D) < size)
    if TURN_BACK:
        even = tl.sum(tl.load(places + NOPE + 2 * pair, mask=there[:, None], other=0.0) * weight, 0)
        odd = tl.sum(tl.load(places + NOPE + 2 * pair + 1, mask=there[:, None], other=0.0) * weight, 0)
        flat = tl.arange(0, ROPE // 2)
        c, s = tl.load(cos + token * (ROPE // 2) + flat), tl.load(sin + token * (ROPE // 2) + flat)
        tl.store(into + NOPE + 2 * flat, even * c + odd * s)
        tl.store(into + NOPE + 2 * flat + 1, odd * c - even * s)


def attend(
    q: torch.Tensor,  # [T, heads, head_dim]
    near: Rows,
    far: Rows | None,
    sink: torch.Tensor,  # [heads] float32: a logit as it enters the softmax, not scaled
    *,
    scale: float,
    rope_dim: int,
    turn_back: tuple[torch.Tensor, torch.Tensor] | None = None,  # cos and sin of rope_table
) -> torch.Tensor:  # [T, heads, head_dim] in q's dtype; sums in float32
    """Twin of ref.v4.attend. With `turn_back` the result is also rotated back, as rotate_tail(inverse=True) does.

    Raises ValueError for heads whose numbers without rotation are neither up to 64 nor 385 to 448.
    """
    tokens, heads, dim = q.shape
    nope = dim - rope_dim
    if not (nope <= 64 or 384 < nope <= 448):
        raise ValueError(
            f"heads of {nope} + {rope_dim} numbers: up to 64, or 385 to 448, may be without rotation"
        )
    far = far or Rows(near.view, near.index[:, :0])
    config = tuned("attend_split", arch_of(q), tokens)
    config["STAGES"] = config.pop("num_stages")
    blocks = tokens * triton.cdiv(heads, config["BH"])
    tiles = triton.cdiv(near.index.shape[1], config["BK"]) + triton.cdiv(far.index.shape[1], config["BK"])
    splits = max(1, min(tiles, int(num_processors(q) * config.pop("FILL")) // max(blocks, 1)))
    splits = triton.cdiv(tiles, triton.cdiv(tiles, splits))  # none without a tile
    part = torch.empty(tokens, splits, heads, dim, dtype=torch.float32, device=q.device)
    top, total = (torch.empty(tokens, splits, heads, dtype=torch.float32, device=q.device) for _ in range(2))
    align = min(_alignment(near.view), _alignment(far.view))
    launch(
        attend_split,
        (tokens, splits, triton.cdiv(heads, config["BH"])),
        q.contiguous(),
        *_where(near, align), *_where(far, align),
        part, top, total, heads, splits, scale * LOG2E,
        PACKED=near.view.dtype == torch.uint8, NOPE=nope, ROPE=rope_dim, LONG=nope > 64, ALIGN=align,
        NATIVE=not interpreted(), **config,
    )  # fmt: skip
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    cos, sin = turn_back or (sink, sink)
    launch(
        attend_join,
        (tokens, heads),
        part, top, total, sink, cos, sin, out, heads, splits,
        NOPE=nope, ROPE=rope_dim, D=triton.next_power_of_2(dim), SPLITS=triton.next_power_of_2(splits),
        TURN_BACK=turn_back is not None, num_warps=4,
    )  # fmt: skip
    return out


def _where(rows: Rows, align: int) -> tuple[torch.Tensor, torch.Tensor, int, int, int, int]:
    view, index = rows.view, rows.index
    return view, index, index.shape[1], view.shape[1], view.stride(0) // align, view.stride(1) // align


def _alignment(view: torch.Tensor) -> int:
    """Elements, 8 or 16, that rows start at multiples of: packed rows of 584 bytes allow loads of 8 bytes."""
    places = view.data_ptr() // view.element_size(), *view.stride()[:2]
    return 16 if all(p % 16 == 0 for p in places) else 8
