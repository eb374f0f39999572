"""Routed experts whose e2m1 codes lie in the order of lanes, times e4m3 rows: for few rows and for many, from sm_89 on.

    y[row, n] = base[n] * sum over blocks b of  xs[row, b] * (sum over k in b of weight[n, k] * x[row, k])

A lane of a warp holds numbers 32 c + 16 h + 4 t + b of a product of 128, t being the lane's own. So codes lie (v4/quant.py)
that those are the numbers of group t: a lane needs the scale of one group, not of four. Codes of rows are permuted alike
when they are rounded, so that the sum is over the same products. Scales of groups are over one base of the whole row, which
comes in after the loop, and lie as bytes for two blocks, as do those of x: the loop takes two at a time.

Forms by place and the mixture of gate and up are those of matrix_many.py; splits are those of matrix8.py. Whole tiles only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from splitserve.ops.triton.codes import e2m1_lanes, e4m3_numbers
from splitserve.ops.triton.matrix import silu_times
from splitserve.ops.triton.overlap import follow


@triton.jit
def _woven(packed, over, NATIVE: tl.constexpr):
    """Words [n, 32] and exponents [n, 4] -> e4m3 [n, 128], in the order in which rows' codes lie."""
    w0, w1, w2, w3 = e2m1_lanes(packed, over, NATIVE)
    pairs = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [n, 32, c1, c0]
    apart = tl.reshape(pairs, (packed.shape[0], 4, 2, 4, 2, 2))  # n, t, h, b, c1, c0
    return e4m3_numbers(tl.reshape(tl.permute(apart, (0, 4, 5, 2, 1, 3)), (packed.shape[0], 128)), NATIVE)


@triton.jit(do_not_specialize=["columns", "num_rows"])
def weigh_lanes(
    x,  # [rows / SHARE, K] e4m3, in the order of lanes; PLACED: [places, K]
    x_scales,  # [K / 256, columns, 2] float32; a column is a row or a place
    codes,  # [experts, N, K / 4] int16, tiled
    scales,  # [experts, K / 256, N, 2, 4] bytes
    bases,  # [experts, N] float32
    out,  # [rows, N], or [rows, N / 2] where GLU; as many places where TO_PLACES; [SPLITS, rows, N] float32 where SPLITS > 1
    rows_of, expert_of, factors,
    columns, num_rows, limit,
    N: tl.constexpr,
    K: tl.constexpr,
    SHARE: tl.constexpr,
    PLACED: tl.constexpr,  # x lies by place
    TO_PLACES: tl.constexpr,  # the result lies by place; places without a row hold anything
    GLU: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TR: tl.constexpr,
    SPLITS: tl.constexpr,  # neither GLU nor WEIGHTED where there are several: `add_parts` does that
    NATIVE: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # grid: [N / BN, blocks, SPLITS]
    follow()
    tile, block = tl.program_id(0), tl.program_id(1)
    owner = tl.load(expert_of + block)
    if owner < 0:
        return
    expert = owner.to(tl.int64)
    place, r = tl.arange(0, BM), tl.arange(0, BN)
    half: tl.constexpr = BN // 2
    if GLU:  # eight rows of gate, the eight of up that belong to them, and so on
        lead = tile * half
        beyond = (r // 16) * 8 + r % 8 + (r // 8) % 2 * (N // 2)
    else:
        lead = tile * BN
        beyond = r
    # What a place without a row reads where rows are many (row 0, or nothing's) is never stored by row.
    here = (tl.load(rows_of + block * BM + place) >= 0)[None, :] if BM < 64 else tl.full((1, BM), 1, tl.int1)
    if PLACED:
        column, lines, source = place, x + (block * BM).to(tl.int64) * K, (place * K)[None, :]
        row_scales = x_scales + block * (BM * 2)
    else:
        column = tl.maximum(tl.load(rows_of + block * BM + place), 0) // SHARE
        lines, source, row_scales = x, column.to(tl.int64)[None, :] * K, x_scales
    of_columns = (column * 2)[:, None] + tl.arange(0, 2)[None, :]
    j = tl.arange(0, 32)
    k = tl.arange(0, 128)[:, None]
    weights = codes + expert * (N * (K // 4))
    if (N // 2) % TR == 0 and half % TR == 0:
        weights += (lead // TR) * (K // 128 * TR * 32)
        lie = ((beyond // TR) * (K // 128 * TR * 32) + beyond % TR * 32)[:, None] + j[None, :]
    else:
        n = lead + beyond
        lie = ((n // TR) * (K // 128 * TR) + n % TR)[:, None] * 32 + j[None, :]
    of_groups = scales + expert * (N * (K // 32)) + lead * 8
    eights = (beyond * 8)[:, None] + tl.arange(0, 8)[None, :]
    sums = tl.zeros((BN, BM), tl.float32)
    part: tl.constexpr = (K // 256 + SPLITS - 1) // SPLITS
    first = tl.program_id(2) * part
    for b in tl.range(first, tl.minimum(first + part, K // 256), num_stages=STAGES):
        packed0 = tl.load((weights + b * (TR * 64)) + lie)
        packed1 = tl.load((weights + b * (TR * 64)) + (lie + TR * 32))
        both = tl.reshape(tl.load((of_groups + b * (8 * N)) + eights), (BN, 2, 4))
        over0, over1 = tl.split(tl.permute(both, (0, 2, 1)))
        if BM < 64:
            x0 = tl.load((lines + b * 256) + (source + k), mask=here, other=0.0)
            x1 = tl.load((lines + b * 256) + (source + (k + 128)), mask=here, other=0.0)
        else:
            x0 = tl.load((lines + b * 256) + (source + k))
            x1 = tl.load((lines + b * 256) + (source + (k + 128)))
        product0 = tl.dot(_woven(packed0, over0, NATIVE), e4m3_numbers(x0, NATIVE))
        product1 = tl.dot(_woven(packed1, over1, NATIVE), e4m3_numbers(x1, NATIVE))
        xs0, xs1 = tl.split(tl.load((row_scales + b * (columns * 2)) + of_columns))
        sums += product0 * xs0[None, :]
        sums += product1 * xs1[None, :]
    sums *= tl.load(bases + expert * N + lead + beyond)[:, None]
    at = block * BM + tl.arange(0, BM)  # again, rather than held through the loop
    row = at if TO_PLACES and not WEIGHTED else tl.load(rows_of + at)
    if GLU:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (BN // 16, 2, 8, BM)), (0, 2, 3, 1)))
        sums = tl.reshape(silu_times(gate, up, limit), (half, BM))
        col = tile * half + tl.arange(0, half)
    else:
        col = tile * BN + tl.arange(0, BN)
    if WEIGHTED:
        sums *= tl.load(factors + tl.maximum(row, 0), mask=row >= 0, other=0.0)[None, :]
    width: tl.constexpr = N // 2 if GLU else N
    if TO_PLACES:
        tl.store(out + at.to(tl.int64)[None, :] * width + col[:, None], sums)
    else:
        if SPLITS > 1:
            out += tl.program_id(2).to(tl.int64) * num_rows * N
        tl.store(out + row.to(tl.int64)[None, :] * width + col[:, None], sums, mask=(row >= 0)[None, :])
