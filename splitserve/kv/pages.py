"""Which pages are free: an allocator of unit numbers 0 .. n-1 that keeps runs together. It touches no memory.

A transfer costs per run of pages, not per page, so what a request takes should be few runs:

    take(3, after=6)     free: [7 8] [12 .. 40] [50 51 52]
                         1. the run that begins right after the request's last page            7 8
                         2. for the rest, the smallest free run that holds all of it           50   (not 12)
                         3. where none does, the largest run whole, and again

Costs O(log n) comparisons for each run taken or given back; the list of runs is a sorted array.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from splitserve.errors import InvariantError


class Pages:
    """Free pages as maximal runs. Not thread-safe; one engine loop owns it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.num_free = count
        self._is_free = bytearray(b"\1" * count)
        self._length_at: dict[int, int] = {}  # first page of a free run -> its length
        self._start_before: dict[int, int] = {}  # page after a free run -> its first page
        self._by_length: list[tuple[int, int]] = []  # (length, first page), sorted
        if count:
            self._add_run(0, count)

    def __repr__(self) -> str:
        return f"Pages({self.num_free} of {self.count} free in {len(self._by_length)} runs)"

    @property
    def num_runs(self) -> int:
        """Free runs: how scattered the free pages are."""
        return len(self._by_length)

    def take(self, num: int, *, after: int | None = None) -> list[int] | None:
        """Take `num` pages, in as few runs as best fit finds, or None (and take nothing) when fewer are free.

        `after` is the taker's last page so far; the run that begins behind it is used first.
        """
        if num > self.num_free:
            return None
        taken: list[int] = []
        if after is not None and after + 1 in self._length_at and num:
            taken += self._cut(after + 1, num)
        while len(taken) < num:
            rest = num - len(taken)
            fit = bisect_left(self._by_length, (rest, 0))
            _, start = self._by_length[min(fit, len(self._by_length) - 1)]
            taken += self._cut(start, rest)
        return taken

    def give(self, pages: Iterable[int]) -> None:
        """Give pages back, in any order. Raises InvariantError for a page that is free already or does not exist."""
        run_start = run_stop = -1
        for page in sorted(pages):
            if not 0 <= page < self.count or self._is_free[page]:
                raise InvariantError(
                    f"page {page} of {self.count} was given back but is free or does not exist"
                )
            self._is_free[page] = 1
            self.num_free += 1
            if page != run_stop:
                self._join(run_start, run_stop)
                run_start = page
            run_stop = page + 1
        self._join(run_start, run_stop)

    def free_pages(self) -> list[int]:
        """Every free page, ascending; for checks."""
        return [page for page, free in enumerate(self._is_free) if free]

    def check(self) -> None:
        """Raise InvariantError unless runs, page marks and the counter tell one story."""
        covered = bytearray(self.count)
        for length, start in self._by_length:
            if self._length_at.get(start) != length or self._start_before.get(start + length) != start:
                raise InvariantError(f"free run of {length} pages at {start} is not indexed")
            if start + length in self._length_at:
                raise InvariantError(f"free runs at {start} and {start + length} touch but are not one")
            covered[start : start + length] = b"\1" * length
        if covered != self._is_free:
            wrong = [page for page in range(self.count) if covered[page] != self._is_free[page]]
            raise InvariantError(f"pages {wrong[:8]} are free in one place and taken in another")
        if self._by_length != sorted(self._by_length) or len(self._length_at) != len(self._by_length):
            raise InvariantError("free runs are out of order or indexed twice")
        if self.num_free != sum(covered):
            raise InvariantError(f"{self.num_free} pages counted free, {sum(covered)} are")

    def _cut(self, start: int, most: int) -> list[int]:
        """Take up to `most` pages from the beginning of the free run at `start`."""
        length = self._length_at[start]
        num = min(length, most)
        self._drop_run(start)
        if num < length:
            self._add_run(start + num, length - num)
        self._is_free[start : start + num] = bytes(num)
        self.num_free -= num
        return list(range(start, start + num))

    def _join(self, start: int, stop: int) -> None:
        """Add pages [start, stop) as a free run, grown together with the runs that touch it."""
        if start == stop:
            return
        if stop in self._length_at:
            behind = stop
            stop += self._length_at[behind]
            self._drop_run(behind)
        if start in self._start_before:
            start = self._start_before[start]
            self._drop_run(start)
        self._add_run(start, stop - start)

    def _add_run(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_before[start + length] = start
        insort(self._by_length, (length, start))

    def _drop_run(self, start: int) -> None:
        length = self._length_at.pop(start)
        del self._start_before[start + length]
        del self._by_length[bisect_left(self._by_length, (length, start))]
