"""Fencing: end one process for certain, so that rows it could still write to may be used again.

A peer that has fallen silent may only be stopped, and would write when it resumes. Whoever owns the rows asks the
supervisor, which kills that process and answers only once it can touch no memory. It kills none but its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from typing import Any

from splitserve.errors import RequestError
from splitserve.launch.identity import Identity, parent_of

WAIT_S = 5.0
MAX_PID = 1 << 22
"""Of Linux on 64 bits."""


async def fence(who: Identity, ours: Mapping[int, str]) -> dict[str, Any]:
    """Kill `who` and its engine's whole group. `ours` maps pids of our children to their names.

    Returns {"ok": true, "dead": bool, "name"}: "" where that process was gone already. RequestError where the pid
    belongs to somebody else.
    """
    if not 0 < who.pid <= MAX_PID:
        raise RequestError(f"{who.pid} is no pid", field="pid", fix="fence only pids of `splitserve status`")
    try:
        pidfd = os.pidfd_open(who.pid)
    except ProcessLookupError:
        return {"ok": True, "dead": True, "name": ""}
    try:
        # From here on the descriptor means this very process, so a check of its start cannot go stale.
        if not who.alive:
            return {"ok": True, "dead": True, "name": ""}
        owner = _owner(who.pid, ours)
        if owner is None:
            raise RequestError(
                f"pid {who.pid} is no process of this deployment",
                field="pid",
                fix="fence only pids of `splitserve status`, or ranks under them",
            )
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        dead = await _gone(pidfd, WAIT_S)
        leader = Identity.of(owner)
        if leader is not None:
            leader.kill_group()  # an engine without one of its ranks is no engine: let it be started again as a whole
        return {"ok": True, "dead": dead or not who.alive, "name": ours.get(owner, "orphan")}
    finally:
        os.close(pidfd)


def _owner(pid: int, ours: Mapping[int, str]) -> int | None:
    """Our child that `pid` is or descends from: a server, or a rank that we adopted when its server died."""
    while pid > 1:
        parent = parent_of(pid)
        if pid in ours or parent == os.getpid():
            return pid
        pid = parent
    return None


async def _gone(pidfd: int, timeout_s: float) -> bool:
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[None] = loop.create_future()

    def exited() -> None:  # a pidfd becomes readable when its process exits
        loop.remove_reader(pidfd)
        gone.set_result(None)

    loop.add_reader(pidfd, exited)
    try:
        await asyncio.wait_for(gone, timeout_s)
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
    return True
