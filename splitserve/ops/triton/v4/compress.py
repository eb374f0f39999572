"""The compressor's pooling: softmax over the tokens of a window, for each channel by itself. Plans are those of ref.

Of windows of four tokens, and the four before them, a thread holds its channels of all eight at once; a window of 128 is
gone through in steps.
"""

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
FOUR = 256  # channels of a program that pools four tokens and the four before them
NEVER = tl.constexpr(-1.0e30)  # the score of a token that is not there


@triton.jit
def more(best, total, mixed, kv, score):
    """A few tokens more in the running softmax over axis 0."""
    top = tl.maximum(best, tl.max(score, 0))
    shrink = tl.exp(best - top)
    weight = tl.exp(score - top[None, :])
    return top, total * shrink + tl.sum(weight, 0), mixed * shrink + tl.sum(weight * kv, 0)


@triton.jit
def pool(
    fresh,  # [T, 2 * width] float32: this step's rows
    pending, pending_unit, pending_row,  # [slots, ratio, 2 * width] float32, strided
    slot, own,  # of Windows
    out,  # [N, width] float32
    WIDTH: tl.constexpr,
    RATIO: tl.constexpr,
    BS: tl.constexpr,
    BW: tl.constexpr,
):  # fmt: skip
    # grid: [N, ceil(width / BW)]
    follow()
    window = tl.program_id(0).to(tl.int64)
    unit = tl.load(slot + window)
    col = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = (col < WIDTH)[None, :]
    best = tl.full((BW,), NEVER, tl.float32)
    total, mixed = tl.zeros((BW,), tl.float32), tl.zeros((BW,), tl.float32)
    for s0 in range(0, RATIO, BS):
        s = s0 + tl.arange(0, BS)
        token = tl.load(own + window * RATIO + s, mask=s < RATIO, other=0)
        new = fresh + tl.maximum(token, 0) * (2 * WIDTH)
        rows = (
            tl.where(token >= 0, new, pending + unit * pending_unit + s * pending_row)[:, None] + col[None, :]
        )
        there = (s < RATIO)[:, None] & inside
        kv = tl.load(rows, mask=there, other=0.0)
        score = tl.load(rows + WIDTH, mask=there, other=NEVER)
        best, total, mixed = more(best, total, mixed, kv, score)
    tl.store(out + window * WIDTH + col, mixed / total, mask=col < WIDTH)


@triton.jit
def _row(token, new, old, col, there, WIDTH: tl.constexpr):
    """Numbers and scores of one token of a window: of this step's rows at `new`, or one of the slot's."""
    rows = tl.where(token >= 0, new + tl.maximum(token, 0) * (4 * WIDTH), old) + col
    kv = tl.load(rows, mask=there, other=0.0)
    score = tl.load(rows + WIDTH, mask=there, other=NEVER)
    return kv, score


@triton.jit
def pool_four(
    fresh,  # [T, 4 * width] float32: this step's rows; the last half is the tokens' own, the first is carried
    pending, pending_unit, pending_row,  # [slots, 4, 2 * width] float32, strided
    carry, carry_unit, carry_row,  # [slots, 8, 2 * width] float32, strided
    slot, own, before, before_row, has_before,  # of Windows
    out,  # [N, width] float32
    WIDTH: tl.constexpr,
    BW: tl.constexpr,
):  # fmt: skip
    # grid: [N, ceil(width / BW)]
    follow()
    window = tl.program_id(0).to(tl.int64)
    unit = tl.load(slot + window)
    col = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = col < WIDTH
    earlier = col < WIDTH * tl.load(has_before + window).to(tl.int32)
    t, o, b = own + window * 4, before + window * 4, before_row + window * 4
    half, pend, kept = fresh + 2 * WIDTH, pending + unit * pending_unit, carry + unit * carry_unit
    k0, s0 = _row(tl.load(t), half, pend, col, inside, WIDTH)
    k1, s1 = _row(tl.load(t + 1), half, pend + pending_row, col, inside, WIDTH)
    k2, s2 = _row(tl.load(t + 2), half, pend + 2 * pending_row, col, inside, WIDTH)
    k3, s3 = _row(tl.load(t + 3), half, pend + 3 * pending_row, col, inside, WIDTH)
    k4, s4 = _row(tl.load(o), fresh, kept + tl.load(b) * carry_row, col, earlier, WIDTH)
    k5, s5 = _row(tl.load(o + 1), fresh, kept + tl.load(b + 1) * carry_row, col, earlier, WIDTH)
    k6, s6 = _row(tl.load(o + 2), fresh, kept + tl.load(b + 2) * carry_row, col, earlier, WIDTH)
    k7, s7 = _row(tl.load(o + 3), fresh, kept + tl.load(b + 3) * carry_row, col, earlier, WIDTH)
    top_own = tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3))
    top = tl.maximum(top_own, tl.maximum(tl.maximum(s4, s5), tl.maximum(s6, s7)))
    w0, w1, w2, w3 = tl.exp(s0 - top), tl.exp(s1 - top), tl.exp(s2 - top), tl.exp(s3 - top)
    w4, w5, w6, w7 = tl.exp(s4 - top), tl.exp(s5 - top), tl.exp(s6 - top), tl.exp(s7 - top)
    total = ((w0 + w1) + (w2 + w3)) + ((w4 + w5) + (w6 + w7))
    mixed = ((w0 * k0 + w1 * k1) + (w2 * k2 + w3 * k3)) + ((w4 * k4 + w5 * k5) + (w6 * k6 + w7 * k7))
    tl.store(out + window * WIDTH + col, mixed / total, mask=inside)


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
    mine = windows.slot, windows.own.contiguous()
    held = pending, pending.stride(0), pending.stride(1)
    if carry is None:
        launch(
            pool, (len(windows), cdiv(width, BW)), fresh, *held, *mine, out,
            WIDTH=width, RATIO=windows.ratio, BS=BS, BW=BW, num_warps=4,
        )  # fmt: skip
        return out
    launch(
        pool_four, (len(windows), cdiv(width, FOUR)),
        fresh, *held, carry, carry.stride(0), carry.stride(1), *mine, windows.before.contiguous(),
        windows.before_row.contiguous(), windows.has_before, out, WIDTH=width, BW=FOUR, num_warps=2,
    )  # fmt: skip
    return out
