"""Every order of events of two sides, and proof that the walk would notice: faults planted in copies of the tables.

The walk alone proves little, since a weak walk passes too. So each transition and each action of both tables is taken
out in turn, some transitions are bent, some conditions beside the tables are broken, and the walk must fail each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from handoff_walk import Walk, walk
from handoff_world import Scenario

from splitserve.errors import ProtocolError, SplitserveError
from splitserve.transfer.handoff import RECEIVER, SENDER, Action, Rx, Tx
from splitserve.transfer.incoming import Incoming
from splitserve.transfer.ledger import Ledger
from splitserve.transfer.outgoing import Outgoing

SCENARIOS = {
    "nothing goes wrong": Scenario(),
    "one failure": Scenario(failures=1),
    "two failures": Scenario(failures=2, chunks=1),
    "writes break": Scenario(breaks=2, failures=1, chunks=1),
    "prefill dies": Scenario(prefill_dies=True, failures=1, chunks=1),
    "decode dies": Scenario(decode_dies=True, failures=1, ranks=1, chunks=1),
    "silence and fencing": Scenario(silences=3, failures=1, ranks=1, chunks=1),
    "silence and death": Scenario(silences=1, prefill_dies=True, decode_dies=True, ranks=1, chunks=1),
    "prefill stops": Scenario(prefill_stops=True, ranks=2, chunks=1),
    "decode stops": Scenario(decode_stops=True, failures=1, ranks=1, chunks=2),
    "slow fencing": Scenario(silences=2, time=True, ranks=1, chunks=1),
    "offered again": Scenario(offers=2, failures=1, breaks=1, ranks=1, chunks=1),
    "offered again, two ranks": Scenario(offers=2, chunks=1),
    "offered again, two chunks": Scenario(offers=2, ranks=1),
    "offered again, decode dies": Scenario(offers=2, failures=1, decode_dies=True, ranks=1, chunks=1),
    "notes come twice": Scenario(duplicates=1, failures=1, chunks=1),
    "notes are lost": Scenario(lost_notes=2, failures=1, chunks=1),
    "a silence and a lost note": Scenario(lost_notes=1, silences=1, ranks=1, chunks=1),
    "half a request": Scenario(no_request=True, losses=1, failures=1, chunks=1),
    "a message is lost": Scenario(losses=1, failures=1, chunks=1),
    "messages are lost": Scenario(losses=2, failures=1, ranks=1, chunks=1),
    "digests differ": Scenario(digests=True, wrong=True, failures=1, silences=1, chunks=1),
    "digests, prefill dies": Scenario(digests=True, prefill_dies=True, ranks=1, chunks=1),
    "time passes at any moment": Scenario(time=True, failures=1, ranks=1, chunks=1),
}


@cache
def walked(name: str) -> Walk:
    return walk(SCENARIOS[name])


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_rows_are_lost_shared_or_released_under_a_write(name: str) -> None:
    seen = walked(name)
    assert seen.states > 20
    assert SCENARIOS[name].no_request or (str(Tx.SENT), str(Rx.DONE)) in seen.ends


def test_every_entry_of_the_tables_happens_in_some_scenario() -> None:
    used = set().union(*(walked(name).events for name in SCENARIOS))
    entries = {
        (str(state), event) for table in (SENDER, RECEIVER) for state, row in table.items() for event in row
    }
    assert entries == used


def test_a_stopped_sender_ends_in_fencing_or_in_a_drained_quarantine() -> None:
    assert (str(Tx.FAILED), str(Rx.FAILED)) in walked("silence and fencing").ends  # it came back and drained
    assert (str(Tx.SENDING), str(Rx.FAILED)) in walked("prefill stops").ends  # it was killed in mid-handoff


# ------------------------------------------------------------------ planted faults

HARMLESS = {
    # Cancel came and its offer never did: that Cancel will be repeated, and FAILED answers it
    ("sender", "holding", "cancel", "tell_drained"),
    # its process is about to be killed: asking it again only saves time
    ("receiver", "fencing", "again", "tell_cancel"),
}
"""Faults that break no promise, with the reason."""


def mutants() -> Iterator[tuple[str, str, str, str]]:
    """(side, state, event, what is taken out: an action, or "" for the transition itself)"""
    for side, table in (("sender", SENDER), ("receiver", RECEIVER)):
        for state, row in table.items():
            for event, (_, actions) in row.items():
                yield side, str(state), event, ""
                for action in dict.fromkeys(actions):
                    yield side, str(state), event, action


def mutated(side: str, state: str, event: str, *, without: str = "", to: object = None) -> dict[str, object]:
    """Tables for `walk`, one of them with a fault."""
    table = {s: dict(row) for s, row in (SENDER if side == "sender" else RECEIVER).items()}
    row = table[(Tx if side == "sender" else Rx)(state)]
    then, actions = row.pop(event)
    if without or to:
        row[event] = (to or then, tuple(a for a in actions if a != without))
    return {side: table}


def catchers(state: str, event: str) -> list[str]:
    """Scenarios in which this entry is used, cheapest first."""
    using = [name for name in SCENARIOS if (state, event) in walked(name).events]
    return sorted(using, key=lambda name: walked(name).states)


def caught(state: str, event: str, **planted: object) -> bool:
    for name in catchers(state, event):
        try:
            walk(SCENARIOS[name], **planted)  # type: ignore[arg-type]
        except (AssertionError, SplitserveError):
            return True
    return False


@pytest.mark.parametrize("mutant", [m for m in mutants() if m not in HARMLESS], ids=" ".join)
def test_a_table_with_something_taken_out_is_caught(mutant: tuple[str, str, str, str]) -> None:
    side, state, event, without = mutant
    assert caught(state, event, **mutated(side, state, event, without=without))


BENT = [
    ("sender", Tx.SENDING, "cancel", Tx.FAILED),  # as if nothing could be in flight
    ("sender", Tx.SENDING, "fail", Tx.FAILED),
    ("sender", Tx.SENDING, "broken", Tx.SENDING),  # as if a broken write did not matter
    ("sender", Tx.SENDING, "written", Tx.SENT),  # as if one write were all
    ("receiver", Rx.OFFERED, "fail", Rx.FAILED),  # as if nobody could still write
    ("receiver", Rx.OFFERED, "cancel", Rx.FAILED),
    ("receiver", Rx.OFFERED, "refused", Rx.FAILED),
    ("receiver", Rx.OFFERED, "silent", Rx.FAILED),
    ("receiver", Rx.OFFERED, "all_noted", Rx.DONE),  # without comparing
    ("receiver", Rx.QUARANTINE, "refused", Rx.FAILED),
    ("receiver", Rx.FENCING, "silent", Rx.FAILED),  # as if asking were killing
]


@pytest.mark.parametrize(("side", "state", "event", "to"), BENT)
def test_a_transition_to_the_wrong_state_is_caught(
    side: str, state: Tx | Rx, event: str, to: Tx | Rx
) -> None:
    assert caught(str(state), event, **mutated(side, str(state), event, to=to))


class DrainsBrokenWrites(Outgoing):
    """Says drained although bytes of a broken write may still be under way."""

    def _expand(self, names: tuple[str, ...], generation: int | None = None) -> list[Action]:
        tainted, self.tainted = self.tainted, set()
        try:
            return super()._expand(names, generation)
        finally:
            self.tainted = tainted


class ForgetsOldGenerations(Outgoing):
    """Never says that the writes of a replaced offer have ended."""

    def _on(self, event: str) -> list[Action]:
        self.superseded.clear()
        return super()._on(event)


class DrainsOldGenerationsEarly(Outgoing):
    """Says drained for a replaced offer while its writes are in flight."""

    def _on(self, event: str) -> list[Action]:
        early, self.superseded = sorted(self.superseded), set()
        return [a for g in early for a in self._expand(("tell_drained",), g)] + super()._on(event)


class CountsOneRankOnly(Outgoing):
    """Takes the first source rank's writes for all."""

    def ended(
        self, generation: int, chunk: int, rank: int, *, error: SplitserveError | None = None
    ) -> list[Action]:
        self.flying = {w for w in self.flying if w[2] == rank or w[:2] != (generation, chunk)}
        return super().ended(generation, chunk, rank, error=error) if self.flying else []


