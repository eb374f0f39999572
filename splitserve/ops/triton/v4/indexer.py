"""The lightning indexer: rates compressed entries and keeps the best few for each token.

    score[t, i] = scale[i] * sum over heads of weight[t, h] * relu(q[t, h] . code[i])

Of many tokens they are rated in rating.py.
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

from .rating import HALF, rate_many

SHORT = 1024  # entries that are chosen from without a second look, in two thirds of the time of 2,048
MANY = 128  # tokens from which two share a tile of keys


@triton.jit(
    do_not_specialize=["max_pages", "num_entries"],
    do_not_specialize_on_alignment=["pages", "seq_of", "num_visible"],
)
def rate_entries(
    q,  # [T, heads, D] bf16
    weights, weights_stride, scaled,  # [T, heads] float32, strided; a number that each is to be multiplied by
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
    weight = tl.load(weights + token * weights_stride + head, mask=head < heads, other=0.0) * scaled
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
    weights: torch.Tensor,  # [T, heads] float32, strided
    view: torch.Tensor,  # [num_pages, rows_per_page, width]: index keys, any strides
    pages: torch.Tensor,  # [num_seqs, max_pages] int64
    num_visible: torch.Tensor,  # [T] int64: entries that a token may see, the first of its sequence
    *,
    q_lens: Sequence[int],  # tokens of each sequence in q, in order
    scale: float = 1.0,  # of the weights
) -> torch.Tensor:  # [T, entries that the pages hold] float32, -inf where not visible
    """Twin of ref.v4.index_scores, which takes weights scaled; as wide as the pages allow, so that nothing is read back
    from the device.
    """
    tokens, heads, dim = q.shape
    one = tokens == len(q_lens)
    seq_of = num_visible if one else _sequences(q_lens, q.device)
    scores = torch.empty(tokens, pages.shape[1] * view.shape[1], dtype=torch.float32, device=q.device)
    packed = view.dtype == torch.uint8
    align = 4 if packed else 8
    keys = view, view.shape[1], view.stride(0) // align, view.stride(1) // align
    constants = {
        "PACKED": packed, "D": dim, "BH": max(16, next_power_of_2(heads)), "ALIGN": align,
        "NATIVE": not interpreted(),
    }  # fmt: skip
    kind = "rate_many" if tokens >= MANY and not one else "rate_entries"
    config = tuned(kind, arch_of(q), tokens)
    config["STAGES"] = config.pop("num_stages")
    tiles = cdiv(scores.shape[1], config["BN"] * config["TILES"])
    if kind == "rate_many":
        launch(
            rate_many, (cdiv(tokens, 2), tiles),
            q, weights, weights.stride(0), scale, *keys, pages, pages.shape[1], seq_of, num_visible,
            scores, tokens, scores.shape[1], heads, **constants, **config,
        )  # fmt: skip
        return scores
    launch(
        rate_entries, (tokens, tiles),
        q, weights, weights.stride(0), scale, *keys, pages, pages.shape[1], seq_of, num_visible,
        scores, scores.shape[1], heads, **constants, ONE=one, **config,
    )  # fmt: skip
    return scores


def _sequences(q_lens: Sequence[int], device: torch.device) -> torch.Tensor:
    """[T] int64: the sequence of each token."""
    if len(q_lens) == 1:
        return torch.zeros(q_lens[0], dtype=torch.int64, device=device)
    lens = torch.tensor(q_lens, device=device)
    return torch.arange(len(q_lens), device=device).repeat_interleave(lens, output_size=sum(q_lens))


NOT_VISIBLE = tl.constexpr(0x007FFFFF)  # what -inf becomes


@triton.jit
def _ranks_at(row, start, ends, BN: tl.constexpr):
    """Scores as int32 of the same order, as bits of unsigned numbers."""
    at = start + tl.arange(0, BN)
    bits = tl.load(row + at, mask=at < ends, other=float("-inf")).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) | -2147483648)


@triton.jit
def _located(at, pages, per_page, take, LOCATED: tl.constexpr):
    """Entries as int64; where LOCATED as flat positions in a view of `pages`, one sequence's."""
    entry = at.to(tl.int64)
    if LOCATED:
        entry = tl.load(pages + at // per_page, mask=take, other=0) * per_page + at % per_page
    return entry


@triton.jit
def _take_best(
    row, into, num_entries, count, pages, per_page,
    LOCATED: tl.constexpr,
    WHOLE: tl.constexpr,  # there are no more than BN entries: read once
    BN: tl.constexpr,
):  # fmt: skip
    """The count-th largest by its digits, eight bits at a time; then all above it, and the first of its equals."""
    digit = tl.arange(0, 256)
    ends = tl.minimum(num_entries, BN) if WHOLE else num_entries
    rank = _ranks_at(row, 0, ends, BN)
    prefix = tl.full((), 0, tl.int32)
    missing, alike = count, num_entries  # of the chosen, and of all, those that share the prefix
    for place in tl.static_range(4):
        shift = 24 - 8 * place
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, ends, BN):
            if not WHOLE:
                rank = _ranks_at(row, start, ends, BN)
            same = start + tl.arange(0, BN) < num_entries
            if place > 0:
                same = same & (((rank ^ prefix) >> (shift + 8)) == 0)
            counts += tl.histogram((rank >> shift) & 0xFF, 256, mask=same)
        above = alike - tl.cumsum(counts, 0)  # of those alike, those with a larger digit
        here = (above < missing) & (above + counts >= missing)
        found = tl.sum(tl.where(here, above.to(tl.int64) << 40 | counts.to(tl.int64) << 8 | digit, 0), 0)
        missing -= (found >> 40).to(tl.int32)
        alike = ((found >> 8) & 0xFFFFFFFF).to(tl.int32)
        prefix = prefix | ((found & 0xFF).to(tl.int32) << shift)
    limit = prefix ^ -2147483648  # signed order
    above, equal = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)  # before the entries at hand
    for start in range(0, ends, BN):
        if not WHOLE:
            rank = _ranks_at(row, start, ends, BN)
        at = start + tl.arange(0, BN)
        signed = rank ^ -2147483648
        more, same = (signed > limit) & (at < num_entries), (signed == limit) & (at < num_entries)
        both = more.to(tl.int32) << 16 | same.to(tl.int32)  # BN is less than 2 ** 16
        before = tl.cumsum(both, 0) - both
        order = equal + (before & 0xFFFF)
        take = more | (same & (order < missing))
        entry = tl.where(rank == NOT_VISIBLE, -1, _located(at, pages, per_page, take, LOCATED))
        tl.store(into + above + (before >> 16) + tl.minimum(order, missing), entry, mask=take)
        if not WHOLE:
            total = tl.sum(both, 0)
            above += total >> 16
            equal += total & 0xFFFF


