"""Routed experts of many rows, as prompts have them: e2m1 weights times e4m3 rows, for sm_89 and later.

    y[row, n]    what matrix8.py's `weigh8` gives for blocks of rows that share an expert, to the bit

    gate_up   x by row    ──▶  silu(gate) * up by place     a place: position in Groups.rows_of
    rounding  by place    ──▶  codes and scales by place
    down      by place    ──▶  y by row

Between two products rows lie as the second reads them, by place, so that a tile of them is one piece of memory. The four
groups of a block are one product of 128, sizes are compiled in, and gate and up are mixed by eights of rows within a
tile: a thread has both in its own registers when it comes to silu. Only whole tiles; multiply.py says who comes here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from splitserve.ops.triton.codes import common_scale, e2m1_bytes, e4m3_numbers, e4m3_scale, in_lanes, to_e4m3
from splitserve.ops.triton.matrix import silu_times
from splitserve.ops.triton.overlap import follow


@triton.jit
def _beside(w0, w1, w2, w3):
    """Four [n, 32] -> [n, 128], one after another."""
    pairs = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [n, 32, i1, i0]
    return tl.reshape(tl.permute(pairs, (0, 2, 3, 1)), (w0.shape[0], 128))


@triton.jit(do_not_specialize=["columns"])
def weigh_many(
    x,  # [rows / SHARE, K] e4m3; PLACED: [places, K]
    x_scales,  # [K / 128, columns] float32; PLACED: [K / 128 + 1, columns]
    codes, scales,
    out,  # [rows, N], or [rows, N / 2] where GLU; as many places as rows where TO_PLACES
    rows_of, expert_of, factors,
    columns, limit,
    N: tl.constexpr,
    K: tl.constexpr,
    SHARE: tl.constexpr,
    PLACED: tl.constexpr,  # x lies by place
    TO_PLACES: tl.constexpr,  # the result lies by place; places without a row hold anything
    GLU: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TR: tl.constexpr,
    WIDE: tl.constexpr,  # PLACED only: scales of a block are fewer than threads
    NATIVE: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # grid: [N / BN, blocks]
    follow()
    tile, block = tl.program_id(0), tl.program_id(1)
    owner = tl.load(expert_of + block)
    if owner < 0:
        return
    expert = owner.to(tl.int64)
    place, r = tl.arange(0, BM), tl.arange(0, BN)
    BLOCKS: tl.constexpr = K // 128
    half: tl.constexpr = BN // 2
    if GLU:  # eight rows of gate, the eight of up that belong to them, and so on
        lead = tile * half
        beyond = (r // 16) * 8 + r % 8 + (r // 8) % 2 * (N // 2)
    else:
        lead = tile * BN
        beyond = r
    # What a place without a row reads (row 0, or nothing's) is never stored by row.
    if PLACED:
        lines, source = x + (block * BM).to(tl.int64) * K, (place * K)[None, :]
        row_scales = x_scales + block * BM
        # and those of the next block: the compiler would copy less than a thread's number each one by one
        of_columns = place[:, None] + (tl.arange(0, 2) * columns)[None, :] if WIDE else place
    else:
        of_columns = tl.maximum(tl.load(rows_of + block * BM + place), 0) // SHARE
        lines, source = x, of_columns.to(tl.int64)[None, :] * K
        row_scales = x_scales
    j = tl.arange(0, 32)
    k = tl.arange(0, 128)[:, None]
    weights = codes + expert * (N * (K // 4))
    if (N // 2) % TR == 0 and half % TR == 0:
        weights += (lead // TR) * (BLOCKS * TR * 32)
        lie = ((beyond // TR) * (BLOCKS * TR * 32) + beyond % TR * 32)[:, None] + j[None, :]
    else:
        n = lead + beyond
        lie = ((n // TR) * (BLOCKS * TR) + n % TR)[:, None] * 32 + j[None, :]
    words = scales + expert * (BLOCKS * N) + lead
    sums = tl.zeros((BN, BM), tl.float32)
    for b in tl.range(0, BLOCKS, num_stages=STAGES):
        packed = tl.load((weights + b * (TR * 32)) + lie)
        word = tl.load((words + b * N) + beyond)
        xb = tl.load((lines + b * 128) + (source + k))
        w0, w1, w2, w3 = e2m1_bytes(packed, word, NATIVE)
        product = tl.dot(e4m3_numbers(_beside(w0, w1, w2, w3), NATIVE), e4m3_numbers(xb, NATIVE))
        xs = tl.load((row_scales + b * columns) + of_columns)
        if PLACED and WIDE:
            xs, _ = tl.split(xs)
        sums += product * common_scale(word)[:, None] * xs[None, :]
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
        tl.store(out + row.to(tl.int64)[None, :] * width + col[:, None], sums, mask=(row >= 0)[None, :])


@triton.jit(do_not_specialize=["places"])
def round_places(
    x,  # [places, K]
    codes,  # [places, K] bytes
    scales,  # [K / 128 + 1, places] float32; [K / 256, places, 2] where LANES
    rows_of, expert_of,
    places, K,
    LANES: tl.constexpr,  # codes in the order of lanes
    FP8: tl.constexpr,  # the processor converts to e4m3
    BM: tl.constexpr,  # places of a block
    BP: tl.constexpr,  # places of a program
    BD: tl.constexpr,
):  # fmt: skip
    # grid: [places / BP, ceil(K / BD)]
    # matrix8.py's `quantise`, of the places that have a row
    follow()
    if tl.load(expert_of + tl.program_id(0) * BP // BM) < 0:
        return
    place = tl.program_id(0) * BP + tl.arange(0, BP)
    here = tl.load(rows_of + place) >= 0
    group = tl.program_id(1) * (BD // 128) + tl.arange(0, BD // 128)
    col = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    at = place.to(tl.int64)[:, None, None] * K + col[None, :, :]
    mask = here[:, None, None] & (col < K)[None, :, :]
    wide = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    scale = e4m3_scale(tl.max(tl.abs(wide), 2))
    code = to_e4m3(wide / scale[:, :, None], FP8)
    tl.store(codes + at, in_lanes(code) if LANES else code, mask=mask)
    g, p = group[None, :], place[:, None]
    to = (g // 2 * places + p) * 2 + g % 2 if LANES else g * places + p
    tl.store(scales + to, scale, mask=here[:, None] & (group < K // 128)[None, :])
