"""Weights in any format times rows of bf16: one kernel for dense and grouped products, small and large batches.

    y[row, n] = sum over k of weight[n, k] * x[row, k]

    tile of weights [BN, BK], codes   ── by bits ──▶  bf16, scaled, in registers   ─┐
    tile of rows    [BM, BK], bf16    ── as it is ──▶  shared memory                ─┴▶  sums [BN, BM] float32

Weights are the left operand: that is the one tensor cores take from registers, so that codes are read once, become
numbers on the way, and are never written back. Where several experts have their own weights (GROUPED), rows come in
blocks of BM that share an expert. With GLU a tile holds BN / 2 rows of `gate` and the BN / 2 rows of `up` beside them,
and what is stored is silu(gate) * up, clamped, times the row's weight.

    format   codes                          scales
    bf16     [.., N, K] bf16                none
    e4m3     [.., N, K] bytes               [.., N / TR, K / TC] float32; powers of two multiply weights, others sums
    e2m1     [.., N, K / 4] int16, tiled    [.., K / 128, N] four ue8m0 in an int32; see v4/quant.py
"""

from __future__ import annotations

import triton
import triton.language as tl

from splitserve.ops.triton.codes import E2M1_BIAS, E4M3_BIAS, e2m1_bits, e4m3_bits, power_of_two
from splitserve.ops.triton.overlap import follow