@triton.jit(
    do_not_specialize=["max_pages", "num_entries", "count"],
    do_not_specialize_on_alignment=["pages", "seq_of", "num_visible"],
)
def select_best(
    scores,  # [T, num_entries] float32
    chosen,  # [T, count] int64
    pages, max_pages, per_page,  # [num_seqs, max_pages] int64; LOCATED only
    seq_of,  # [T] int64, unless ONE
    num_visible,  # [T] int64: how many entries count, the first; SEEN only
    num_entries, count,
    LOCATED: tl.constexpr,  # entries become flat positions in a view of pages
    ONE: tl.constexpr,  # every sequence has one token
    SEEN: tl.constexpr,
    WHOLE: tl.constexpr,
    BN: tl.constexpr,
    SHORT: tl.constexpr,  # entries that are looked through faster
):  # fmt: skip
    # grid: [T]
    follow()
    token = tl.program_id(0).to(tl.int64)
    row, into = scores + token * num_entries, chosen + token * count
    if LOCATED:
        pages += (token if ONE else tl.load(seq_of + token)) * max_pages
    if SEEN:
        seen = tl.minimum(tl.load(num_visible + token).to(tl.int32), num_entries)
        if seen <= count:  # all of them
            for start in range(0, count, SHORT):
                at = start + tl.arange(0, SHORT)
                entry = _located(at, pages, per_page, at < seen, LOCATED)
                tl.store(into + at, tl.where(at < seen, entry, -1), mask=at < count)
        elif seen <= SHORT:
            _take_best(row, into, seen, count, pages, per_page, LOCATED, True, SHORT)
        else:
            _take_best(row, into, seen, count, pages, per_page, LOCATED, WHOLE, BN)
    else:
        _take_best(row, into, num_entries, count, pages, per_page, LOCATED, WHOLE, BN)


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
    num_visible: torch.Tensor | None = None,  # [T] int64: entries before the first -inf
) -> torch.Tensor:  # [T, min(count, N)] int64: flat positions in a view of pages, -1 where fewer are visible
    """locate_entries of choose_entries, in one kernel, which with `num_visible` looks at nothing beyond."""
    return _choose(scores, count, places, num_visible)


def _choose(
    scores: torch.Tensor, count: int, places: Places | None, num_visible: torch.Tensor | None = None
) -> torch.Tensor:
    scores = scores.contiguous()
    tokens, entries = scores.shape
    chosen = torch.empty(tokens, min(count, entries), dtype=torch.int64, device=scores.device)
    size = min(max(256, next_power_of_2(entries)), 4096)
    pages, per_page = (chosen, 1) if places is None else (places.pages, places.per_page)
    sequence = None if places is None else places.sequence
    launch(
        select_best, (tokens,),
        scores, chosen, pages, pages.shape[1], per_page, chosen if sequence is None else sequence,
        chosen if num_visible is None else num_visible, entries, chosen.shape[1],
        LOCATED=places is not None, ONE=sequence is None, SEEN=num_visible is not None, WHOLE=entries <= size,
        BN=size, SHORT=min(size, SHORT), num_warps=8,
    )  # fmt: skip
    return chosen
