"""The loop between two looks at a handoff: it does nothing that could wait."""

from __future__ import annotations

from typing import Any

import zmq

from splitserve import wire
from splitserve.engine.channel import Ranks
from splitserve.engine.lifetimes import Lifetimes
from splitserve.engine.limits import Limits
from splitserve.engine.loop import HANDOFF_POLL_S, Loop
from splitserve.engine.scheduler import Scheduler
from splitserve.kv.cache import Cache


class Link:
    """The server's end."""

    def __init__(self) -> None:
        self.socket = zmq.Context.instance().socket(zmq.PAIR)
        self.sent: list[Any] = []

    def receive(self) -> list[Any]:
        return []

    def send(self, message: Any) -> None:
        self.sent.append(message)


class Controls:
    """Figures that are others each time they are asked for."""

    lifetimes = Lifetimes()

    def __init__(self) -> None:
        self.asked = 0

    def load(self) -> wire.Load:
        self.asked += 1
        return wire.Load(self.asked, 0, 0, 0, 0, 0, {})


class Handoffs:
    """A Transfers that has nothing to say."""

    due = HANDOFF_POLL_S

    def feed(self, events: Any) -> None: ...

    def poll(self, now: float) -> None: ...

    def follow(self, *decided: Any) -> None: ...

    def fds(self) -> set[int]:
        return set()

    def patience(self, now: float, poll_s: float) -> float:
        return self.due


def test_the_load_is_told_before_a_long_sleep_and_not_between_two_looks_at_a_handoff() -> None:
    """Adding it up took most of the time between them, while a handoff's end waited to be seen."""
    controls, link, handoffs = Controls(), Link(), Handoffs()
    loop = Loop(
        link,  # type: ignore[arg-type]
        Scheduler(Cache(num_pages=4, page_tokens=4), Limits(max_len=16, max_seqs=1, step_tokens=8)),
        runner=None,  # type: ignore[arg-type]
        ranks=Ranks("", "x", 1),
        transfers=handoffs,  # type: ignore[arg-type]
        controls=controls,  # type: ignore[arg-type]
        clock=lambda: 0.05,  # within LOAD_INTERVAL_S of the beginning
    )
    for _ in range(5):
        assert not loop.turn()
        loop._wait(idle=True)
    assert controls.asked == 0
    handoffs.due = 0.002
    loop._wait(idle=True)
    assert [m.num_running for m in link.sent] == [1]