class TakesOldNotes(Incoming):
    """Counts notes of a replaced offer as if they were of this one."""

    def noted(self, dst_rank: int, note: object, *, now: float) -> list[Action]:
        from msgspec.structs import replace

        return super().noted(dst_rank, replace(note, generation=self.generation), now=now)  # type: ignore[type-var]


class IgnoresOldGenerations(Incoming):
    """Admits although a replaced offer's writes may still land."""

    def offer(self) -> list[Action]:
        self.undrained.clear()
        return super().offer()


class _Hasty(Ledger):
    """Takes a link for whole as soon as its last chunk is noted."""

    def _whole(self, pair: tuple[int, int]) -> bool:
        return any(n.last for n in self._notes.get(pair, {}).values())

    def wrong(self) -> str | None:
        return None


class TrustsTheLastNote(Incoming):
    def offer(self) -> list[Action]:
        actions = super().offer()
        self.ledger = _Hasty()
        return actions


class _OneRank(Ledger):
    """Waits for source rank 0 only."""

    def all_noted(self) -> bool:
        return self.expected is not None and self._whole((0, 0))


class WaitsForOneRank(Incoming):
    def offer(self) -> list[Action]:
        actions = super().offer()
        self.ledger = _OneRank()
        return actions


class BelievesDeathAtOnce(Incoming):
    """Does not tell a silence from a death."""

    def silent(self, error: SplitserveError, *, now: float) -> list[Action]:
        return self.dead(error, now=now)


CONDITIONS = [
    (DrainsBrokenWrites, "writes break"),
    (ForgetsOldGenerations, "offered again, two ranks"),
    (DrainsOldGenerationsEarly, "offered again, two ranks"),
    (CountsOneRankOnly, "nothing goes wrong"),
    (TakesOldNotes, "offered again, two ranks"),
    (IgnoresOldGenerations, "offered again, two ranks"),
    (TrustsTheLastNote, "nothing goes wrong"),
    (WaitsForOneRank, "nothing goes wrong"),
    (BelievesDeathAtOnce, "silence and fencing"),
]


@pytest.mark.parametrize(("side", "scenario"), CONDITIONS, ids=lambda x: getattr(x, "__name__", x))
def test_a_broken_condition_is_caught(side: type, scenario: str) -> None:
    planted = {"outgoing" if issubclass(side, Outgoing) else "incoming": side}
    with pytest.raises((AssertionError, ProtocolError)):
        walk(SCENARIOS[scenario], **planted)  # type: ignore[arg-type]
