"""Tokens in groups: which (token, choice) pairs go to which expert, in blocks that share one.

    experts [T, count]  ──▶  rows_of   [blocks * BM]  pairs sorted by expert, each expert's filled up to blocks with -1
                             expert_of [blocks]       whose block it is, -1 for blocks that are not needed

The number of blocks is an upper bound, known without reading the device; places of blocks that are not needed hold
anything. One token's pairs are blocks as they stand. Of a few pairs every program counts all and places some; many are
counted in chunks, and placed by a program for each expert, which looks through all of them for its own. Order inside an
expert is that of the pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from splitserve.ops.kernels.counts import cdiv, next_power_of_2
from splitserve.ops.kernels.launch import launch
from splitserve.ops.triton.overlap import follow

CHUNK = 1024  # pairs that a program counts, where they are many
SPAN = 4096  # and those that an expert's program looks at together
FEW = 1024  # pairs that each program counts by itself
FEW_CHUNK = 16  # of these, those that it places


@dataclass(frozen=True)
class Groups:
    rows_of: torch.Tensor  # [blocks * BM] int32
    expert_of: torch.Tensor  # [blocks] int32
    num_blocks: int
    block: int = 0  # rows of each


@triton.jit
def _local(experts, pair, num_pairs, first, num_local):
    """Number of each pair's expert among those that are here, -1: elsewhere, or no pair."""
    expert = tl.load(experts + pair, mask=pair < num_pairs, other=-1).to(tl.int32) - first
    return tl.where((pair < num_pairs) & (expert >= 0) & (expert < num_local), expert, -1)


