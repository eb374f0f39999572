"""Whether the engine still works, not merely whether its process exists.

While requests are open and the engine is silent it is asked for its figures; an engine whose loop turns answers. No
answer for `stall_s`: unhealthy, although every process is there and every socket open. No answer for `lost_s`: it will
not come (a stopped process, a deadlock), and whoever awaits `stalled` ends the engine, to have it started again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from splitserve.errors import Overloaded, SplitserveError

from .engine_link import EngineLink

INTERVAL_S = 1.0
STALL_S = 30.0
"""A step of a large model on a slow machine may take seconds; nothing honest takes this long."""

LOST_S = 120.0
"""Longer than STALL_S, for what is slow once: a kernel that is compiled when its shape first comes."""


class Health:
    def __init__(
        self,
        link: EngineLink,
        *,
        stall_s: float = STALL_S,
        lost_s: float = LOST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._stall_s = stall_s
        self._lost_s = lost_s
        self._clock = clock
        self._asked: float | None = None  # when the question was sent that is not answered yet

    async def watch(self) -> None:
        """Ask while there is work; runs until cancelled or the engine is lost."""
        while self._link.lost is None:
            await asyncio.sleep(min(INTERVAL_S, self._stall_s / 4))
            quiet = self._clock() - self._link.last_heard > min(INTERVAL_S, self._stall_s / 4)
            if self._link.num_open and quiet and self._link.hello is not None:
                await self._ask()

    async def stalled(self) -> str:
        """Return, and say how long, once a question to the engine has been open for `lost_s`."""
        while (silent_s := self._silent_s()) <= self._lost_s:
            await asyncio.sleep(min(INTERVAL_S, self._lost_s / 4))
        return f"silent for {silent_s:.0f} s with {self._link.num_open} requests open"

    def check(self) -> None:
        """Raise what is wrong: EngineLost, Overloaded while loading, Overloaded when stalled."""
        self._link.check()
        if (silent_s := self._silent_s()) > self._stall_s:
            raise Overloaded(
                f"the engine has been silent for {silent_s:.0f} s with {self._link.num_open} requests open",
                retry_after_s=5,
            )

    def _silent_s(self) -> float:
        """Since when the engine has owed an answer; 0 while it owes none."""
        return 0.0 if self._asked is None else self._clock() - max(self._asked, self._link.last_heard)

    async def _ask(self) -> None:
        self._asked = self._clock()
        try:
            await self._link.control("stats", timeout_s=3600)
        except SplitserveError:
            return  # lost: check() says so
        self._asked = None
