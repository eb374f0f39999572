"""Visits every moment that a World can reach, and notes which entries of the tables were used on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from handoff_moves import moves
from handoff_world import Scenario, World

from splitserve.transfer.handoff import RECEIVER, SENDER
from splitserve.transfer.incoming import Incoming
from splitserve.transfer.outgoing import Outgoing


@dataclass
class Walk:
    """What an exhaustive walk has seen."""

    states: int = 0
    ends: set[tuple[str, str]] = field(default_factory=set)
    events: set[tuple[str, str]] = field(default_factory=set)  # (state, event) of the tables that were used


def walk(
    scenario: Scenario,
    *,
    sender: object = SENDER,
    receiver: object = RECEIVER,
    outgoing: Callable[..., Outgoing] = Outgoing,
    incoming: Callable[..., Incoming] = Incoming,
) -> Walk:
    """Every reachable moment of a scenario. AssertionError or ProtocolError at the first that breaks a promise."""
    result = Walk()
    start = World(
        scenario,
        outgoing(num_ranks=scenario.ranks, lease_s=1.0, table=_Traced(sender, result.events)),
        incoming(
            deadline=1.0, gap_s=0.5, deadline_s=10.0, again_s=1.0, table=_Traced(receiver, result.events)
        ),
    )
    numbers, todo = {start.key(): 0}, [(0, start)]
    before: list[list[int]] = [[]]  # for each moment, those it can follow
    ends = []
    while todo:
        number, world = todo.pop()
        result.states += 1
        choices = moves(world)
        if not choices:
            world.check_end()
            result.ends.add((str(world.tx.state), str(world.rx.state)))
            ends.append(number)
        for move in choices:
            after = world.go(move)
            key = after.key()
            if key not in numbers:
                numbers[key] = len(before)
                before.append([])
                todo.append((numbers[key], after))
            before[numbers[key]].append(number)
    _check_every_moment_ends(before, ends)
    return result


def _check_every_moment_ends(before: list[list[int]], ends: list[int]) -> None:
    """From everywhere some end can be reached: no going round for ever."""
    can, todo = set(ends), list(ends)
    while todo:
        for number in before[todo.pop()]:
            if number not in can:
                can.add(number)
                todo.append(number)
    assert len(can) == len(before), f"{len(before) - len(can)} of {len(before)} moments never end"


class _Traced(dict):  # type: ignore[type-arg]
    """A table that notes which of its entries are used."""

    def __init__(self, table: object, used: set[tuple[str, str]]) -> None:
        super().__init__({s: _Row(str(s), row, used) for s, row in table.items()})  # type: ignore[attr-defined]


class _Row(dict):  # type: ignore[type-arg]
    def __init__(self, state: str, row: object, used: set[tuple[str, str]]) -> None:
        super().__init__(row)
        self._state, self._used = state, used

    def __getitem__(self, event: str) -> object:
        value = super().__getitem__(event)
        self._used.add((self._state, event))
        return value
