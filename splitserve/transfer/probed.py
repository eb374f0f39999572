"""What the fabric doctor measured of each link, and whether a write was much slower than that. Pure: told the time.

    probed = "0-1/65536=1.2/16777216=2.9"     rank 0 to the peer's rank 1: GB/s by bytes written at once

A write is judged by the least time that it certainly took: from its posting to the last look that saw it unfinished.
Who computes between two looks learns late that a write has ended; that is no fault of the link.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from splitserve.errors import ConfigError
from splitserve.transfer.events import SlowWrite
from splitserve.transfer.transport import Slow

SLOW = 4.0
"""Times the probe's time from which on a write is slow."""

PIECE_S = 8e-6
"""What NIXL takes for each piece of a write beyond the first: 7-8 us on an H200 with NIXL 1.5.1. The probe's writes are
one piece, a handoff's may be thousands.
"""

Pair = tuple[int, int]
"""(rank here, rank of the peer)."""


def probed_word(rank: int, peer: int, sizes: Mapping[int, float]) -> str:
    """One link as TransferConfig.probed has it; `sizes` are GB/s by bytes."""
    return "/".join([f"{rank}-{peer}", *(f"{size}={rate:.4g}" for size, rate in sorted(sizes.items()))])


def parse(words: Sequence[str]) -> dict[Pair, dict[int, float]]:
    """The inverse. ConfigError for a word that says no link or no positive rate."""
    found = {}
    for word in words:
        pair, *sizes = word.split("/")
        try:
            rank, _, peer = pair.partition("-")
            rates = {int(size): float(rate) for size, _, rate in (s.partition("=") for s in sizes)}
            if not rates or min(*rates, *rates.values()) <= 0:
                raise ValueError
            found[int(rank), int(peer)] = rates
        except ValueError:
            raise ConfigError(
                f"[transfer] probed has {word!r}",
                field="probed",
                fix="leave it out: `up` fills it in from `splitserve doctor --fabric FILE`",
            ) from None
    return found


def expected_s(sizes: Mapping[int, float], nbytes: int, pieces: int = 1) -> float:
    """Seconds that `nbytes` in `pieces` runs should take: at the slower of the rates of the sizes around it, as long
    as the least, and some for each piece more."""
    known = sorted(sizes)
    at = bisect_right(known, nbytes)
    rate = min(sizes[size] for size in known[max(0, at - 1) : at + 1])
    return max(nbytes, known[0]) / rate / 1e9 + PIECE_S * (pieces - 1)


@dataclass
class _Flight:
    peer: str
    pair: Pair
    queued: int  # its bytes and those under way when it was posted
    nbytes: int
    pieces: int
    queued_pieces: int
    posted: float
    unfinished: float  # when it was last seen under way


class Expectations:
    """The writes of one rank under way, against what its links can do."""

    def __init__(self, rank: int, words: Sequence[str]) -> None:
        """ConfigError for words that cannot be read."""
        self._rank = rank
        self._sizes = parse(words)
        self._flights: dict[int, _Flight] = {}

    def posted(
        self, number: int, peer: str, peer_rank: int, nbytes: int, now: float, *, pieces: int = 1
    ) -> None:
        """Write `number` has begun. Those without bytes, and over links that nobody measured, are not judged."""
        pair = (self._rank, peer_rank)
        if nbytes and pair in self._sizes:
            queued = nbytes + sum(f.nbytes for f in self._flights.values())
            before = sum(f.pieces for f in self._flights.values())
            self._flights[number] = _Flight(peer, pair, queued, nbytes, pieces, pieces + before, now, now)

    def looked(self, ended: Sequence[int], broken: Sequence[int], now: float) -> list[Slow]:
        """One look at all writes: which have ended, which never will. Returns the slow ones among those that ended."""
        slow = []
        for number in broken:
            self._flights.pop(number, None)
        for number in ended:
            flight = self._flights.pop(number, None)
            if flight is not None and (found := self._judge(flight)) is not None:
                slow.append(found)
        for flight in self._flights.values():
            flight.unfinished = now
        return slow

    @property
    def num_flying(self) -> int:
        """Writes under way that will be judged."""
        return len(self._flights)

    def _judge(self, flight: _Flight) -> Slow | None:
        took = flight.unfinished - flight.posted
        usual = expected_s(self._sizes[flight.pair], flight.queued, flight.queued_pieces)
        if took <= SLOW * usual:
            return None
        return Slow(flight.peer, flight.queued / took / 1e9, flight.queued / usual / 1e9)


class SlowPairs:
    """Slow writes by pair of ranks, and which of them a person should hear of: the 1st, 10th, 100th ... of a pair."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, slow: SlowWrite) -> str:
        """Count one; what to warn of, or ""."""
        pair = f"{_name(slow.source)} to {_name(slow.peer)}"
        count = self.counts[pair] = self.counts.get(pair, 0) + 1
        if count != 10 ** (len(str(count)) - 1):
            return ""
        return (
            f"state from {pair} crossed at {slow.rate:.3g} GB/s or less, the fabric probe had {slow.usual:.3g}"
            f" (slow writes of this pair so far: {count}); `splitserve doctor --fabric FILE` measures again"
        )


def _name(agent: str) -> str:
    """ "decode-0 rank 1" of "decode-0-0123456789ab.1": names of lives would make a figure of their own each."""
    life, _, rank = agent.rpartition(".")
    return f"{life.rpartition('-')[0] or life} rank {rank}"
