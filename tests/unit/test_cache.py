"""The cache under random histories: every page in one place, and no rows that anybody still needs are ever lost."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from splitserve.errors import InvariantError
from splitserve.kv.cache import Cache, Holding
from splitserve.spec import Kind, Units

PAGE = 2


@dataclass(eq=False)
class Request:
    tokens: list[int]
    holding: Holding
    num_done: int  # tokens whose rows are written
    quarantined: bool = False


class Requests(RuleBasedStateMachine):
    """An engine's requests. `rows[page][row]` plays the memory: what it holds is the tokens up to that row."""

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Request] = []
        self.rows: dict[int, list[tuple[int, ...]]] = {}

    @initialize(
        num_pages=st.integers(1, 9),
        num_slots=st.sampled_from([0, 0, 1, 2]),
        num_snapshots=st.integers(0, 3),
        prefix=st.booleans(),
    )
    def begin(self, num_pages: int, num_slots: int, num_snapshots: int, prefix: bool) -> None:
        self.cache = Cache(
            num_pages=num_pages,
            page_tokens=PAGE,
            num_slots=num_slots,
            num_snapshots=num_snapshots if num_slots else 0,
            prefix=prefix,
        )
        self.states: dict[int, tuple[int, ...]] = {}  # by snapshot unit: the tokens whose state it holds
        self.rows = {page: [()] * PAGE for page in range(num_pages)}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def open(self, tokens: list[int]) -> None:
        holding = self.cache.open(tokens)
        assert holding.num_cached < len(tokens)
        assert holding.num_cached == PAGE * len(holding.pages) <= holding.num_matched
        if self.cache.num_slots and holding.num_cached:
            assert self.states[holding.snapshot] == tuple(tokens[: holding.num_cached])
        self.live.append(Request(tokens, holding, num_done=holding.num_cached))

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0), upto=st.integers(0, 14))
    def grow(self, pick: int, upto: int) -> None:
        request = self.live[pick % len(self.live)]
        if request.quarantined:
            with pytest.raises(InvariantError, match="quarantined"):
                self.cache.grow(request.holding, upto)
            return
        cache, pages, slot = self.cache, list(request.holding.pages), request.holding.slot
        needed = max(0, -(-upto // PAGE) - len(pages))
        can = needed <= cache.num_free + cache.num_evictable and (
            slot is not None or not cache.num_slots or cache.num_free_slots > 0
        )
        before = (cache.num_free, cache.num_evictable, cache.num_free_slots)
        assert cache.grow(request.holding, upto) == can
        if can:
            assert request.holding.pages[: len(pages)] == pages
            assert len(request.holding.pages) == len(pages) + needed
            assert (request.holding.slot is None) == (cache.num_slots == 0)
        else:
            assert (cache.num_free, cache.num_evictable, cache.num_free_slots) == before
            assert (request.holding.pages, request.holding.slot) == (pages, slot)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0), num=st.integers(1, 6))
    def compute(self, pick: int, num: int) -> None:
        """Write the rows of the next tokens, as an engine or a peer would."""
        request = self.live[pick % len(self.live)]
        room = PAGE * len(request.holding.pages)
        while num and not request.quarantined and request.num_done < min(len(request.tokens), room):
            page, row = request.holding.pages[request.num_done // PAGE], request.num_done % PAGE
            request.num_done += 1
            self.rows[page][row] = tuple(request.tokens[: request.num_done])
            num -= 1

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0), token=st.integers(0, 1))
    def generate(self, pick: int, token: int) -> None:
        self.live[pick % len(self.live)].tokens.append(token)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0))
    def publish(self, pick: int) -> None:
        request = self.live[pick % len(self.live)]
        if not request.quarantined:
            self.cache.publish(request.holding, request.tokens, request.num_done)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0), keep=st.booleans())
    def snapshot(self, pick: int, keep: bool) -> None:
        """Slot state is copied at the published end, so that models with slots have matches too."""
        request = self.live[pick % len(self.live)]
        upto = request.holding.path.depth * PAGE
        unit = self.cache.reserve_snapshot() if upto and not request.quarantined else None
        if unit is None:
            return
        assert unit >= self.cache.num_slots
        self.states[unit] = tuple(request.tokens[:upto])
        if keep:
            self.cache.keep_snapshot(request.holding, upto, unit)
        else:
            self.cache.drop_snapshot(unit)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0))
    def quarantine(self, pick: int) -> None:
        request = self.live[pick % len(self.live)]
        self.cache.quarantine(request.holding)
        request.quarantined = True

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0))
    def release(self, pick: int) -> None:
        request = self.live.pop(pick % len(self.live))
        self.cache.release(request.holding)
        with pytest.raises(InvariantError, match="released"):
            self.cache.release(request.holding)

    @rule()
    def flush(self) -> None:
        evictable, free = self.cache.num_evictable, self.cache.num_free
        assert self.cache.flush() == evictable
        assert (self.cache.num_evictable, self.cache.num_free) == (0, free + evictable)

    @invariant()
    def every_unit_has_one_place(self) -> None:
        self.cache.check(request.holding for request in self.live)

    @invariant()
    def rows_of_the_living_are_intact(self) -> None:
        """Also those of the quarantined, and of shared prefixes: nobody wrote over a page that is in use."""
        for request in self.live:
            for i in range(request.num_done):
                page = request.holding.pages[i // PAGE]
                assert self.rows[page][i % PAGE] == tuple(request.tokens[: i + 1])

    def teardown(self) -> None:
        for request in self.live:
            self.cache.release(request.holding)
        if hasattr(self, "cache"):
            self.cache.flush()
            self.cache.check([])
            assert self.cache.num_free == self.cache.num_pages


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


def _finished(cache: Cache, tokens: list[int]) -> None:
    holding = cache.open(tokens)
    assert cache.grow(holding, len(tokens))
    cache.publish(holding, tokens, len(tokens))
    cache.release(holding)


def test_the_second_request_finds_the_prefix_but_never_all_of_it() -> None:
    cache = Cache(num_pages=8, page_tokens=4)
    _finished(cache, list(range(8)))
    assert cache.open(list(range(8))).num_cached == 4
    assert cache.open([*range(8), 99]).num_cached == 8
    assert cache.open([*range(4), 99]).num_cached == 4
    assert cache.open([5, 6, 7, 8, 9]).num_cached == 0
    assert (cache.num_asked_tokens, cache.num_hit_tokens) == (8 + 8 + 9 + 5 + 5, 0 + 4 + 8 + 4 + 0)


def test_a_prompt_is_one_run_of_pages() -> None:
    cache = Cache(num_pages=32, page_tokens=4)
    other = cache.open([9])
    assert cache.grow(other, 1)
    holding = cache.open(list(range(40)))
    assert cache.grow(holding, 20)
    assert cache.grow(holding, 40)
    first = holding.pages[0]
    assert holding.pages == list(range(first, first + 10))


def test_the_same_prompt_twice_at_once_loses_no_page() -> None:
    cache = Cache(num_pages=8, page_tokens=4)
    tokens = list(range(9))
    one, two = cache.open(tokens), cache.open(tokens)
    assert cache.grow(one, 9)
    assert cache.grow(two, 9)
    pages = list(two.pages)
    cache.publish(one, tokens, 9)
    cache.publish(two, tokens, 9)
    assert two.pages == pages  # steps already planned name them
    cache.check([one, two])
    cache.release(one)
    cache.check([two])
    cache.release(two)
    cache.check([])
    assert (cache.num_free, cache.num_cached) == (6, 2)


def test_publishing_goes_on_below_a_page_that_another_published() -> None:
    cache = Cache(num_pages=9, page_tokens=2)
    one, two = cache.open([1, 2, 3, 4]), cache.open([1, 2, 5, 6])
    assert cache.grow(one, 4)
    assert cache.grow(two, 4)
    cache.publish(one, [1, 2, 3, 4], 4)
    cache.publish(two, [1, 2, 5, 6], 4)
    third = cache.open([1, 2, 5, 6, 7])
    assert third.pages == [one.pages[0], two.pages[1]]
    cache.check([one, two, third])


def test_grow_evicts_what_nobody_uses_but_not_in_vain() -> None:
    cache = Cache(num_pages=4, page_tokens=2)
    _finished(cache, [1, 2, 3, 4])
    holding = cache.open([9] * 10)
    assert not cache.grow(holding, 10)
    assert cache.num_evictable == 2
    assert cache.grow(holding, 8)
    assert (cache.num_free, cache.num_cached, cache.num_evicted) == (0, 0, 2)


def test_decode_side_of_a_handoff() -> None:
    """A hit of its own, rows for the rest from a peer, and then others may reuse them."""
    cache = Cache(num_pages=16, page_tokens=4)
    prompt = list(range(30))
    _finished(cache, prompt[:8])
    holding = cache.open(prompt)
    assert holding.num_cached == 8
    assert cache.grow(holding, len(prompt))
    (offered,) = cache.units(holding, holding.num_cached, len(prompt))
    assert offered == Units(Kind.PAGE, tuple(holding.pages[2:]), 2, 8, 30)
    assert set(offered.ids) <= holding.own  # the peer writes to no page that others may read
    cache.publish(holding, prompt, len(prompt))
    assert cache.open(prompt).num_cached == 28


def test_units_of_a_chunk_inside_pages() -> None:
    cache = Cache(num_pages=8, page_tokens=4, num_slots=2)
    holding = cache.open(list(range(20)))
    assert cache.grow(holding, 20)
    pages, slot = cache.units(holding, 5, 13)
    assert pages == Units(Kind.PAGE, tuple(holding.pages[1:4]), 1, 5, 13)
    assert slot == Units(Kind.SLOT, (holding.slot,), 0, 5, 13)
    with pytest.raises(InvariantError, match="units of tokens"):
        cache.units(holding, 0, 21)


def test_slots_come_with_the_first_growth_or_nothing_does() -> None:
    cache = Cache(num_pages=8, page_tokens=4, num_slots=1)
    one, two = cache.open([1]), cache.open([2])
    assert cache.grow(one, 1)
    assert not cache.grow(two, 1)
    assert (one.slot, two.slot, two.pages) == (0, None, [])
    cache.release(one)
    assert cache.grow(two, 1)
    assert two.slot == 0


def test_with_slots_a_prefix_without_snapshot_is_no_hit() -> None:
    cache = Cache(num_pages=8, page_tokens=4, num_slots=2, num_snapshots=1)
    tokens = list(range(13))
    holding = cache.open(tokens)
    assert cache.grow(holding, 13)
    cache.publish(holding, tokens, 8)
    assert cache.open(tokens).num_cached == 0
    unit = cache.reserve_snapshot()
    assert unit == 2
    cache.keep_snapshot(holding, 8, unit)
    cache.publish(holding, tokens, 12)
    found = cache.open(tokens)
    assert (found.num_cached, found.num_matched, found.snapshot) == (8, 12, 2)
    assert cache.open(tokens, computes=False).num_cached == 12  # a peer writes the slot


def test_the_least_recently_used_snapshot_goes() -> None:
    cache = Cache(num_pages=8, page_tokens=2, num_slots=2, num_snapshots=2)
    tokens = list(range(9))
    holding = cache.open(tokens)
    assert cache.grow(holding, 9)
    cache.publish(holding, tokens, 8)
    for upto in (2, 4):
        unit = cache.reserve_snapshot()
        assert unit is not None
        cache.keep_snapshot(holding, upto, unit)
    assert cache.open(tokens[:4]).num_cached == 2  # used after the other
    unit = cache.reserve_snapshot()
    assert unit is not None
    cache.keep_snapshot(holding, 8, unit)
    assert cache.open(tokens[:7]).num_cached == 2
    assert cache.open(tokens).num_cached == 8
    assert [cache.reserve_snapshot() is None for _ in range(3)] == [
        False,
        False,
        True,
    ]  # all are being written


def test_quarantined_pages_are_counted_apart_until_release() -> None:
    cache = Cache(num_pages=8, page_tokens=4)
    holding = cache.open(list(range(10)))
    assert cache.grow(holding, 10)
    cache.publish(holding, list(range(10)), 4)
    cache.quarantine(holding)
    cache.quarantine(holding)
    assert (cache.num_quarantined, cache.num_evictable, cache.num_free) == (2, 0, 5)
    cache.check([holding])
    with pytest.raises(InvariantError, match="publish of a holding that is quarantined"):
        cache.publish(holding, list(range(10)), 8)
    cache.release(holding)
    assert (cache.num_quarantined, cache.num_evictable, cache.num_free) == (0, 1, 7)


def test_check_names_leaked_pages_and_slots() -> None:
    cache = Cache(num_pages=8, page_tokens=4, num_slots=2)
    holding = cache.open(list(range(8)))
    assert cache.grow(holding, 8)
    with pytest.raises(InvariantError, match=r"2 of 8 pages leaked, nobody has them: \[0, 1\]"):
        cache.check([])
    holding.own.clear()
    holding.pages.clear()
    with pytest.raises(InvariantError, match=r"2 of 8 pages leaked"):
        cache.check([holding])


def test_check_names_shared_pages() -> None:
    cache = Cache(num_pages=8, page_tokens=4)
    one, two = cache.open([1]), cache.open([2])
    assert cache.grow(one, 1)
    assert cache.grow(two, 1)
    two.own.add(one.pages[0])
    with pytest.raises(InvariantError, match=r"page 0 of 8 is shared.*own of holding 0, own of holding 1"):
        cache.check([one, two])


def test_check_finds_a_holding_that_forgot_to_release_its_prefix() -> None:
    cache = Cache(num_pages=8, page_tokens=4)
    _finished(cache, list(range(8)))
    cache.open(list(range(8)))
    with pytest.raises(InvariantError, match="locked 1 times for 0 holdings"):
        cache.check([])


def test_publishing_more_than_was_grown_is_an_error() -> None:
    cache = Cache(num_pages=8, page_tokens=4)
    holding = cache.open(list(range(8)))
    assert cache.grow(holding, 4)
    with pytest.raises(InvariantError, match="has 1 pages"):
        cache.publish(holding, list(range(8)), 8)