@triton.jit(do_not_specialize=["num_pairs", "first", "num_local", "num_blocks"])
def group_few(
    experts,  # [num_pairs] int
    rows_of, expert_of,
    num_pairs, first, num_local, num_blocks,
    EXPERTS: tl.constexpr,  # a power of two
    PAIRS: tl.constexpr,  # num_pairs as a power of two
    BM: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    # grid: [ceil(num_pairs / CHUNK)]
    # every program counts all pairs, then places its own, names its share of the blocks and ends them with -1
    follow()
    number = tl.arange(0, EXPERTS)
    everyone = tl.arange(0, PAIRS)
    owner = _local(experts, everyone, num_pairs, first, num_local)
    counts = tl.histogram(tl.maximum(owner, 0), EXPERTS, mask=owner >= 0)
    stop = tl.cumsum(tl.cdiv(counts, BM), 0)
    base = (stop - tl.cdiv(counts, BM)) * BM
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    mine = _local(experts, pair, num_pairs, first, num_local)
    earlier = (mine[:, None] == owner[None, :]) & (everyone[None, :] < pair[:, None])
    place = tl.sum(tl.where(mine[:, None] == number[None, :], base[None, :], 0), 1)
    tl.store(rows_of + place + tl.sum(earlier.to(tl.int32), 1), pair, mask=mine >= 0)
    span = tl.cdiv(num_blocks, tl.num_programs(0))
    for start in range(tl.program_id(0) * span, (tl.program_id(0) + 1) * span, CHUNK):
        block = start + tl.arange(0, CHUNK)
        name = tl.sum((stop[None, :] <= block[:, None]).to(tl.int32), 1)
        tl.store(expert_of + block, tl.where(name < EXPERTS, name, -1), mask=block < num_blocks)
        end = tl.sum(tl.where(name[:, None] == number[None, :], (base + counts)[None, :], 0), 1)
        at = block[:, None] * BM + tl.arange(0, BM)[None, :]
        empty = (at >= end[:, None]) & (block < num_blocks)[:, None]
        tl.store(rows_of + at, tl.full((CHUNK, BM), -1, tl.int32), mask=empty)


@triton.jit(do_not_specialize=["num_pairs", "first", "num_local"])
def group_count(
    experts,  # [num_pairs] int
    counts,  # [chunks, EXPERTS] int32
    num_pairs, first, num_local,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    # grid: [chunks]
    follow()
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = _local(experts, pair, num_pairs, first, num_local)
    found = tl.histogram(tl.maximum(expert, 0), EXPERTS, mask=expert >= 0)
    tl.store(counts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), found)


@triton.jit(do_not_specialize=["num_pairs", "first", "num_local", "num_chunks", "num_blocks"])
def group_each(
    experts,  # [num_pairs] int
    counts,  # [num_chunks, EXPERTS] int32, of group_count
    rows_of, expert_of,
    num_pairs, first, num_local, num_chunks, num_blocks,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,  # chunks at once
    SPAN: tl.constexpr,
):  # fmt: skip
    # grid: [num_local]
    follow()
    me, number = tl.program_id(0), tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, num_chunks, BC):
        some = start + tl.arange(0, BC)[:, None]
        count = tl.load(counts + some * EXPERTS + number[None, :], mask=some < num_chunks, other=0)
        total += tl.sum(count, 0)
    before = tl.sum(tl.where(number < me, tl.cdiv(total, BM), 0), 0)  # blocks
    mine = tl.sum(tl.where(number == me, total, 0), 0)
    own = tl.cdiv(mine, BM)
    i = tl.arange(0, 128)
    for b in range(0, own, 128):
        tl.store(expert_of + before + b + i, me + i * 0, mask=b + i < own)
    if me == num_local - 1:
        for b in range(before + own, num_blocks, 128):
            tl.store(expert_of + b + i, i * 0 - 1, mask=b + i < num_blocks)
    into = rows_of + before * BM
    tail = mine + tl.arange(0, BM)
    tl.store(into + tail, tail * 0 - 1, mask=tail < own * BM)
    place = mine * 0
    if mine > 0:
        for start in range(0, num_pairs, SPAN):
            pair = start + tl.arange(0, SPAN)
            expert = tl.load(experts + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
            ours = (expert == me + first).to(tl.int32)
            order = tl.cumsum(ours, 0)
            tl.store(into + place + order - 1, pair, mask=ours > 0)
            place += tl.sum(ours, 0)


def group_pairs(
    experts: torch.Tensor,  # [T, count] int, global numbers
    *,
    local: range,  # the experts that this rank holds
    block: int,  # rows of a block
    whole: bool = False,  # all experts are here
) -> Groups:
    """Pairs of experts elsewhere are left out."""
    experts = experts.contiguous()
    if whole and len(experts) == 1 and experts.dtype == torch.int32:
        return Groups(_one_each(experts.numel(), block, experts.device), experts[0], experts.numel(), block)
    pairs, held = experts.numel(), len(local)
    num_blocks = min(pairs, held + pairs // block) if pairs else 0
    size = next_power_of_2(max(held, 16))
    rows_of = torch.empty(num_blocks * block, dtype=torch.int32, device=experts.device)
    expert_of = torch.empty(num_blocks, dtype=torch.int32, device=experts.device)
    if pairs <= FEW:
        launch(
            group_few, (cdiv(pairs, FEW_CHUNK),), experts, rows_of, expert_of, pairs, local.start, held, num_blocks,
            EXPERTS=size, PAIRS=max(16, next_power_of_2(pairs)), BM=block, CHUNK=FEW_CHUNK,
            num_warps=8 if 256 < pairs <= 512 else 4,  # with other numbers one Triton or another spills registers
        )  # fmt: skip
        return Groups(rows_of, expert_of, num_blocks, block)
    chunks = cdiv(pairs, CHUNK)
    counts = torch.empty(chunks, size, dtype=torch.int32, device=experts.device)
    launch(
        group_count,
        (chunks,),
        experts,
        counts,
        pairs,
        local.start,
        held,
        EXPERTS=size,
        CHUNK=CHUNK,
        num_warps=8,
    )
    launch(
        group_each, (held,), experts, counts, rows_of, expert_of, pairs, local.start, held, chunks, num_blocks,
        EXPERTS=size, BM=block, BC=16, SPAN=SPAN, num_warps=4,
    )  # fmt: skip
    return Groups(rows_of, expert_of, num_blocks, block)


@cache
def _one_each(pairs: int, block: int, device: torch.device) -> torch.Tensor:
    """rows_of where each pair has a block of its own."""
    rows_of = torch.full((pairs, block), -1, dtype=torch.int32, device=device)
    rows_of[:, 0] = torch.arange(pairs, dtype=torch.int32, device=device)
    return rows_of.view(-1)
