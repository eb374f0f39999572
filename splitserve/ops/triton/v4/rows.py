"""Rows of the state: latents and index keys, packed and written in one kernel, and rows of bytes moved by index."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splitserve.ops.kernels.archs import FIRST_FP8
from splitserve.ops.kernels.counts import cdiv, next_power_of_2
from splitserve.ops.kernels.launch import arch_of, interpreted, launch
from splitserve.ops.triton.codes import e4m3_scale, to_e4m3
from splitserve.ops.triton.overlap import follow

GROUP = 64


@triton.jit
def store_codes(
    into, wide, at, NOPE: tl.constexpr, ROPE: tl.constexpr, GROUPS: tl.constexpr, TAIL: tl.constexpr, FP8: tl.constexpr
):  # fmt: skip
    """Of a packed latent: codes of `wide` [GROUPS, 64] float32, zero from NOPE on, and scales; nothing where at < 0."""
    group = tl.arange(0, GROUPS)
    col = group[:, None] * 64 + tl.arange(0, 64)[None, :]
    scale = e4m3_scale(tl.max(tl.abs(wide), 1))
    tl.store(into + col, to_e4m3(wide / scale[:, None], FP8), mask=(col < NOPE) & (at + col * 0 >= 0))
    exponent = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
    scales = into + NOPE + 2 * ROPE
    tl.store(scales + group, exponent, mask=(group * 64 < NOPE) & (at + group * 0 >= 0))
    rest = tl.arange(0, 8)
    tl.store(scales + rest, 0, mask=(rest >= (NOPE + 63) // 64) & (rest < TAIL) & (at + rest * 0 >= 0))


@triton.jit
def store_key(into, wide, at, D: tl.constexpr, BD: tl.constexpr, FP8: tl.constexpr):
    """A packed index key: codes of `wide` [BD] float32, zero from D on, and their scale; nothing where at < 0."""
    col = tl.arange(0, BD)
    scale = tl.maximum(tl.max(tl.abs(wide), 0), 1e-4) / 448.0
    tl.store(into + col, to_e4m3(wide / scale, FP8), mask=(col < D) & (at + col * 0 >= 0))
    if at >= 0:
        tl.store((into + D).to(tl.pointer_type(tl.float32)), scale)


@triton.jit
def put_latents(
    x,  # [rows, NOPE + ROPE]
    view,  # bytes where PACKED
    unit, row,  # [rows] int64, unit -1: not kept; not where DENSE
    x_row, unit_stride, row_stride,
    PACKED: tl.constexpr,
    DENSE: tl.constexpr,  # row i goes to row i of one unit
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    GROUPS: tl.constexpr,  # of 64 numbers, as a power of two
    TAIL: tl.constexpr,  # bytes of scales, padded
    FP8: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    # grid: [rows]
    follow()
    i = tl.program_id(0).to(tl.int64)
    at = i * 0  # of nobody's row: -1
    if DENSE:
        into = view + i * row_stride
    else:
        at = tl.load(unit + i)
        into = view + at * unit_stride + tl.load(row + i) * row_stride
    source = x + i * x_row
    if PACKED:
        group = tl.arange(0, GROUPS)
        col = group[:, None] * 64 + tl.arange(0, 64)[None, :]
        wide = tl.load(source + col, mask=col < NOPE, other=0.0).to(tl.float32)
        store_codes(into, wide, at, NOPE, ROPE, GROUPS, TAIL, FP8)
        turn = tl.arange(0, ROPE)
        turned = (into + NOPE).to(tl.pointer_type(tl.bfloat16)) + turn
        tl.store(turned, tl.load(source + NOPE + turn).to(tl.bfloat16), mask=at + turn * 0 >= 0)
    else:
        col = tl.arange(0, D)
        inside = col < NOPE + ROPE
        tl.store(into + col, tl.load(source + col, mask=inside, other=0.0), mask=inside & (at + col * 0 >= 0))


@triton.jit
def put_keys(
    x,  # [rows, D]
    view,  # bytes where PACKED
    unit, row,  # [rows] int64, unit -1: not kept; not where DENSE
    x_row, unit_stride, row_stride,
    PACKED: tl.constexpr,
    DENSE: tl.constexpr,
    FP8: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    # grid: [rows]
    follow()
    i = tl.program_id(0).to(tl.int64)
    at = i * 0  # of nobody's row: -1
    if DENSE:
        into = view + i * row_stride
    else:
        at = tl.load(unit + i)
        into = view + at * unit_stride + tl.load(row + i) * row_stride
    col = tl.arange(0, BD)
    wide = tl.load(x + i * x_row + col, mask=col < D, other=0.0).to(tl.float32)
    if PACKED:
        store_key(into, wide, at, D, BD, FP8)
    else:
        tl.store(into + col, wide, mask=(col < D) & (at + col * 0 >= 0))


@triton.jit
def move_rows(
    view, rows,  # of one type
    unit, row,  # [N] int64; where TAKE, `unit` is a flat position, -1: zeros
    per_unit, unit_stride, row_stride, rows_stride, width,
    TAKE: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    # grid: [N, ceil(width / BD)]
    follow()
    i = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BD + tl.arange(0, BD)
    at = tl.load(unit + i)
    if TAKE:
        spot = tl.maximum(at, 0)
        place = view + (spot // per_unit) * unit_stride + (spot % per_unit) * row_stride + col
        value = tl.load(place, mask=(col < width) & (at + col * 0 >= 0), other=0.0)
        tl.store(rows + i * rows_stride + col, value, mask=col < width)
    else:
        place = view + at * unit_stride + tl.load(row + i) * row_stride + col
        value = tl.load(rows + i * rows_stride + col, mask=col < width, other=0.0)
        tl.store(place, value, mask=(col < width) & (at + col * 0 >= 0))


def write_latents(
    view: torch.Tensor,  # [units, rows_per_unit, width]: bytes where packed
    x: torch.Tensor,  # [N, head_dim]
    unit: torch.Tensor,  # [N] int64; -1: the row is not kept
    row: torch.Tensor,  # [N] int64
    *,
    rope_dim: int,
) -> None:
    """write_rows of encode_latents, in one kernel."""
    _put_latents(view, x, unit, row, rope_dim, dense=False)


def encode_latents(
    x: torch.Tensor,  # [N, head_dim]
    rope_dim: int,
    like: torch.Tensor,  # a view of the state: its dtype says how
) -> torch.Tensor:  # [N, width of a row] in the view's dtype
    """Twin of ref.v4.encode_latents."""
    rows = torch.empty(1, x.shape[0], like.shape[-1], dtype=like.dtype, device=x.device)
    _put_latents(rows, x, x, x, rope_dim, dense=True)
    return rows[0]


def write_keys(
    view: torch.Tensor,  # [units, rows_per_unit, width]
    x: torch.Tensor,  # [N, index_dim]
    unit: torch.Tensor,
    row: torch.Tensor,
) -> None:
    """write_rows of encode_keys, in one kernel."""
    _put_keys(view, x, unit, row, dense=False)


def encode_keys(
    x: torch.Tensor,  # [N, index_dim]
    like: torch.Tensor,
) -> torch.Tensor:  # [N, width of a row] in the view's dtype
    """Twin of ref.v4.encode_keys."""
    rows = torch.empty(1, x.shape[0], like.shape[-1], dtype=like.dtype, device=x.device)
    _put_keys(rows, x, x, x, dense=True)
    return rows[0]


def write_rows(
    view: torch.Tensor,  # [units, rows_per_unit, width], any strides
    rows: torch.Tensor,  # [N, width]
    unit: torch.Tensor,  # [N] int64; -1: the row is not kept
    row: torch.Tensor,  # [N] int64; (unit, row) pairs must differ
) -> None:
    """Twin of ref.v4.write_rows."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    _move(view, rows, unit, row, take=False)


