"""Between scheduler and handoffs: how long a half may wait, counted from its arrival and from nothing later."""

from __future__ import annotations

from typing import Any

import pytest

from splitserve.engine.limits import Limits
from splitserve.engine.request import Phase, Request
from splitserve.engine.scheduler import Scheduler
from splitserve.engine.step import Sampled, StepResult
from splitserve.engine.transfers import Transfers
from splitserve.errors import DeadlineExceeded
from splitserve.kv.cache import Cache
from splitserve.transfer.events import ReceiveFailed, Released
from splitserve.types import SamplingParams
from splitserve.wire import Room

DEADLINE_S = 6.0


class Half:
    """A sender or receiver that reports what a test puts into `events`, and keeps the deadlines it is given."""

    def __init__(self) -> None:
        self.deadlines: dict[int, float] = {}
        self.events: list[Any] = []

    def admit(self, room: Room) -> None: ...

    def open(self, room: Room, num_tokens: int, *, deadline: float, **_: Any) -> None:
        self.deadlines[room.id] = deadline

    def poll(self, now: float) -> list[Any]:
        found, self.events = self.events, []
        self.deadlines = {k: v for k, v in self.deadlines.items() if Released(k) not in found}
        return found

    def rooms(self) -> set[int]:
        return set(self.deadlines)


class Engine:
    """One seat for any number of decode halves, turned by hand."""

    def __init__(self) -> None:
        cache = Cache(num_pages=16, page_tokens=4)
        self.scheduler = Scheduler(cache, Limits(max_len=40, max_seqs=1, step_tokens=8))
        self.receiver = Half()
        self.transfers = Transfers(
            Half(), self.receiver, ports=None, scheduler=self.scheduler, deadline_s=DEADLINE_S
        )  # type: ignore[arg-type]

    def add(self, number: int, now: float) -> Request:
        room = Room(number, "127.0.0.1", 1)
        sampling = SamplingParams(max_tokens=3)
        req = Request(f"r{number}", [1, 2, 3], 3, sampling, half="decode", room=room)
        self.transfers.start(req, now)
        self.scheduler.add(req, now)
        return req

    def turn(self, now: float) -> None:
        self.transfers.poll(now)
        self.scheduler.plan(now)
        s = self.scheduler
        ended, offers, admitted = list(s.ended), list(s.offers), list(s.admitted)
        s.ended.clear(), s.offers.clear(), s.admitted.clear()
        self.transfers.follow(ended, offers, admitted, now)


def test_a_half_that_queued_past_its_deadline_ends_and_its_room_with_it():
    """Else rooms whose other half never comes would hold every seat in turn, and the queue behind them for minutes."""
    engine = Engine()
    first, second = engine.add(1, now=0.0), engine.add(2, now=1.0)
    engine.turn(1.0)
    assert (first.phase, second.phase) == (Phase.ARRIVING, Phase.WAITING)
    engine.turn(DEADLINE_S + 0.9)
    assert second.phase is Phase.WAITING
    engine.turn(DEADLINE_S + 1.0)
    assert second.phase is Phase.ENDED
    assert isinstance(second.error, DeadlineExceeded)
    assert engine.transfers._receiving == {1: "r1"}


@pytest.mark.parametrize("waited", [0.0, 2.5])
def test_time_in_the_queue_counts_towards_the_handoffs_deadline(waited: float):
    engine = Engine()
    first = engine.add(1, now=10.0)
    engine.turn(10.0)
    second = engine.add(2, now=10.0)
    engine.scheduler.abort(first.rid)
    engine.scheduler.rows_free(first.rid)
    engine.turn(10.0 + waited)
    assert second.phase is Phase.ARRIVING
    assert engine.receiver.deadlines[2] == 10.0 + DEADLINE_S


def test_rows_of_a_failed_handoff_may_come_back_after_the_answers_end():
    """It was computed here meanwhile, faster than the peer let go of the rows."""
    engine = Engine()
    req = engine.add(1, now=0.0)
    engine.turn(0.0)
    engine.receiver.events = [ReceiveFailed(1, True, "transfer_failed", 502, "bytes differ")]
    engine.transfers.poll(1.0)
    assert req.recomputing
    engine.scheduler.abort(req.rid)
    engine.turn(1.0)
    assert engine.transfers._receiving == {1: "r1"}
    engine.receiver.events = [Released(1)]
    engine.turn(2.0)
    assert engine.transfers._receiving == {}
    assert engine.scheduler.cache.num_free == 16


