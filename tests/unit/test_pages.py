"""The page allocator: never a page twice, always whole runs where there are any."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.errors import InvariantError
from splitserve.kv.pages import Pages


@given(
    st.integers(0, 24),
    st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.integers(0, 10**6)), max_size=40),
)
def test_against_a_set(count: int, steps: list[tuple[int, bool, int]]) -> None:
    pages, free, held = Pages(count), set(range(count)), []
    for num, grows, pick in steps:
        if grows:
            taken = pages.take(num, after=held[pick % len(held)] if held else None)
            assert (taken is None) == (num > len(free))
            if taken is not None:
                assert len(taken) == len(set(taken)) == num
                assert set(taken) <= free
                free -= set(taken)
                held += taken
        else:
            back = [held.pop(pick % len(held)) for _ in range(min(num, len(held)))]
            pages.give(back)
            free |= set(back)
        pages.check()
        assert pages.free_pages() == sorted(free)
        assert pages.num_free == len(free)


def _with_free(count: int, *free: int) -> Pages:
    pages = Pages(count)
    pages.take(count)
    pages.give(free)
    return pages


def test_one_run_where_one_fits() -> None:
    assert _with_free(20, 1, 2, 5, 6, 7, 8, 12, 13, 14).take(3) == [12, 13, 14]  # best fit: not 5 to 8


def test_the_largest_runs_where_none_fits() -> None:
    assert _with_free(20, 1, 2, 5, 6, 7, 12).take(5) == [5, 6, 7, 1, 2]


def test_a_holding_goes_on_behind_its_last_page() -> None:
    pages = Pages(20)
    first = pages.take(3)
    assert first == [0, 1, 2]
    assert pages.take(4, after=2) == [3, 4, 5, 6]
    pages.give([4])
    assert pages.take(2, after=3) == [4, 7]


def test_given_back_pages_become_one_run_again() -> None:
    pages = Pages(6)
    pages.take(6)
    for page in (0, 2, 4, 1, 5, 3):
        pages.give([page])
    assert pages.num_runs == 1


@pytest.mark.parametrize("page", [3, 99, -1])
def test_a_page_cannot_be_given_back_twice(page: int) -> None:
    pages = Pages(6)
    pages.take(3)
    with pytest.raises(InvariantError, match=f"page {page} of 6"):
        pages.give([page])


def test_nothing_is_taken_when_too_little_is_free() -> None:
    pages = Pages(4)
    assert pages.take(5) is None
    assert pages.num_free == 4
    assert pages.take(0) == []


def test_check_finds_a_page_in_two_places() -> None:
    pages = Pages(4)
    pages.take(2)
    pages._is_free[0] = 1
    with pytest.raises(InvariantError, match=r"pages \[0\]"):
        pages.check()
