"""Planted slowness and lifetime marks: steps last as long as planted, writes leave in turn, sums add up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from splitserve.engine.lifetimes import MARKS, Lifetimes
from splitserve.engine.request import Request
from splitserve.engine.step import Chunk, Step, StepResult
from splitserve.engine.throttle import Throttled
from splitserve.errors import RequestError, TransferError
from splitserve.transfer.faults import Faults
from splitserve.transfer.layout import Copies
from splitserve.transfer.paced import Paced
from splitserve.transfer.transport import Broken, Written
from splitserve.types import FinishReason, SamplingParams, TokenEvent


def chunk(rid: str, start: int, stop: int, num_prompt: int) -> Chunk:
    return Chunk(rid, start, stop, tokens=(7,) * (stop - start), pages=(), num_prompt=num_prompt)


PROMPT, DECODE = chunk("p", 0, 10, 10), chunk("d", 12, 13, 10)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Instant:
    """A runner that takes `seconds` for every step."""

    def __init__(self, clock: Clock, seconds: float = 0.0) -> None:
        self.clock, self.seconds = clock, seconds

    def launch(self, step: Step) -> Instant:
        self.clock.now += self.seconds
        return self

    def result(self) -> StepResult:
        return StepResult(1, {})


@pytest.mark.parametrize(
    ("chunks", "least_s"),
    [((DECODE,), 0.094), ((DECODE,) * 8, 0.094), ((PROMPT,), 0.02), ((DECODE, PROMPT), 0.114)],
)
def test_a_throttled_step_lasts_as_long_as_planted(chunks: tuple[Chunk, ...], least_s: float) -> None:
    clock, faults, turns = Clock(), Faults(), []
    faults.slow("slow_decode", 0.094)
    faults.slow("slow_prefill", 0.002)
    runner = Throttled(
        Instant(clock, 0.01), faults, progress=lambda: turns.append(1), clock=clock, sleep=clock.sleep
    )
    runner.launch(Step(1, chunks))
    assert clock.now - 100.0 == pytest.approx(least_s)
    assert turns, "handoffs must move while a throttled step waits"
    faults.slow("slow_decode", 0.0)
    faults.slow("slow_prefill", 0.0)
    runner.launch(Step(2, chunks))
    assert clock.now - 100.0 == pytest.approx(least_s + 0.01)


def test_a_slower_device_is_not_made_slower() -> None:
    clock, faults = Clock(), Faults()
    faults.slow("slow_decode", 0.05)
    Throttled(Instant(clock, 0.2), faults, progress=lambda: None, clock=clock, sleep=clock.sleep).launch(
        Step(1, (DECODE,))
    )
    assert clock.now == pytest.approx(100.2)


def test_throttles_that_cannot_be_are_refused() -> None:
    with pytest.raises(RequestError, match="no throttle 'slow_gpu'"):
        Faults().slow("slow_gpu", 0.1)
    for seconds in (-0.1, 11.0, float("nan")):
        with pytest.raises(RequestError, match="ms"):
            Faults().slow("slow_link", seconds)


class Wire:
    """A transport that writes at once, and refuses peer "bad"."""

    name = "wire"

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, peer: str, copies: Copies, note: bytes) -> int:
        if peer == "bad":
            raise TransferError("no such peer")
        self.written.append(note)
        return 1000 + len(self.written)

    def poll(self) -> list[Any]:
        events = [Written(1000 + i + 1) for i in range(len(self.written))]
        self.written = []
        return events

    def disconnect(self, peer: str) -> None:
        self.closed = True


BYTES = Copies(np.ones((1, 3), np.uint64), np.ones((1, 3), np.uint64))
NOTHING = Copies(BYTES.src[:0], BYTES.dst[:0])


def test_a_slow_link_carries_one_write_at_a_time() -> None:
    clock, faults, wire = Clock(), Faults(), Wire()
    link = Paced(wire, faults, clock=clock)  # type: ignore[arg-type]
    faults.slow("slow_link", 0.1)
    ids = [
        link.write("peer", BYTES, b"a"),
        link.write("peer", BYTES, b"b"),
        link.write("peer", NOTHING, b"c"),
    ]
    assert not link.poll()
    clock.now += 0.11
    assert link.poll() == [Written(ids[0])]
    clock.now += 0.05
    assert not link.poll()
    clock.now += 0.05
    # a note without bytes takes no time, but does not overtake the bytes before it
    assert link.poll() == [Written(i) for i in ids[1:]]
    assert link.poll() == [] or True
    faults.slow("slow_link", 0.0)
    last = link.write("peer", BYTES, b"d")
    assert last not in ids


def test_queued_writes_of_a_lost_peer_are_broken_and_refusals_are_told() -> None:
    clock, faults, wire = Clock(), Faults(), Wire()
    link = Paced(wire, faults, clock=clock)  # type: ignore[arg-type]
    faults.slow("slow_link", 0.1)
    gone, bad = link.write("gone", BYTES, b"a"), link.write("bad", BYTES, b"b")
    link.disconnect("gone")
    assert wire.closed
    clock.now += 0.3
    broken = link.poll()
    assert {(b.id, b.error) for b in broken if isinstance(b, Broken)} == {
        (gone, "the peer was disconnected"),
        (bad, "no such peer"),
    }
    faults.slow("slow_link", 0.0)
    with pytest.raises(TransferError):
        link.write("bad", BYTES, b"c")


def request(rid: str) -> Request:
    return Request(rid, tokens=[7] * 10, num_prompt=10, sampling=SamplingParams(max_tokens=3))


def test_marks_follow_a_request_and_sums_follow_the_steps() -> None:
    seen = Lifetimes()
    req = request("p")
    seen.began(req, 1.0)
    seen.stepped(Step(1, (chunk("p", 0, 6, 10),)), 2.0, 2.5)
    seen.stepped(Step(2, (chunk("p", 6, 10, 10), DECODE)), 3.0, 3.25)
    seen.told([TokenEvent("p", tokens=(5,))], [], [], 3.5)
    seen.stepped(Step(3, (chunk("p", 10, 11, 10), DECODE)), 4.0, 4.125)
    seen.told([TokenEvent("p", tokens=(6,), finish=FinishReason.LENGTH)], [req], [], 5.0)
    (record,) = seen.records()
    assert [record[m] for m in MARKS] == [1.0, 2.0, 3.25, None, 3.5, 5.0]
    sums = seen.sums()
    assert (sums["prompt_steps"], sums["mixed_steps"], sums["decode_steps"]) == (1, 1, 1)
    assert (sums["prompt_step_s"], sums["mixed_step_s"], sums["decode_step_s"]) == (0.5, 0.25, 0.125)
    assert (sums["decode_rows"], sums["decode_rows_squared"], sums["decode_row_s"]) == (2, 4, 0.25)
    assert sums["prompt_step_tokens"] == 10
