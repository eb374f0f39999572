"""When an engine that has gone silent counts as lost: only while it owes an answer, and only after long."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from splitserve.server.health import Health


class Engine(SimpleNamespace):
    """The link to an engine that never answers. Each look at the clock is 10 s later than the one before."""

    def __init__(self) -> None:
        super().__init__(last_heard=0.0, num_open=1, hello=object(), lost=None, now=0.0, asked=0)

    def clock(self) -> float:
        self.now += 10.0
        return self.now

    async def control(self, _op: str, **_: Any) -> None:
        self.asked += 1
        await asyncio.Event().wait()


def run(engine: Engine, *, within_s: float = 5.0) -> str | None:
    async def both() -> str:
        health = Health(engine, stall_s=0.02, lost_s=0.04, clock=engine.clock)  # type: ignore[arg-type]
        watch = asyncio.create_task(health.watch())
        try:
            return await asyncio.wait_for(health.stalled(), within_s)
        finally:
            watch.cancel()

    try:
        return asyncio.run(both())
    except TimeoutError:
        return None


def test_an_engine_that_owes_an_answer_for_too_long_is_lost():
    engine = Engine()
    assert "s with 1 requests open" in (run(engine) or "never")
    assert engine.asked == 1


def test_an_idle_engine_may_be_silent_for_ever():
    engine = Engine()
    engine.num_open = 0
    assert run(engine, within_s=0.3) is None
    assert engine.asked == 0
