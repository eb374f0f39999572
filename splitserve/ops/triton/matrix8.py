"""Weights in codes times rows in codes: products of eight bits, for processors that have them (sm_89 and later).

    y[row, n] = sum over groups g of  xs[row, g] * ws[n, g] * (sum over k in g of weight[n, k] * x[row, k])

Rows are e4m3 with one scale for 128 neighbours (quantise_rows). Tile, formats, groups and GLU are those of matrix.py; a
product of one group is short enough for the tensor cores' narrow accumulators, and is scaled into float32 sums.
With SPLITS, programs take parts of K, and `add_parts` adds them up: small matrices need it to fill the processors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from splitserve.ops.triton.codes import (
    E4M3_BIAS,
    common_scale,
    e2m1_bytes,
    e4m3_bits,
    e4m3_numbers,
    e4m3_scale,
    in_lanes,
    to_e4m3,
)
from splitserve.ops.triton.matrix import put, silu_times, tile_columns, tile_rows
from splitserve.ops.triton.overlap import follow, follow_briefly


@triton.jit(do_not_specialize=["num_rows", "share"])
def weigh8(
    x,  # [rows / share, K] e4m3
    x_scales,  # [K / 128, rows / share] float32
    codes, scales,
    out,  # [rows, N], or [rows, N / 2] where GLU; [SPLITS, rows, N] float32 where SPLITS > 1
    rows_of, expert_of, factors,
    num_rows, N, K, share, limit,
    FORMAT: tl.constexpr,
    GROUPED: tl.constexpr,
    EXPERTS: tl.constexpr,
    GLU: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TR: tl.constexpr,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    NATIVE: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # grid: [ceil(N / BN), blocks, SPLITS]
    follow()
    expert, row, used = tile_rows(rows_of, expert_of, num_rows, GROUPED, EXPERTS, BM)
    if not used:
        return
    # Where rows are many, what a place without one reads (row 0) is never stored, and a mask costs registers.
    one = row >= 0 if BM < 64 else tl.full((BM,), 1, tl.int1)
    here = one[None, :]
    n, inside = tile_columns(N, GLU, BN)
    source = (tl.maximum(row, 0) // share).to(tl.int64)
    blocks = K // 128
    rows = x + source[None, :] * K
    row_scales, step = x_scales + source, num_rows // share
    sums = tl.zeros((BN, BM), tl.float32)
    part = tl.cdiv(blocks, SPLITS)
    first = tl.program_id(2) * part
    last = tl.minimum(first + part, blocks)
    if FORMAT == "e2m1":
        j = tl.arange(0, 32)
        lies = (n // TR) * (blocks * TR) + n % TR  # TR rows lie side by side in each block of 128
        weights = codes + expert * N * (K // 4) + lies[:, None] * 32 + j[None, :]
        words = scales + expert * blocks * N + n
        for b in tl.range(first, last, num_stages=STAGES):
            packed = (
                tl.load(weights + b * (TR * 32))
                if EVEN
                else tl.load(weights + b * (TR * 32), mask=inside[:, None], other=0)
            )
            word = tl.load(words + b * N) if EVEN else tl.load(words + b * N, mask=inside, other=0)
            at = rows + b * 128 + j[:, None]
            x0 = tl.load(at, mask=here, other=0.0)
            x1 = tl.load(at + 32, mask=here, other=0.0)
            x2 = tl.load(at + 64, mask=here, other=0.0)
            x3 = tl.load(at + 96, mask=here, other=0.0)
            xs = tl.load(row_scales + b * step, mask=one, other=0.0)
            w0, w1, w2, w3 = e2m1_bytes(packed, word, NATIVE)
            block = tl.dot(e4m3_numbers(w0, NATIVE), e4m3_numbers(x0, NATIVE))
            block = tl.dot(e4m3_numbers(w1, NATIVE), e4m3_numbers(x1, NATIVE), block)
            block = tl.dot(e4m3_numbers(w2, NATIVE), e4m3_numbers(x2, NATIVE), block)
            block = tl.dot(e4m3_numbers(w3, NATIVE), e4m3_numbers(x3, NATIVE), block)
            sums += block * common_scale(word)[:, None] * xs[None, :]
    else:
        k = tl.arange(0, 128)
        weights = codes + expert * N * K + n[:, None].to(tl.int64) * K + k[None, :]
        tiles = scales + expert * tl.cdiv(N, TR) * blocks + (n // TR) * blocks
        for b in tl.range(first, last, num_stages=STAGES):
            w = (
                tl.load(weights + b * 128)
                if EVEN
                else tl.load(weights + b * 128, mask=inside[:, None], other=0.0)
            )
            ws = tl.load(tiles + b) if EVEN else tl.load(tiles + b, mask=inside, other=0.0)
            xb = tl.load(rows + b * 128 + k[:, None], mask=here, other=0.0)
            xs = tl.load(row_scales + b * step, mask=one, other=0.0)
            sums += tl.dot(e4m3_numbers(w, NATIVE), e4m3_numbers(xb, NATIVE)) * ws[:, None] * xs[None, :]
    if BM >= 64:  # read again rather than held through the loop
        expert, row, used = tile_rows(rows_of, expert_of, num_rows, GROUPED, EXPERTS, BM)
    put(sums, row, n, inside, out, factors, num_rows, N, limit, GLU, WEIGHTED, SPLITS, BN, BM)


@triton.jit(do_not_specialize=["num_rows"])
def add_parts(
    parts,  # [SPLITS, rows, N] float32
    out,  # [rows, N], or [rows, N / 2] where GLU
    factors,  # [rows] float32; WEIGHTED only
    num_rows, N, limit,
    GLU: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SPLITS: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    # grid: [rows, ceil(N / BD)], or half of the columns where GLU
    follow_briefly()
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BD + tl.arange(0, BD)
    width = N // 2 if GLU else N
    split = tl.arange(0, SPLITS)[:, None]
    at = parts + (split * num_rows + row) * N + col[None, :]
    total = tl.sum(tl.load(at, mask=col[None, :] < width, other=0.0), 0)
    if GLU:
        total = silu_times(total, tl.sum(tl.load(at + width, mask=col[None, :] < width, other=0.0), 0), limit)
    if WEIGHTED:
        total *= tl.load(factors + row)
    tl.store(out + row * width + col, total, mask=col < width)


@triton.jit(do_not_specialize=["num_rows"])
def quantise(
    x,  # [rows, K]
    codes,  # [rows, K] bytes; NUMBERS: what they stand for, in x's type
    scales,  # [K / 128, rows] float32; [K / 256, rows, 2] where LANES; not where NUMBERS
    num_rows, K,
    NUMBERS: tl.constexpr,
    LANES: tl.constexpr,  # codes in the order of lanes
    GROUPS: tl.constexpr,  # rows r, r + GROUPS, ... together: codes [GROUPS, rows / GROUPS, K], scales likewise
    FP8: tl.constexpr,  # the processor converts to e4m3
    BD: tl.constexpr,
):  # fmt: skip
    # grid: [rows, ceil(K / BD)]
    follow()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * (BD // 128) + tl.arange(0, BD // 128)
    col = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    wide = tl.load(x + row * K + col, mask=col < K, other=0.0).to(tl.float32)
    scale = e4m3_scale(tl.max(tl.abs(wide), 1))
    code = to_e4m3(wide / scale[:, None], FP8)
    if NUMBERS:
        numbers = e4m3_bits(code, FP8).to(tl.float32) * (2.0**E4M3_BIAS) * scale[:, None]
        tl.store(codes + row * K + col, numbers, mask=col < K)
    else:
        its, line, lines = row % GROUPS, row // GROUPS, num_rows // GROUPS
        tl.store(codes + (its * lines + line) * K + col, in_lanes(code) if LANES else code, mask=col < K)
        plain = (its * (K // 128) + group) * lines + line
        to = (group // 2 * num_rows + row) * 2 + group % 2 if LANES else plain
        tl.store(scales + to, scale, mask=group < K // 128)


@triton.jit
def expand_tiles(
    codes,  # [N, K] bytes
    scales,  # [N / TR, K / TC] float32
    out,  # [N, K] bf16
    N, K,
    TR: tl.constexpr,
    TC: tl.constexpr,
    NATIVE: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    # grid: [ceil(N / BN), ceil(K / BK)]
    follow()
    n = tl.program_id(0) * BN + tl.arange(0, BN)[:, None]
    k = tl.program_id(1) * BK + tl.arange(0, BK)[None, :]
    inside = (n < N) & (k < K)
    at = n.to(tl.int64) * K + k
    scale = tl.load(scales + (n // TR) * tl.cdiv(K, TC) + k // TC, mask=inside, other=0.0)
    wide = e4m3_bits(tl.load(codes + at, mask=inside, other=0), NATIVE).to(tl.float32)
    tl.store(out + at, wide * (2.0**E4M3_BIAS) * scale, mask=inside)