@triton.jit
def silu_times(gate, up, limit):
    gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def tile_rows(rows_of, expert_of, num_rows, GROUPED: tl.constexpr, EXPERTS: tl.constexpr, BM: tl.constexpr):
    """Of block program_id(1): its expert, the rows of the result at its places (-1: none), whether there are any."""
    block = tl.program_id(1)
    place = tl.arange(0, BM)
    if GROUPED == "lists":
        owner = tl.load(expert_of + block)
        expert = tl.maximum(owner, 0).to(tl.int64)
        row = tl.load(rows_of + block * BM + place)
        used = owner >= 0
    elif GROUPED == "strided":  # row r belongs to expert r % EXPERTS
        expert = (block % EXPERTS).to(tl.int64)
        row = ((block // EXPERTS) * BM + place) * EXPERTS + block % EXPERTS
        row = tl.where(row < num_rows, row, -1)
        used = block >= 0
    else:
        expert = (block * 0).to(tl.int64)
        row = block * BM + place
        row = tl.where(row < num_rows, row, -1)
        used = block >= 0
    return expert, row, used


@triton.jit
def tile_columns(N, GLU: tl.constexpr, BN: tl.constexpr):
    """Rows of weights of tile program_id(0), and which exist: BN neighbours, or BN / 2 of each half where GLU."""
    r = tl.arange(0, BN)
    if GLU:
        half: tl.constexpr = BN // 2
        n = tl.program_id(0) * half + r % half
        inside = n < N // 2
        n += tl.where(r < half, 0, N // 2)
    else:
        n = tl.program_id(0) * BN + r
        inside = n < N
    return n, inside


@triton.jit
def put(
    sums, row, n, inside, out, factors, num_rows, N, limit,
    GLU: tl.constexpr, WEIGHTED: tl.constexpr, SPLITS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Store sums [BN, BM]: as they are where another kernel adds splits up, finished otherwise."""
    here = row >= 0
    to = tl.maximum(row, 0).to(tl.int64)
    if SPLITS > 1:
        into = out + (tl.program_id(2).to(tl.int64) * num_rows + to)[None, :] * N
        tl.store(into + n[:, None], sums, mask=inside[:, None] & here[None, :])
    else:
        into = out + to[None, :] * (N // 2 if GLU else N)
        if GLU:
            gate, up = tl.split(tl.permute(tl.reshape(sums, (2, BN // 2, BM)), (1, 2, 0)))
            sums = silu_times(gate, up, limit)
            n = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
            inside = n < N // 2
        if WEIGHTED:
            sums *= tl.load(factors + tl.maximum(row, 0), mask=here, other=0.0)[None, :]
        tl.store(into + n[:, None], sums, mask=inside[:, None] & here[None, :])


@triton.jit(do_not_specialize=["num_rows", "share"])
def weigh(
    x,  # [rows / share, K]
    codes, scales,
    out,  # [rows, N], or [rows, N / 2] where GLU; [SPLITS, rows, N] float32 where SPLITS > 1
    rows_of,  # [blocks * BM] int32: row of each place, -1: none; lists only
    expert_of,  # [blocks] int32: of each block, -1: unused; lists only
    factors,  # [rows] float32; WEIGHTED only
    num_rows, N, K, share, limit,
    FORMAT: tl.constexpr,
    POWERS: tl.constexpr,  # scales are powers of two
    TR: tl.constexpr,
    TC: tl.constexpr,
    GROUPED: tl.constexpr,
    EXPERTS: tl.constexpr,
    GLU: tl.constexpr,
    WEIGHTED: tl.constexpr,
    EVEN: tl.constexpr,  # N and K are multiples of their tiles
    NATIVE: tl.constexpr,
    SPLITS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # grid: [ceil(N / BN), blocks, SPLITS]
    NUM: tl.constexpr = tl.bfloat16 if NATIVE else tl.float32
    follow()
    expert, row, used = tile_rows(rows_of, expert_of, num_rows, GROUPED, EXPERTS, BM)
    if not used:
        return
    here = (row >= 0)[None, :]
    n, inside = tile_columns(N, GLU, BN)
    rows = x + (tl.maximum(row, 0) // share).to(tl.int64)[None, :] * K
    sums = tl.zeros((BN, BM), tl.float32)
    part = tl.cdiv(tl.cdiv(K, BK), SPLITS) * BK
    first = tl.program_id(2) * part
    last = tl.minimum(first + part, K)
    if FORMAT == "e2m1":
        j = tl.arange(0, 32)
        lies = (n // TR) * ((K // 128) * TR) + n % TR  # TR rows lie side by side in each block of 128
        weights = codes + expert * N * (K // 4) + lies[:, None] * 32 + j[None, :]
        words = scales + expert * (K // 128) * N + n
        for b in tl.range(first // 128, last // 128, num_stages=STAGES):
            if EVEN:
                packed = tl.load(weights + b * (TR * 32))
                word = tl.load(words + b * N)
            else:
                packed = tl.load(weights + b * (TR * 32), mask=inside[:, None], other=0)
                word = tl.load(words + b * N, mask=inside, other=0)
            at = rows + b * 128 + j[:, None]
            x0 = tl.load(at, mask=here, other=0.0).to(NUM)
            x1 = tl.load(at + 32, mask=here, other=0.0).to(NUM)
            x2 = tl.load(at + 64, mask=here, other=0.0).to(NUM)
            x3 = tl.load(at + 96, mask=here, other=0.0).to(NUM)
            w0, w1, w2, w3 = e2m1_bits(packed, NATIVE)
            f0 = power_of_two((word & 0xFF) + E2M1_BIAS, NATIVE)[:, None]
            f1 = power_of_two(((word >> 8) & 0xFF) + E2M1_BIAS, NATIVE)[:, None]
            f2 = power_of_two(((word >> 16) & 0xFF) + E2M1_BIAS, NATIVE)[:, None]
            f3 = power_of_two(((word >> 24) & 0xFF) + E2M1_BIAS, NATIVE)[:, None]
            sums = tl.dot(w0 * f0, x0, sums)
            sums = tl.dot(w1 * f1, x1, sums)
            sums = tl.dot(w2 * f2, x2, sums)
            sums = tl.dot(w3 * f3, x3, sums)
    else:
        k = tl.arange(0, BK)
        weights = codes + expert * N * K + n[:, None].to(tl.int64) * K + k[None, :]
        columns = tl.cdiv(K, TC)
        tiles = scales + expert * tl.cdiv(N, TR) * columns + (n // TR) * columns
        for k0 in tl.range(first, last, BK, num_stages=STAGES):
            if EVEN:
                w = tl.load(weights + k0)
                xs = tl.load(rows + k0 + k[:, None], mask=here, other=0.0).to(NUM)
            else:
                w = tl.load(weights + k0, mask=inside[:, None] & (k0 + k < K)[None, :], other=0)
                xs = tl.load(rows + k0 + k[:, None], mask=here & (k0 + k < K)[:, None], other=0.0).to(NUM)
            if FORMAT == "bf16":
                sums = tl.dot(w.to(NUM), xs, sums)
            else:
                scale = (
                    tl.load(tiles + k0 // TC) if EVEN else tl.load(tiles + k0 // TC, mask=inside, other=0.0)
                )
                if POWERS:
                    numbers = e4m3_bits(w, NATIVE) * (scale * 2.0**E4M3_BIAS).to(NUM)[:, None]
                    sums = tl.dot(numbers, xs, sums)
                else:
                    numbers = e4m3_bits(w, NATIVE) * tl.full((1, 1), 2.0**E4M3_BIAS, tl.float32).to(NUM)
                    sums += tl.dot(numbers, xs) * scale[:, None]
    put(sums, row, n, inside, out, factors, num_rows, N, limit, GLU, WEIGHTED, SPLITS, BN, BM)