class Steps:
    """A device's clock, wound by hand."""

    def __init__(self) -> None:
        self.latest = 7
        self.ended = 6

    def done(self, index: int) -> bool:
        return index <= self.ended


def test_rows_are_offered_only_when_the_steps_that_may_write_them_have_ended():
    """A peer's write knows nothing of our stream: rows freed while a step is under way may still be written by it."""
    engine = Engine()
    engine.transfers.clock = steps = Steps()
    engine.add(1, now=0.0)
    engine.turn(0.0)
    assert engine.receiver.deadlines == {}
    assert engine.transfers._unsettled
    steps.latest, steps.ended = 8, 7
    engine.transfers.poll(0.1)
    assert list(engine.receiver.deadlines) == [1]


def test_a_request_that_ends_before_its_rows_were_offered_gives_them_back():
    engine = Engine()
    engine.receiver.cancel = lambda *_, **__: None  # type: ignore[attr-defined] - it knows no such room yet
    engine.transfers.clock = steps = Steps()
    req = engine.add(1, now=0.0)
    engine.turn(0.0)
    engine.scheduler.abort(req.rid)
    engine.turn(0.1)
    assert engine.scheduler.cache.num_free < 16
    steps.ended = 7
    engine.turn(0.2)
    assert engine.receiver.deadlines == {}
    assert engine.transfers._receiving == {}
    assert engine.scheduler.cache.num_free == 16


class Writing(Half):
    """A sender whose writes end at the look of that number, and the port that says so; a look takes 0.1 ms."""

    def __init__(self, ends_at: int) -> None:
        super().__init__()
        self.ends_at, self.looks, self.port = ends_at, 0, self
        self.prepared: list[tuple[int, int]] = []

    def open(self, room: int, num_tokens: int, **_: Any) -> None: ...

    def computed(self, *_: Any, **__: Any) -> None: ...

    def prepare(self, room: int, start: int, stop: int, **_: Any) -> None:
        self.prepared.append((start, stop))

    def moving(self) -> bool:
        return self.looks < self.ends_at

    def work(self, now: float) -> None:
        self.looks += 1

    def clock(self) -> float:
        return self.looks * 1e-4


@pytest.mark.parametrize(
    ("ends_at", "see_off_s", "step_tokens", "looks"),
    [
        (3, 1.0, 8, 3),  # as long as it moves
        (999, 5.5e-4, 8, 6),  # but no longer than that
        (3, 0.0, 8, 0),  # where devices do not compute beside this process
        (3, 1.0, 2, 0),  # a chunk in the middle of a prompt: nobody waits for it
    ],
)
def test_a_step_that_ends_a_prompt_looks_for_the_end_of_its_write(
    ends_at: int, see_off_s: float, step_tokens: int, looks: int
) -> None:
    """Its note leaves when that is seen; the loop's next look is half a millisecond later."""
    transfers, scheduler, sender = leaving(step_tokens, ends_at)
    transfers.see_off_s = see_off_s
    step = scheduler.plan(0.0)
    sampled = {c.rid: Sampled((5,)) for c in step.chunks if c.sample}
    scheduler.apply(StepResult(step.index, sampled))
    transfers.computed(step, StepResult(step.index, sampled), 0.0)
    assert sender.looks == looks


def test_the_chunk_that_ends_a_prompt_is_prepared_while_it_is_computed() -> None:
    transfers, scheduler, sender = leaving(step_tokens=2, ends_at=0)
    for wanted in ([], [(2, 3)]):
        step = scheduler.plan(0.0)
        transfers.expect(step)
        assert sender.prepared == []  # not before the launch: it would wait
        for _ in range(3):
            transfers.progress()
        assert sender.prepared == wanted
        sampled = {c.rid: Sampled((5,)) for c in step.chunks if c.sample}
        scheduler.apply(StepResult(step.index, sampled))


def leaving(step_tokens: int, ends_at: int) -> tuple[Transfers, Scheduler, Writing]:
    """A prefill half of three tokens, in steps of so many."""
    cache = Cache(num_pages=16, page_tokens=4)
    scheduler = Scheduler(cache, Limits(max_len=40, max_seqs=1, step_tokens=step_tokens))
    sender = Writing(ends_at)
    transfers = Transfers(
        sender, Writing(0), ports=sender, scheduler=scheduler, deadline_s=9.0, clock=sender.clock
    )  # type: ignore[arg-type]
    room = Room(1, "127.0.0.1", 1)
    req = Request("r", [1, 2, 3], 3, SamplingParams(max_tokens=1), half="prefill", room=room)
    transfers.start(req, 0.0)
    scheduler.add(req, 0.0)
    return transfers, scheduler, sender
