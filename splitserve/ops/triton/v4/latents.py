"""Rows of latents as attention kernels read them: where they lie, and their numbers in bf16.

Packed rows become bf16 by bits: an e4m3 code moved to the top of a bf16 is its value times 2 ** -120, and one bf16
product takes that and the ue8m0 scale together, exactly (scales up to 2 ** 7, latents up to 57,344).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splitserve.ops.ref.v4.sparse import Rows
from splitserve.ops.triton.codes import E4M3_BIAS, e4m3_bits, power_of_two

LOG2E = 1.4426950408889634
NEVER = tl.constexpr(-1.0e30)  # finite: a tile without a visible row gives weight 0, not NaN
GROUP = tl.constexpr(64)  # numbers of a latent that share a scale
WIDE = tl.constexpr(128)  # columns at once


@triton.jit
def row_pointers(
    tile, token,
    near, near_index, num_near, near_per_unit, near_unit, near_row,
    far, far_index, num_far, far_per_unit, far_unit, far_row,
    near_tiles, ALIGN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """[BK] pointers to the rows of a tile of the two lists, and which exist."""
    is_near = tile < near_tiles
    at = (tile - tl.where(is_near, 0, near_tiles)) * BK + tl.arange(0, BK)
    count = tl.where(is_near, num_near, num_far)
    entries = tl.where(is_near, near_index, far_index) + token * count
    index = tl.load(entries + at, mask=at < count, other=-1).to(tl.int32)
    spot = tl.maximum(index, 0)
    per_unit = tl.where(is_near, near_per_unit, far_per_unit)
    start = (spot // per_unit).to(tl.int64) * (tl.where(is_near, near_unit, far_unit).to(tl.int64) * ALIGN)
    start += (spot % per_unit).to(tl.int64) * (tl.where(is_near, near_row, far_row) * ALIGN)
    return tl.multiple_of(tl.where(is_near, near, far) + start, 8), index >= 0


@triton.jit
def stored_columns(
    rows, here, first, TURNS: tl.constexpr,
    C: tl.constexpr, PACKED: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Columns [first, first + C) as they are stored: codes [BK, C / 64, 64], and rotary numbers where some may turn."""
    group = first // GROUP + tl.arange(0, C // GROUP)[None, :, None]
    col = group * GROUP + tl.arange(0, GROUP)[None, None, :]
    here = here[:, None, None]
    if PACKED:
        if TURNS:
            codes = tl.load(rows[:, None, None] + col, mask=here & (col < NOPE), other=0)
            turned = tl.multiple_of((rows + NOPE).to(tl.pointer_type(tl.bfloat16)), 8)[:, None, None]
            rope = tl.load(turned + (col - NOPE), mask=here & (col >= NOPE) & (col < NOPE + ROPE), other=0.0)
        else:
            codes = tl.load(rows[:, None, None] + col, mask=here, other=0)
            rope = codes
    else:
        codes = tl.load(rows[:, None, None] + col, mask=here & (col < NOPE + ROPE), other=0.0)
        rope = codes
    return codes, rope


@triton.jit
def numbers_of(
    codes, rope, scales, first, TURNS: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr, NOPE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """[BK, C] numbers of what `stored_columns` gave; `scales` [BK] int64 are eight ue8m0 each."""
    NUM: tl.constexpr = tl.bfloat16 if NATIVE else tl.float32
    if PACKED:
        group = first // GROUP + tl.arange(0, C // GROUP)
        exponent = ((scales[:, None] >> (8 * group)[None, :]) & 0xFF).to(tl.int32) + E4M3_BIAS
        numbers = e4m3_bits(codes, NATIVE) * power_of_two(exponent, NATIVE)[:, :, None]
        if TURNS:
            col = (group * GROUP)[None, :, None] + tl.arange(0, GROUP)[None, None, :]
            numbers = tl.where(col < NOPE, numbers, rope.to(NUM))
    else:
        numbers = codes.to(NUM)
    return tl.reshape(numbers, (BK, C))


@triton.jit
def row_scales(rows, here, PACKED: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr):
    if PACKED:
        return tl.load((rows + NOPE + 2 * ROPE).to(tl.pointer_type(tl.int64)), mask=here, other=0)
    else:
        return here.to(tl.int64)


def list_arguments(rows: Rows, align: int) -> tuple[torch.Tensor, torch.Tensor, int, int, int, int]:
    view, index = rows.view, rows.index.contiguous()
    return view, index, index.shape[1], view.shape[1], view.stride(0) // align, view.stride(1) // align


def alignment_of(view: torch.Tensor) -> int:
    """Elements, 8 or 16, that rows start at multiples of: packed rows of 584 bytes allow loads of 8 bytes."""
    start = 0 if view.is_meta else view.data_ptr() // view.element_size()
    places = start, *view.stride()[:2]
    return 16 if all(p % 16 == 0 for p in places) else 8
