"""Ratings of compressed entries for many tokens: a tile of keys is turned into numbers once for several of them.

As `rate_entries` of indexer.py, with roles changed: entries are the rows of a product and heads its columns, so that
keys come from registers, and the sum over heads stays nearly within a thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from splitserve.ops.triton.codes import e4m3_bits
from splitserve.ops.triton.overlap import follow

HALF = tl.constexpr(2.0**60)  # half of the exponent that codes as bf16 lack
"""A packed key's scale is positive, so it comes out of relu, and codes go into the product as they are (codes.py): the
missing 2 ** 120 is split between q, before, and the score, after, so that no float32 sum is subnormal.
"""


@triton.jit
def _tile(
    view, per_page, page_stride, row_stride, pages, entry, here,
    PACKED: tl.constexpr, D: tl.constexpr, ALIGN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Keys [BN, D] of entries of one sequence, and what their scores are multiplied by."""
    page = tl.load(pages + entry // per_page, mask=here, other=0)
    start = page * (page_stride.to(tl.int64) * ALIGN) + (entry % per_page) * (row_stride * ALIGN)
    rows = tl.multiple_of(view + start, ALIGN)
    col = tl.arange(0, D)[None, :]
    if PACKED:
        scale = tl.load((rows + D).to(tl.pointer_type(tl.float32)), mask=here, other=0.0) * HALF
        keys = e4m3_bits(tl.load(rows[:, None] + col, mask=here[:, None], other=0), NATIVE)
    else:
        scale = here.to(tl.float32)
        keys = tl.load(rows[:, None] + col, mask=here[:, None], other=0.0)
        keys = keys.to(tl.bfloat16 if NATIVE else tl.float32)
    return keys, scale


@triton.jit
def _query(q, token, heads, PACKED: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, NATIVE: tl.constexpr):
    """[D, BH]"""
    head, col = tl.arange(0, BH)[None, :], tl.arange(0, D)[:, None]
    query = tl.load(q + (token * heads + head) * D + col, mask=head < heads, other=0.0)
    return (query.to(tl.float32) * (HALF if PACKED else 1.0)).to(tl.bfloat16 if NATIVE else tl.float32)


@triton.jit(
    do_not_specialize=["num_tokens", "max_pages", "num_entries"],
    do_not_specialize_on_alignment=["pages", "seq_of", "num_visible"],
)
def rate_many(
    q,  # [T, heads, D] bf16
    weights, weights_stride, scaled,  # [T, heads] float32, strided; a number that each is to be multiplied by
    view, per_page, page_stride, row_stride,  # strides in steps of ALIGN elements
    pages,  # [num_seqs, max_pages] int64
    max_pages,
    seq_of,  # [T] int64, in order
    num_visible,  # [T] int64
    scores,  # [T, num_entries] float32
    num_tokens, num_entries,
    heads,
    PACKED: tl.constexpr,
    D: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    TILES: tl.constexpr,  # tiles of BN entries for one program
    ALIGN: tl.constexpr,
    NATIVE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # grid: [ceil(T / 2), ceil(num_entries / (BN * TILES))]
    follow()
    one = tl.program_id(0).to(tl.int64) * 2
    two = tl.minimum(one + 1, num_tokens - 1)
    most = tl.maximum(tl.load(num_visible + one), tl.load(num_visible + two)).to(tl.int32)
    start, stop = tl.program_id(1) * TILES, (tl.program_id(1) + 1) * TILES
    seen = tl.minimum(stop, tl.cdiv(most, BN))
    if start < seen:
        q1 = _query(q, one, heads, PACKED, D, BH, NATIVE)
        q2 = _query(q, two, heads, PACKED, D, BH, NATIVE)
        head = tl.arange(0, BH)
        w1 = tl.load(weights + one * weights_stride + head, mask=head < heads, other=0.0) * scaled
        w2 = tl.load(weights + two * weights_stride + head, mask=head < heads, other=0.0) * scaled
        for seq in range(tl.load(seq_of + one), tl.load(seq_of + two) + 1):  # hardly ever more than one
            for tile in tl.range(start, seen, num_stages=STAGES):
                entry = tile * BN + tl.arange(0, BN)
                keys, scale = _tile(
                    view, per_page, page_stride, row_stride, pages + seq * max_pages, entry, entry < most,
                    PACKED, D, ALIGN, NATIVE,
                )  # fmt: skip
                for t in tl.static_range(2):
                    token = one if t == 0 else two
                    rated = tl.maximum(tl.dot(keys, q1 if t == 0 else q2), 0.0)
                    score = tl.sum(rated * (w1 if t == 0 else w2)[None, :], 1) * scale
                    score = tl.where(entry < tl.load(num_visible + token), score, float("-inf"))
                    ours = entry * 0 + tl.load(seq_of + token) == seq
                    tl.store(scores + token * num_entries + entry, score, mask=(entry < num_entries) & ours)
    for tile in range(tl.maximum(start, seen), stop):
        entry = tile * BN + tl.arange(0, BN)
        never = tl.full((BN,), float("-inf"), tl.float32)
        tl.store(scores + one * num_entries + entry, never, mask=entry < num_entries)
        tl.store(scores + two * num_entries + entry, never, mask=entry < num_entries)
