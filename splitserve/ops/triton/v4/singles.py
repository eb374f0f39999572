"""A compressor in a step where every sequence has one token: all of ops/ref/v4/singles.py in one kernel.

    program (sequence)   keep the token's row; where it completes a window: pool, norm, rotate, encode, write

A window is completed by one token in `ratio`, so that most programs only copy a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splitserve.ops.kernels.archs import FIRST_FP8
from splitserve.ops.kernels.launch import arch_of, interpreted, launch
from splitserve.ops.ref.v4.dense import Table
from splitserve.ops.ref.v4.singles import Gate, Singles, Store
from splitserve.ops.triton.overlap import follow

from .compress import more
from .rows import store_codes, store_key

BS = 16  # tokens of a window at once


@triton.jit(do_not_specialize=["max_pages"])
def absorb_row(
    rows, rows_stride,  # [B, row] float32, strided
    bias,  # [RATIO, row]
    positions, slots, pages, max_pages, per_page,
    pending, pending_unit, pending_row,  # [slots, RATIO, 2 * W] float32, strided
    carry, carry_unit, carry_row,  # [slots, 2 * RATIO, 2 * W] float32, strided; CARRY only
    norm, cos, sin,  # [W]; [B, ROPE / 2]
    entries, entry_unit, entry_row,  # bytes where PACKED
    eps,
    RATIO: tl.constexpr,
    CARRY: tl.constexpr,
    W: tl.constexpr,
    ROPE: tl.constexpr,
    KEYS: tl.constexpr,
    PACKED: tl.constexpr,
    TAIL: tl.constexpr,  # bytes of a packed latent's scales
    FP8: tl.constexpr,
    BS: tl.constexpr,
):  # fmt: skip
    # grid: [B]
    follow()
    i = tl.program_id(0).to(tl.int64)
    slot_of_place = tl.load(slots + i)
    slot = tl.maximum(slot_of_place, 0)
    position = tl.load(positions + i)
    window, place = position // RATIO, position % RATIO
    col = tl.arange(0, W)
    kept = slot_of_place + col * 0 >= 0
    OWN: tl.constexpr = 2 * W if CARRY else 0  # where the half of the token's own window begins
    ROW: tl.constexpr = OWN + 2 * W
    row = rows + i * rows_stride + col
    by = bias + place * ROW + col
    kv = tl.load(row + OWN)
    score = tl.load(row + OWN + W) + tl.load(by + OWN + W)
    ends = place == RATIO - 1
    if CARRY:  # half A of the tokens of the window before, taken before this token's takes a place there
        best = tl.full((W,), -1.0e30, tl.float32)
        total, mixed = tl.zeros((W,), tl.float32), tl.zeros((W,), tl.float32)
        seen = (position + col * 0 >= RATIO) & (place + col * 0 == RATIO - 1)
        for j in tl.static_range(RATIO):
            at = carry + slot * carry_unit + ((window * RATIO + RATIO + j) % (2 * RATIO)) * carry_row + col
            a = tl.load(at, mask=seen, other=0.0)
            s = tl.load(at + W, mask=seen, other=-1.0e30)
            top = tl.maximum(best, s)
            shrink, weight = tl.exp(best - top), tl.where(s > -1.0e29, tl.exp(s - top), 0.0)
            best, total, mixed = top, total * shrink + weight, mixed * shrink + weight * a
        into = carry + slot * carry_unit + (position % (2 * RATIO)) * carry_row + col
        tl.store(into, tl.load(row), mask=kept)
        tl.store(into + W, tl.load(row + W) + tl.load(by + W), mask=kept)
        top = tl.maximum(best, score)
        shrink, weight = tl.exp(best - top), tl.exp(score - top)
        best, total, mixed = top, total * shrink + weight, mixed * shrink + weight * kv
    else:
        best, total, mixed = score, tl.full((W,), 1.0, tl.float32), kv
    into = pending + slot * pending_unit + place * pending_row + col
    tl.store(into, kv, mask=kept)
    tl.store(into + W, score, mask=kept)
    if (slot_of_place >= 0) & ends:
        for s0 in range(0, RATIO - 1, BS):
            token = s0 + tl.arange(0, BS)
            old = pending + slot * pending_unit + token[:, None] * pending_row + col[None, :]
            there = (token < RATIO - 1)[:, None]
            old_kv, old_score = (
                tl.load(old, mask=there, other=0.0),
                tl.load(old + W, mask=there, other=-1.0e30),
            )
            best, total, mixed = more(best, total, mixed, old_kv, old_score)
        NUM: tl.constexpr = tl.bfloat16
        x = (mixed / total).to(NUM).to(tl.float32)
        x *= 1.0 / tl.sqrt(tl.sum(x * x, 0) / W + eps)
        x = (x * tl.load(norm + col)).to(NUM).to(tl.float32)
        even, odd = tl.split(tl.reshape(x, (W // 2, 2)))
        pair = tl.arange(0, W // 2) - (W - ROPE) // 2
        c = tl.load(cos + i * (ROPE // 2) + pair, mask=pair >= 0, other=1.0)
        s_ = tl.load(sin + i * (ROPE // 2) + pair, mask=pair >= 0, other=0.0)
        x = tl.reshape(tl.join(even * c - odd * s_, even * s_ + odd * c), (W,)).to(NUM).to(tl.float32)
        page = tl.load(pages + i * max_pages + window // per_page)
        out = entries + page * entry_unit + (window % per_page) * entry_row
        _put(out, x, W, ROPE, KEYS, PACKED, TAIL, FP8)


@triton.jit
def _put(
    out, x, W: tl.constexpr, ROPE: tl.constexpr, KEYS: tl.constexpr, PACKED: tl.constexpr, TAIL: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """One entry [W] float32 into its row, as rows.py encodes it."""
    col = tl.arange(0, W)
    if not PACKED:
        tl.store(out + col, x)
    elif KEYS:
        store_key(out, x, 0, W, W, FP8)
    else:
        NOPE: tl.constexpr = W - ROPE
        plain = tl.reshape(tl.where(col < NOPE, x, 0.0), (W // 64, 64))
        store_codes(out, plain, 0, NOPE, ROPE, W // 64, TAIL, FP8)
        turned = (out + NOPE).to(tl.pointer_type(tl.bfloat16)) + (col - NOPE)
        tl.store(turned, x.to(tl.bfloat16), mask=col >= NOPE)


def absorb(
    rows: torch.Tensor,  # [B, row] float32: the compressor's product, without the bias
    gate: Gate,
    store: Store,
    step: Singles,
    *,
    table: Table,
    dtype: torch.dtype,
) -> None:
    """Twin of ref.v4.absorb, for activations in bf16. Raises ValueError for a width that is no power of two."""
    width, ratio = store.pending.shape[-1] // 2, gate.ratio
    if width & (width - 1) or dtype != torch.bfloat16:
        raise ValueError(f"entries of {width} numbers in {dtype}: powers of two in bf16 are served")
    carry = store.pending if store.carry is None else store.carry
    rope, packed = 2 * table[0].shape[-1], store.entries.dtype == torch.uint8
    launch(
        absorb_row, (len(rows),),
        rows, rows.stride(0), gate.bias, step.positions, step.slots, step.pages, step.pages.shape[1],
        step.page_tokens // ratio,
        store.pending, store.pending.stride(0), store.pending.stride(1), carry, carry.stride(0), carry.stride(1),
        gate.norm, table[0], table[1], store.entries, store.entries.stride(0), store.entries.stride(1), gate.eps,
        RATIO=ratio, CARRY=store.carry is not None, W=width, ROPE=rope, KEYS=store.keys, PACKED=packed,
        TAIL=store.entries.shape[-1] - (width - rope) - 2 * rope if packed and not store.keys else 0,
        FP8=arch_of(rows) >= FIRST_FP8 and not interpreted(), BS=BS, num_warps=8,
    )  # fmt: skip
