"""Sums between the ranks of a group inside a kernel, without a barrier: numbers travel with the turn they belong to.

    rank 0   its part, beside the turn  ──▶  rank 1's mailbox        rank 1 reads its own mailbox again and again
             8 bytes: two bf16 numbers, and the turn                 until each place holds this turn

A write of eight bytes is seen whole or not at all, so what has arrived says of itself that it has: one way through the
link, where a barrier takes two. Mailboxes have two halves, used in turn. Nobody writes over what a peer still reads:
to come to turn n + 2 a rank must have read all of turn n + 1, which its peers sent after they had ended turn n.

Every rank adds in rank order, so that all hold the same bits. A peer that stays away for about a minute is given up:
the sums are then not a number, which an engine reports as such.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

PATIENCE = tl.constexpr(1 << 26)  # looks into the mailbox, each most of a microsecond


class Mailbox(Protocol):
    """Memory of every rank that all of them can write to (dist/peers.py makes it)."""

    rank: int
    size: int
    half: int  # pairs of bf16 numbers in the longest sum
    addresses: torch.Tensor  # [size] int64: of [2, size, half] int64 on each rank
    turns: torch.Tensor  # [programs at most] int32: how often each has used its places


@triton.jit
def add_ranks(
    mine,  # [N] int32: pairs of bf16
    at,  # [N]: which pairs of a half they are
    here,  # [N]: mask
    addresses,
    turn,
    rank,
    half,  # pairs that a rank may send in a turn
    RANKS: tl.constexpr,
):
    """All ranks' parts, added: the even and the odd numbers of the pairs, float32."""
    half = half.to(tl.int64)
    stamped = (turn.to(tl.int64) << 32) | (mine.to(tl.int64) & 0xFFFFFFFF)
    into = ((turn & 1) * RANKS + rank) * half + at
    for r in tl.static_range(RANKS):
        if rank != r:
            box = tl.load(addresses + r).to(tl.pointer_type(tl.int64))
            tl.store(box + into, stamped, mask=here)
    own = tl.load(addresses + rank).to(tl.pointer_type(tl.int64))
    even, odd = tl.zeros(mine.shape, tl.float32), tl.zeros(mine.shape, tl.float32)
    for r in tl.static_range(RANKS):
        got = stamped
        if rank != r:
            place = own + ((turn & 1) * RANKS + r) * half + at
            got = tl.load(place, mask=here, other=0, volatile=True)
            looks = 0
            while (_missing(got, here, turn) > 0) & (looks < PATIENCE):
                got = tl.load(place, mask=here, other=0, volatile=True)
                looks += 1
            if looks >= PATIENCE:
                got = tl.full(mine.shape, -1, tl.int64)  # two bf16 that are not numbers
        pair = got.to(tl.int32)
        even += (pair << 16).to(tl.float32, bitcast=True)
        odd += (pair & -65536).to(tl.float32, bitcast=True)
    return even, odd


@triton.jit
def _missing(got, here, turn):
    """How many places do not hold this turn yet."""
    return tl.sum((here & ((got >> 32).to(tl.int32) != turn)).to(tl.int32), 0)
