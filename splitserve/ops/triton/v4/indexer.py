"""The lightning indexer: rates compressed entries and keeps the best few for each token.

    score[t, i] = scale[i] * sum over heads of weight[t, h] * relu(q[t, h] . code[i])

A packed key's scale is positive, so it comes out of relu, and codes go into the product as they are (codes.py): the
missing 2 ** 120 is split between q, before, and the score, after, so that no float32 sum is subnormal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from splitserve.ops.kernels.counts import cdiv, next_power_of_2
from splitserve.ops.kernels.launch import arch_of, interpreted, launch
from splitserve.ops.kernels.tuned import tuned
from splitserve.ops.ref.v4.indexer import Places
from splitserve.ops.triton.codes import e4m3_bits
from splitserve.ops.triton.overlap import follow

HALF = tl.constexpr(2.0**60)  # half of the exponent that codes as bf16 lack


@triton.jit(
    do_not_specialize=["max_pages", "num_entries"],
    do_not_specialize_on_alignment=["pages", "seq_of", "num_visible"],
)
def rate_entries(
    q,  # [T, heads, D] bf16
    weights,  # [T, heads] float32
    view, per_page, page_stride, row_stride,  # strides in steps of ALIGN elements
    pages,  # [num_seqs, max_pages] int64
    max_pages,
    seq_of,  # [T] int64, unless ONE
    num_visible,  # [T] int64
    scores,  # [T, num_entries] float32
    num_entries,
    heads,
    PACKED: tl.constexpr,
    ONE: tl.constexpr,  # every sequence has one token
    D: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    TILES: tl.constexpr,  # tiles of BN entries for one program
    ALIGN: tl.constexpr,
    NATIVE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # grid: [T, ceil(num_entries / (BN * TILES))]
    follow()
    token = tl.program_id(0).to(tl.int64)
    seq = token if ONE else tl.load(seq_of + token)
    visible = tl.load(num_visible + token).to(tl.int32)
    head, col = tl.arange(0, BH), tl.arange(0, D)
    query = tl.load(
        q + (token * heads + head[:, None]) * D + col[None, :], mask=head[:, None] < heads, other=0.0
    )
    NUM: tl.constexpr = tl.bfloat16 if NATIVE else tl.float32
    query = (query.to(tl.float32) * (HALF if PACKED else 1.0)).to(NUM)
    weight = tl.load(weights + token * heads + head, mask=head < heads, other=0.0)
    first, stop = tl.program_id(1) * TILES, (tl.program_id(1) + 1) * TILES
    seen = tl.minimum(stop, tl.cdiv(visible, BN))
    for tile in tl.range(first, seen, num_stages=STAGES):
        entry = tile * BN + tl.arange(0, BN)
        here = entry < visible
        page = tl.load(pages + seq * max_pages + entry // per_page, mask=here, other=0)
        start = page * (page_stride.to(tl.int64) * ALIGN) + (entry % per_page) * (row_stride * ALIGN)
        rows = tl.multiple_of(view + start, ALIGN)
        if PACKED:
            scale = tl.load((rows + D).to(tl.pointer_type(tl.float32)), mask=here, other=0.0)
            codes = tl.load(rows[:, None] + col[None, :], mask=here[:, None], other=0)
            keys = e4m3_bits(codes, NATIVE)
        else:
            keys = tl.load(rows[:, None] + col[None, :], mask=here[:, None], other=0.0).to(NUM)
        rated = tl.maximum(tl.dot(query, tl.trans(keys)), 0.0)
        score = tl.sum(rated * weight[:, None], 0)
        if PACKED:
            score *= scale * HALF
        out = scores + token * num_entries + entry
        tl.store(out, tl.where(here, score, float("-inf")), mask=entry < num_entries)
    for tile in range(tl.maximum(first, seen), stop):
        entry = tile * BN + tl.arange(0, BN)
        never = tl.full((BN,), float("-inf"), tl.float32)
        tl.store(scores + token * num_entries + entry, never, mask=entry < num_entries)


def index_scores(
    q: torch.Tensor,  # [T, heads, index_dim]
    weights: torch.Tensor,  # [T, heads] float32, scaled
    view: torch.Tensor,  # [num_pages, rows_per_page, width]: index keys, any strides
    pages: torch.Tensor,  # [num_seqs, max_pages] int64
    num_visible: torch.Tensor,  # [T] int64: entries that a token may see, the first of its sequence
    *,
    q_lens: Sequence[int],  # tokens of each sequence in q, in order
) -> torch.Tensor:  # [T, entries that the pages hold] float32, -inf where not visible
    """Twin of ref.v4.index_scores; as wide as the pages allow, so that nothing is read back from the device."""
    tokens, heads, dim = q.shape
    one = tokens == len(q_lens)
    seq_of = num_visible if one else _sequences(q_lens, q.device)
    scores = torch.empty(tokens, pages.shape[1] * view.shape[1], dtype=torch.float32, device=q.device)
    packed = view.dtype == torch.uint8
    align = 4 if packed else 8
    config = tuned("rate_entries", arch_of(q), tokens)
    config["STAGES"] = config.pop("num_stages")
    launch(
        rate_entries,
        (tokens, cdiv(scores.shape[1], config["BN"] * config["TILES"])),
        q, weights,
        view, view.shape[1], view.stride(0) // align, view.stride(1) // align,
        pages, pages.shape[1], seq_of, num_visible, scores, scores.shape[1], heads,
        PACKED=packed, ONE=one, D=dim, BH=max(16, next_power_of_2(heads)), ALIGN=align,
        NATIVE=not interpreted(), **config,
    )  # fmt: skip
    return scores


def _sequences(q_lens: Sequence[int], device: torch.device) -> torch.Tensor:
    """[T] int64: the sequence of each token."""
    if len(q_lens) == 1:
        return torch.zeros(q_lens[0], dtype=torch.int64, device=device)
    lens = torch.tensor(q_lens, device=device)
    return torch.arange(len(q_lens), device=device).repeat_interleave(lens, output_size=sum(q_lens))


@triton.jit
def _ranks(x):
    """float32 -> int32 of the same order, as bits of an unsigned number."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) | -2147483648)


