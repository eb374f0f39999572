"""Stop strings over a text that comes in pieces: held back while they may be one, never leaked. Pure state, no I/O.

Of several stops the one that is complete first ends the text (of those, the one that began first), so that the
result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Released:
    """Text that no later piece can turn into a stop, and the stop that ended it, if one did."""

    text: str
    matched: str | None = None


class StopStrings:
    """`held` is the text taken in and not given out; passing it to a new object continues where this one is."""

    def __init__(self, stops: Sequence[str], *, held: str = "", keep: bool = False) -> None:
        self.stops = tuple(stops)
        self.held = held
        self._keep = keep  # leave the stop itself in the text
        self._longest = max((len(s) for s in stops), default=0)

    def feed(self, text: str) -> Released:
        """Take a piece. After a match the rest of the text is dropped and nothing more must be fed."""
        if not self.stops:
            return Released(text)
        if not text:
            return Released("")
        self.held += text
        found = self._first()
        if found is not None:
            end, start, stop = found
            released, self.held = self.held[: end if self._keep else start], ""
            return Released(released, stop)
        keep = self._may_begin()
        cut = len(self.held) - keep
        released, self.held = self.held[:cut], self.held[cut:]
        return Released(released)

    def finish(self) -> str:
        """The text ends without a stop: what was held back is text after all."""
        released, self.held = self.held, ""
        return released

    def _first(self) -> tuple[int, int, str] | None:
        found = [(at + len(s), at, s) for s in self.stops if (at := self.held.find(s)) >= 0]
        return min(found) if found else None

    def _may_begin(self) -> int:
        """Length of the longest end of `held` with which a stop begins."""
        for size in range(min(self._longest - 1, len(self.held)), 0, -1):
            tail = self.held[-size:]
            if any(s.startswith(tail) for s in self.stops):
                return size
        return 0
