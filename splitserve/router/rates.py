"""Tokens per second of one engine, from totals that it tells now and then. Pure: told the time.

A total that has shrunk belongs to a new life of the engine: what came before no longer counts.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
"""Over which a rate is taken: long enough for totals that come once a second, short enough to see a load begin."""


class Rate:
    """One total."""

    __slots__ = ("_told",)

    def __init__(self) -> None:
        self._told: deque[tuple[float, int]] = deque()

    def tell(self, total: int, now: float) -> None:
        """The total at a time, which never goes back."""
        if self._told and total < self._told[-1][1]:
            self._told.clear()
        self._told.append((now, total))
        while len(self._told) > 2 and now - self._told[1][0] >= WINDOW_S:
            self._told.popleft()

    @property
    def per_s(self) -> float:
        """Over the window as far as it was told; 0.0 before there are two tellings."""
        if len(self._told) < 2:
            return 0.0
        (begun, first), (ended, last) = self._told[0], self._told[-1]
        return (last - first) / (ended - begun) if ended > begun else 0.0
