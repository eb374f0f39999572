"""Long texts wait for their turn: so many and no more, and those whose client has left are never begun."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from splitserve.errors import Overloaded
from splitserve.text.desk import THREADS, Desk


def test_what_waits_is_bounded_and_what_was_left_is_never_begun() -> None:
    desk, gate = Desk("test", most=100), threading.Event()
    begun: list[int] = []

    def work(i: int) -> int:
        begun.append(i)
        gate.wait(10)
        return i

    async def run() -> list[int]:
        first = [asyncio.ensure_future(desk.do(10, partial(work, i))) for i in range(THREADS)]
        waiting = [asyncio.ensure_future(desk.do(20, partial(work, i))) for i in (10, 11, 12)]
        await asyncio.sleep(0.05)
        assert desk.waiting == 80
        with pytest.raises(Overloaded, match="too many long texts"):
            await desk.do(21, lambda: 0)
        waiting[1].cancel()
        await asyncio.sleep(0)
        gate.set()
        found = await asyncio.gather(*first, waiting[0], waiting[2])
        assert desk.waiting == 0
        return found

    assert asyncio.run(run()) == [*range(THREADS), 10, 12]
    assert 11 not in begun


def test_the_first_is_taken_however_long_it_is() -> None:
    assert asyncio.run(Desk("test", most=1).do(1000, lambda: 7)) == 7
