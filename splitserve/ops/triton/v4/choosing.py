"""Chooses the best of rated entries for each token, and says where they lie.

    select_best    few tokens, or long rows: a token's entries lie in all threads of a program of eight warps; the last
                   one that is chosen is found by its digits, eight bits at a time, counted in a histogram
    select_many    many tokens and up to LONGEST entries: a token has a warp or two, each thread keeps its scores, and a
                   threshold is looked for by counting what lies above it

Both give the same: entries in their order, of equals the first. A NaN counts as larger than all numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splitserve.ops.kernels.launch import arch_of, launch
from splitserve.ops.kernels.tuned import tuned
from splitserve.ops.ref.v4.indexer import Places
from splitserve.ops.triton.overlap import follow

MANY = 128  # tokens from which each has a warp or two
LONGEST = 4096  # entries of a row that such a warp takes
GUESSES = tl.constexpr(8)  # thresholds that suppose scores to lie evenly; then bits are halved

NOT_VISIBLE = tl.constexpr(0x007FFFFF)  # what -inf becomes among ranks
KEY_NOT_VISIBLE = tl.constexpr(-2139095041)  # and among keys
NOT_THERE = tl.constexpr(-2147483648)  # less than all keys


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
    BN: tl.constexpr,  # entries that are counted at once
    PIECE: tl.constexpr,  # and placed; BN: there are no more, and they are read once
):  # fmt: skip
    """The count-th largest by its digits, eight bits at a time; then all above it, and the first of its equals."""
    digit = tl.arange(0, 256)
    WHOLE: tl.constexpr = PIECE == BN
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
    for start in range(0, ends, PIECE):
        at = start + tl.arange(0, PIECE)
        mine = rank if WHOLE else _ranks_at(row, start, ends, PIECE)
        signed = mine ^ -2147483648
        more, same = (signed > limit) & (at < num_entries), (signed == limit) & (at < num_entries)
        both = more.to(tl.int32) << 16 | same.to(tl.int32)  # PIECE is less than 2 ** 16
        before = tl.cumsum(both, 0) - both
        order = equal + (before & 0xFFFF)
        take = more | (same & (order < missing))
        entry = tl.where(mine == NOT_VISIBLE, -1, _located(at, pages, per_page, take, LOCATED))
        tl.store(into + above + (before >> 16) + tl.minimum(order, missing), entry, mask=take)
        if not WHOLE:
            total = tl.sum(both, 0)
            above += total >> 16
            equal += total & 0xFFFF


@triton.jit(
    do_not_specialize=["max_pages", "per_page", "num_entries", "count"],
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
):  # fmt: skip
    # grid: [T]
    # one form for rows of all widths: it is the entries that count which take one way or another
    follow()
    token = tl.program_id(0).to(tl.int64)
    row, into = scores + token * num_entries, chosen + token * count
    if LOCATED:
        pages += (token if ONE else tl.load(seq_of + token)) * max_pages
    ends = num_entries
    if SEEN:
        ends = tl.minimum(tl.load(num_visible + token).to(tl.int32), num_entries)
    if SEEN and ends <= count:  # all of them
        for start in range(0, count, 1024):
            at = start + tl.arange(0, 1024)
            entry = _located(at, pages, per_page, at < ends, LOCATED)
            tl.store(into + at, tl.where(at < ends, entry, -1), mask=at < count)
    elif ends <= 1024:
        _take_best(row, into, ends, count, pages, per_page, LOCATED, 1024, 1024)
    elif ends <= 2048:
        _take_best(row, into, ends, count, pages, per_page, LOCATED, 2048, 2048)
    else:
        _take_best(row, into, ends, count, pages, per_page, LOCATED, 4096, 1024)


@triton.jit
def _keys(row, ends, BN: tl.constexpr):
    """Scores as int32 of the same order; what is not there is less than all. Reads up to three more than `ends`."""
    at = tl.arange(0, BN)
    bits = tl.load(row + at, mask=at // 4 < tl.cdiv(ends, 4), other=0.0).to(tl.int32, bitcast=True)
    key = tl.minimum(bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFE)
    return tl.where(at < ends, tl.maximum(key, NOT_THERE + 1), NOT_THERE)


@triton.jit
def _score(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _place(at, pages, shift, take, LOCATED: tl.constexpr):
    """As _located, for pages of 1 << shift entries."""
    entry = at.to(tl.int64)
    if LOCATED:
        page = tl.load(pages + (at >> shift), mask=take, other=0)
        entry = (page << shift) + (at & ((1 << shift) - 1))
    return entry


@triton.jit
def _threshold(row, ends, count, BN: tl.constexpr):
    """(low, high, missing): chosen are all keys from `high` on and the first `missing` of those that equal `low`."""
    key = _keys(row, ends, BN)
    low = tl.min(tl.where(key != NOT_THERE, key, 0x7FFFFFFF), 0)
    high = tl.max(key, 0) + 1
    from_low, from_high = ends, ends * 0  # keys from there on: more than are chosen, and no more
    if ends == count:
        high, from_high = low, ends
    rounds = 0
    while (from_high != count) & (high - low != 1):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        if rounds < GUESSES:
            a, b = _score(low), _score(high)
            guess = a + (b - a) * ((from_low - count).to(tl.float32) / (from_low - from_high).to(tl.float32))
            bits = guess.to(tl.int32, bitcast=True)
            middle = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        middle = tl.minimum(tl.maximum(middle, low + 1), high - 1)
        found = tl.sum((key >= middle).to(tl.int32), 0)
        if found > count:
            low, from_low = middle, found
        else:
            high, from_high = middle, found
        rounds += 1
    return low, high, count - from_high


@triton.jit
def _search(
    row, into, ends, count, pages, shift, LOCATED: tl.constexpr, BN: tl.constexpr, PIECE: tl.constexpr
):
    """The best `count` of up to BN entries; they are read twice, the second time from the first-level cache."""
    low, high, missing = _threshold(row, ends, count, BN)
    above, equal = ends * 0, ends * 0  # before the entries at hand
    for start in range(0, ends, PIECE):
        at = start + tl.arange(0, PIECE)
        key = _keys(row + start, ends - start, PIECE)
        if (missing == 0) & (high > KEY_NOT_VISIBLE):  # nearly always: no equals are left out, none is -inf
            take = key >= high
            before = tl.cumsum(take.to(tl.int32), 0)
            tl.store(into + above + before - 1, _place(at, pages, shift, take, LOCATED), mask=take)
            above += tl.sum(take.to(tl.int32), 0)
        else:
            more, same = key >= high, key == low
            both = more.to(tl.int32) << 16 | same.to(tl.int32)
            before = tl.cumsum(both, 0) - both
            order = equal + (before & 0xFFFF)
            take = more | (same & (order < missing))
            entry = tl.where(key == KEY_NOT_VISIBLE, -1, _place(at, pages, shift, take, LOCATED))
            tl.store(into + above + (before >> 16) + tl.minimum(order, missing), entry, mask=take)
            total = tl.sum(both, 0)
            above += total >> 16
            equal += total & 0xFFFF


@triton.jit(
    do_not_specialize=["max_pages", "shift", "many", "num_entries", "count"],
    do_not_specialize_on_alignment=["pages", "seq_of", "num_visible"],
)
def select_many(
    scores,  # [T, num_entries] float32
    chosen,  # [T, count] int64
    pages, max_pages, shift,  # [num_seqs, max_pages] int64, of 1 << shift entries; LOCATED only
    seq_of, many,  # [T] int64; 0: every sequence has one token, and nothing is read
    num_visible,  # [T] int64: how many entries count, the first; SEEN only
    num_entries,  # a multiple of 4
    count,
    LOCATED: tl.constexpr,  # entries become flat positions in a view of pages
    SEEN: tl.constexpr,
    BN: tl.constexpr,  # at least num_entries
    PIECE: tl.constexpr,
):  # fmt: skip
    # grid: [T], later tokens first: they see more
    follow()
    token = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    row, into = scores + tl.multiple_of(token * num_entries, 4), chosen + token * count
    if LOCATED:
        pages += tl.load(seq_of + token, mask=many != 0, other=token) * max_pages
    ends = num_entries
    if SEEN:
        ends = tl.minimum(tl.load(num_visible + token).to(tl.int32), num_entries)
    if SEEN and ends <= count:  # all of them
        for start in range(0, count, 512):
            at = start + tl.arange(0, 512)
            entry = _place(at, pages, shift, at < ends, LOCATED)
            tl.store(into + at, tl.where(at < ends, entry, -1), mask=at < count)
    elif ends <= BN // 2:
        _search(row, into, ends, count, pages, shift, LOCATED, BN // 2, PIECE)
    else:
        _search(row, into, ends, count, pages, shift, LOCATED, BN, PIECE)


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
    pages, per_page = (chosen, 1) if places is None else (places.pages, places.per_page)
    sequence = None if places is None else places.sequence
    seq_of, seen = chosen if sequence is None else sequence, chosen if num_visible is None else num_visible
    kind = {"LOCATED": places is not None, "SEEN": num_visible is not None}
    even = entries % 4 == 0 and per_page & (per_page - 1) == 0
    if tokens >= MANY and entries <= LONGEST and even:
        wide = entries > 2048
        launch(
            select_many, (tokens,),
            scores, chosen, pages, pages.shape[1], per_page.bit_length() - 1, seq_of, int(sequence is not None),
            seen, entries, chosen.shape[1], **kind,
            BN=4096 if wide else 2048, PIECE=512 if wide else 256, num_warps=2 if wide else 1,
        )  # fmt: skip
        return chosen
    launch(
        select_best, (tokens,),
        scores, chosen, pages, pages.shape[1], per_page, seq_of, seen, entries, chosen.shape[1],
        **kind, ONE=sequence is None, **tuned("select_best", arch_of(scores), tokens),
    )  # fmt: skip
    return chosen