def take_rows(
    view: torch.Tensor,  # [units, rows_per_unit, width], any strides
    index: torch.Tensor,  # [...] int64, flat; -1: none
) -> torch.Tensor:  # [..., width], zeros where index is -1
    """Twin of ref.v4.take_rows."""
    rows = torch.empty(index.numel(), view.shape[-1], dtype=view.dtype, device=view.device)
    _move(view, rows, index.contiguous(), index, take=True)
    return rows.view(*index.shape, -1)


def _put_latents(
    view: torch.Tensor, x: torch.Tensor, unit: torch.Tensor, row: torch.Tensor, rope_dim: int, *, dense: bool
) -> None:
    x = x if x.stride(-1) == 1 else x.contiguous()
    nope = x.shape[1] - rope_dim
    launch(
        put_latents, (x.shape[0],), x, view, unit, row, x.stride(0), view.stride(0), view.stride(1),
        PACKED=view.dtype == torch.uint8, DENSE=dense, NOPE=nope, ROPE=rope_dim,
        GROUPS=next_power_of_2(cdiv(nope, GROUP)), TAIL=view.shape[-1] - nope - 2 * rope_dim,
        FP8=_fp8(x), D=next_power_of_2(x.shape[1]), num_warps=2,
    )  # fmt: skip


def _put_keys(
    view: torch.Tensor, x: torch.Tensor, unit: torch.Tensor, row: torch.Tensor, *, dense: bool
) -> None:
    x = x if x.stride(-1) == 1 else x.contiguous()
    launch(
        put_keys, (x.shape[0],), x, view, unit, row, x.stride(0), view.stride(0), view.stride(1),
        PACKED=view.dtype == torch.uint8, DENSE=dense, FP8=_fp8(x),
        D=x.shape[1], BD=next_power_of_2(x.shape[1]), num_warps=1,
    )  # fmt: skip


def _move(
    view: torch.Tensor, rows: torch.Tensor, unit: torch.Tensor, row: torch.Tensor, *, take: bool
) -> None:
    width = view.shape[-1]
    if not take and rows.dtype != view.dtype:
        rows = rows.to(view.dtype)
    launch(
        move_rows, (unit.numel(), cdiv(width, 1024)), view, rows, unit, row,
        view.shape[1], view.stride(0), view.stride(1), rows.stride(0), width,
        TAKE=take, BD=min(1024, next_power_of_2(width)), num_warps=4,
    )  # fmt: skip


def _fp8(x: torch.Tensor) -> bool:
    return arch_of(x) >= FIRST_FP8 and not interpreted()
