"""What attention of many tokens reads: rows as numbers, and lists of them, made anew for every layer and gone after it.

    numbers  [1 + near rows + far rows, D]: row 0 is zeros; then the near view's rows, then those of the far view's units
             that lists may point into, in the order of `Reach`
    lists    [T, width], near[t] ++ far[t] as positions in `numbers`, 0 for none; behind them a tile that nobody uses, and
             of each list where its last row ends

A row is read by hundreds of tokens. Decoding it once costs little, and numbers as they are go straight from memory to
shared memory, past the registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from splitserve.ops.kernels.counts import cdiv, next_power_of_2
from splitserve.ops.kernels.launch import interpreted, launch
from splitserve.ops.ref.v4.sparse import Rows
from splitserve.ops.triton.overlap import follow

from .latents import WIDE, alignment_of, numbers_of, row_scales, stored_columns

TILE = tl.constexpr(64)  # lists have room for a multiple
MOST_BYTES = 256 << 20
ROWS_A_TOKEN = 256  # on an H200 a decoded row takes 0.4 ns, and a token saves 50 to 250

_BLOCK, _STRETCH = 16, 256  # rows, and entries of a list, that a program takes at once


@triton.jit
def _list_rows(
    token, tokens, near_index, num_near, far_index, num_far, per_unit, places, near_rows, lists, width,
    B: tl.constexpr,
):  # fmt: skip
    """A token's lists, as positions among the numbers."""
    end = 0
    for start in range(0, width, B):
        at = start + tl.arange(0, B)
        near = tl.load(near_index + token * num_near + at, mask=at < num_near, other=-1).to(tl.int32)
        beyond = at - num_near
        is_far = (beyond >= 0) & (beyond < num_far)
        far = tl.load(far_index + token * num_far + beyond, mask=is_far, other=-1).to(tl.int32)
        place = tl.load(places + tl.maximum(far, 0) // per_unit, mask=far >= 0, other=0)
        far = tl.where(far >= 0, 1 + near_rows + place * per_unit + far % per_unit, 0)
        row = tl.where(near >= 0, 1 + near, far)
        tl.store(lists + token * width + at, row, mask=at < width)
        end = tl.maximum(end, tl.max(tl.where(row > 0, at + 1, 0), 0))
    tl.store(lists + tokens.to(tl.int64) * width + TILE + token, end)


@triton.jit
def _decode_rows(
    block, near, near_rows, near_row, far, units, far_rows, per_unit, far_unit, far_row, numbers,
    PACKED: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    ALIGN: tl.constexpr, NATIVE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """The numbers of BR rows of one view."""
    blocks = tl.cdiv(near_rows, BR)
    if block == 0:
        col = tl.arange(0, D)
        tl.store(numbers + col, tl.zeros((D,), numbers.dtype.element_ty))
    is_near = block < blocks
    at = (block - tl.where(is_near, 0, blocks)) * BR + tl.arange(0, BR)
    here = at < tl.where(is_near, near_rows, far_rows)
    unit = tl.load(units + at // per_unit, mask=here & (not is_near), other=0).to(tl.int64)
    far_start = unit * (far_unit.to(tl.int64) * ALIGN) + (at % per_unit).to(tl.int64) * (far_row * ALIGN)
    start = tl.where(is_near, at.to(tl.int64) * (near_row * ALIGN), far_start)
    rows = tl.multiple_of(tl.where(is_near, near, far) + start, 8)
    into = numbers + (1 + at + tl.where(is_near, 0, near_rows)).to(tl.int64)[:, None] * D
    scales = row_scales(rows, here, PACKED, NOPE, ROPE)
    for c in tl.static_range(D // C):
        codes, rope = stored_columns(rows, here, c * C, c == D // C - 1, C, PACKED, NOPE, ROPE)
        x = numbers_of(codes, rope, scales, c * C, c == D // C - 1, C, BR, PACKED, NOPE, NATIVE)
        tl.store(into + c * C + tl.arange(0, C)[None, :], x, mask=here[:, None])


@triton.jit(
    do_not_specialize=[
        "num_near", "near_rows", "near_row", "num_far", "far_rows", "per_unit", "far_unit", "far_row", "tokens", "width",
    ]
)  # fmt: skip
def attend_prepare(
    near, near_index, num_near, near_rows, near_row,  # strides in steps of ALIGN elements
    far, far_index, num_far, far_rows, per_unit, far_unit, far_row,
    units,  # [far_rows / per_unit] int64
    places,  # int32: of each unit of the far view, as far as lists point into it, the place among `units`
    numbers,  # [1 + near_rows + far_rows, D]
    lists,  # [T * width + TILE + T] int32
    tokens, width,
    PACKED: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    ALIGN: tl.constexpr,
    NATIVE: tl.constexpr,
    BR: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    # grid: [ceil(near_rows / BR) + ceil(far_rows / BR) + T]
    follow()
    blocks = tl.cdiv(near_rows, BR) + tl.cdiv(far_rows, BR)
    if tl.program_id(0) < blocks:
        _decode_rows(
            tl.program_id(0), near, near_rows, near_row, far, units, far_rows, per_unit, far_unit, far_row, numbers,
            PACKED, NOPE, ROPE, D, C, ALIGN, NATIVE, BR,
        )  # fmt: skip
    else:
        _list_rows(
            (tl.program_id(0) - blocks).to(tl.int64), tokens,
            near_index, num_near, far_index, num_far, per_unit, places, near_rows, lists, width, B,
        )  # fmt: skip


@dataclass(frozen=True)
class Scratch:
    numbers: torch.Tensor  # bf16, float32 where kernels are interpreted
    lists: torch.Tensor  # int32
    width: int


def serves(q: torch.Tensor, near: Rows, far: Rows | None, rope_dim: int) -> bool:
    """Whether it is known which rows may be read, and they are few enough for scratch, and for the tokens."""
    if near.view.shape[0] != 1 or (far is not None and far.reach is None):
        return False
    padded = _padded(q.shape[-1])
    if q.shape[-1] - rope_dim < padded - WIDE.value:  # only the last columns may turn
        return False
    rows = 1 + near.view.shape[1] + _far_rows(far)
    return rows <= min(ROWS_A_TOKEN * len(q), MOST_BYTES // (2 * padded))


def prepare(near: Rows, far: Rows | None, *, dim: int, rope_dim: int) -> Scratch:
    """For lists that `serves` says yes to; `near` has one unit."""
    tokens, near_rows, far_rows, padded = len(near.index), near.view.shape[1], _far_rows(far), _padded(dim)
    near_index = near.index.contiguous()
    num_near, num_far = near_index.shape[1], 0 if far is None else far.index.shape[1]
    width = cdiv(num_near + num_far, TILE.value) * TILE.value
    numbers = torch.empty(
        1 + near_rows + far_rows, padded,
        dtype=torch.float32 if interpreted() else torch.bfloat16, device=near.view.device,
    )  # fmt: skip
    lists = torch.empty(tokens * (width + 1) + TILE.value, dtype=torch.int32, device=near.view.device)
    align = min(alignment_of(near.view), alignment_of(near.view if far is None else far.view))
    launch(
        attend_prepare, (cdiv(near_rows, _BLOCK) + cdiv(far_rows, _BLOCK) + tokens,),
        near.view, near_index, num_near, near_rows, near.view.stride(1) // align,
        *_far_arguments(near if far is None else far, num_far, far_rows, align, lists),
        numbers, lists, tokens, width,
        PACKED=near.view.dtype == torch.uint8, NOPE=dim - rope_dim, ROPE=rope_dim, D=padded, C=min(padded, WIDE.value),
        ALIGN=align, NATIVE=not interpreted(), BR=_BLOCK, B=_STRETCH, num_warps=4,
    )  # fmt: skip
    return Scratch(numbers, lists, width)


def _far_arguments(
    far: Rows, count: int, rows: int, align: int, unread: torch.Tensor
) -> tuple[torch.Tensor | int, ...]:
    """Of `count` 0: anything of the right types."""
    view, index = far.view, far.index.contiguous()
    units, places = index, unread
    if far.reach is not None:
        units, places = far.reach.ids, far.reach.places(len(view))
    unit_step, row_step, _ = view.stride()
    return view, index, count, rows, view.shape[1], unit_step // align, row_step // align, units, places


def _padded(dim: int) -> int:
    return max(64, next_power_of_2(dim))


def _far_rows(far: Rows | None) -> int:
    return 0 if far is None or far.reach is None else len(far.reach.ids) * far.view.shape[1]