@triton.jit(
    do_not_specialize=["max_pages", "num_entries", "count"],
    do_not_specialize_on_alignment=["pages", "seq_of"],
)
def select_best(
    scores,  # [T, num_entries] float32
    chosen,  # [T, count] int64
    pages, max_pages, per_page,  # [num_seqs, max_pages] int64; LOCATED only
    seq_of,  # [T] int64, unless ONE
    num_entries, count,
    LOCATED: tl.constexpr,  # entries become flat positions in a view of pages
    ONE: tl.constexpr,  # every sequence has one token
    BN: tl.constexpr,
):  # fmt: skip
    # grid: [T]
    # the count-th largest by its digits, eight bits at a time; then all above it, and the first of its equals
    follow()
    token = tl.program_id(0).to(tl.int64)
    row = scores + token * num_entries
    digit = tl.arange(0, 256)
    prefix = tl.full((), 0, tl.int32)
    missing = count  # of the chosen, those that share the prefix
    for place in tl.static_range(4):
        shift = 24 - 8 * place
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, num_entries, BN):
            at = start + tl.arange(0, BN)
            rank = _ranks(tl.load(row + at, mask=at < num_entries, other=float("-inf")))
            alike = at < num_entries
            if place > 0:
                alike = alike & (((rank ^ prefix) >> (shift + 8)) == 0)
            counts += tl.histogram((rank >> shift) & 0xFF, 256, mask=alike)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # of those alike, those with a larger digit
        here = (above < missing) & (above + counts >= missing)
        best = tl.sum(tl.where(here, digit, 0), 0)
        missing -= tl.sum(tl.where(here, above, 0), 0)
        prefix = prefix | (best << shift)
    limit = prefix ^ -2147483648  # signed order
    done, equal = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for start in range(0, num_entries, BN):
        at = start + tl.arange(0, BN)
        score = tl.load(row + at, mask=at < num_entries, other=float("-inf"))
        rank = _ranks(score) ^ -2147483648
        same = (rank == limit) & (at < num_entries)
        order = equal + tl.cumsum(same.to(tl.int32), 0)
        take = ((rank > limit) & (at < num_entries)) | (same & (order <= missing))
        into = done + tl.cumsum(take.to(tl.int32), 0) - 1
        entry = at.to(tl.int64)
        if LOCATED:
            seq = token if ONE else tl.load(seq_of + token)
            page = tl.load(pages + seq * max_pages + at // per_page, mask=take, other=0)
            entry = page * per_page + at % per_page
        entry = tl.where(score == float("-inf"), -1, entry)
        tl.store(chosen + token * count + into, entry, mask=take)
        done += tl.sum(take.to(tl.int32), 0)
        equal += tl.sum(same.to(tl.int32), 0)


def choose_entries(
    scores: torch.Tensor,  # [T, N] float32, -inf where not visible
    count: int,
) -> torch.Tensor:  # [T, min(count, N)] int64: entries in any order, -1 where fewer are visible
    """Twin of ref.v4.choose_entries. In order of entries; of equal scores the first are taken."""
    return _choose(scores, count, None)


def choose_located(
    scores: torch.Tensor,  # [T, N] float32, -inf where not visible
    count: int,
    places: Places,
) -> torch.Tensor:  # [T, min(count, N)] int64: flat positions in a view of pages, -1 where fewer are visible
    """locate_entries of choose_entries, in one kernel."""
    return _choose(scores, count, places)


def _choose(scores: torch.Tensor, count: int, places: Places | None) -> torch.Tensor:
    scores = scores.contiguous()
    tokens, entries = scores.shape
    chosen = torch.empty(tokens, min(count, entries), dtype=torch.int64, device=scores.device)
    size = min(max(256, next_power_of_2(entries)), 4096)
    pages, per_page = (chosen, 1) if places is None else (places.pages, places.per_page)
    sequence = None if places is None else places.sequence
    launch(
        select_best, (tokens,),
        scores, chosen, pages, pages.shape[1], per_page, chosen if sequence is None else sequence, entries, chosen.shape[1],
        LOCATED=places is not None, ONE=sequence is None, BN=size, num_warps=8,
    )  # fmt: skip
    return chosen
