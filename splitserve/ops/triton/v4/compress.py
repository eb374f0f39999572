"""The compressor's pooling: softmax over the tokens of a window, for each channel by itself. Plans are those of ref."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splitserve.ops.kernels.counts import cdiv
from splitserve.ops.kernels.launch import launch
from splitserve.ops.ref.v4.compress import Saves, Windows, plan_saves, plan_windows
from splitserve.ops.triton.overlap import follow

__all__ = ["Saves", "Windows", "plan_saves", "plan_windows", "pool_windows"]

BS = 16  # tokens at once
BW = 128  # channels of a program


@triton.jit
def more(best, total, mixed, kv, score):
    """A few tokens more in the running softmax over axis 0."""
    top = tl.maximum(best, tl.max(score, 0))
    shrink = tl.exp(best - top)
    weight = tl.exp(score - top[None, :])
    return top, total * shrink + tl.sum(weight, 0), mixed * shrink + tl.sum(weight * kv, 0)


@triton.jit
def pool(
    fresh,  # [T, row] float32: this step's rows; the last 2 * width are the tokens' own, the first what is carried
    pending, pending_unit, pending_row,  # [slots, ratio, 2 * width] float32, strided
    carry, carry_unit, carry_row,  # [slots, 2 * ratio, 2 * width] float32, strided; CARRY only
    slot, own, before, before_row, has_before,  # of Windows
    out,  # [N, width] float32
    fresh_row,
    WIDTH: tl.constexpr,
    RATIO: tl.constexpr,
    CARRY: tl.constexpr,
    BS: tl.constexpr,
    BW: tl.constexpr,
):  # fmt: skip
    # grid: [N, ceil(width / BW)]
    follow()
    window = tl.program_id(0).to(tl.int64)
    unit = tl.load(slot + window)
    col = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = (col < WIDTH)[None, :]
    never: tl.constexpr = -1.0e30
    best = tl.full((BW,), never, tl.float32)
    total, mixed = tl.zeros((BW,), tl.float32), tl.zeros((BW,), tl.float32)
    for s0 in range(0, RATIO, BS):
        s = s0 + tl.arange(0, BS)
        token = tl.load(own + window * RATIO + s, mask=s < RATIO, other=0)
        new = fresh + tl.maximum(token, 0) * fresh_row + (fresh_row - 2 * WIDTH)
        rows = (
            tl.where(token >= 0, new, pending + unit * pending_unit + s * pending_row)[:, None] + col[None, :]
        )
        there = (s < RATIO)[:, None] & inside
        kv = tl.load(rows, mask=there, other=0.0)
        score = tl.load(rows + WIDTH, mask=there, other=never)
        best, total, mixed = more(best, total, mixed, kv, score)
    if CARRY:
        s = tl.arange(0, BS)
        count = tl.load(has_before + window).to(tl.int32) * RATIO
        token = tl.load(before + window * RATIO + s, mask=s < count, other=0)
        row = tl.load(before_row + window * RATIO + s, mask=s < count, other=0)
        new = fresh + tl.maximum(token, 0) * fresh_row
        rows = tl.where(token >= 0, new, carry + unit * carry_unit + row * carry_row)[:, None] + col[None, :]
        there = (s < count)[:, None] & inside
        kv = tl.load(rows, mask=there, other=0.0)
        score = tl.load(rows + WIDTH, mask=there, other=never)
        best, total, mixed = more(best, total, mixed, kv, score)
    tl.store(out + window * WIDTH + col, mixed / total, mask=col < WIDTH)


def pool_windows(
    fresh: torch.Tensor,  # [T, 2 * w] (ratio 128) or [T, 4 * w] (ratio 4) float32: this step's rows
    pending: torch.Tensor,  # [slots, ratio, 2 * w] float32: the request's rows of its open window
    carry: torch.Tensor | None,  # [slots, 2 * ratio, 2 * w] float32: half A of the last tokens; ratio 4 only
    windows: Windows,
) -> torch.Tensor:  # [N, w] float32
    """Twin of ref.v4.pool_windows."""
    width = pending.shape[-1] // 2
    fresh = fresh.contiguous()
    out = torch.empty(len(windows), width, dtype=torch.float32, device=fresh.device)
    old = pending if carry is None else carry
    launch(
        pool, (len(windows), cdiv(width, BW)),
        fresh, pending, pending.stride(0), pending.stride(1), old, old.stride(0), old.stride(1),
        windows.slot, windows.own.contiguous(), windows.before.contiguous(), windows.before_row.contiguous(),
        windows.has_before, out, fresh.stride(0),
        WIDTH=width, RATIO=windows.ratio, CARRY=carry is not None, BS=BS, BW=BW, num_warps=4,
    )  # fmt: skip
    return out
