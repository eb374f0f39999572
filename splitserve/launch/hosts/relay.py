"""A process here that stands for one on another host: what that says is said here, what this is sent goes there.

    supervisor ── SIGTERM ──▶ relay ── signal ──▶ Crew ──▶ engine
               ◀── lines ────       ◀── poll ────      ◀──
               ◀── exit code

It ends as the engine ends. When the supervisor dies (alive pipe) it ends the engine first; should it die itself, the
crew misses its questions and ends the engine.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from splitserve.launch.hosts.cluster import connect
from splitserve.launch.hosts.crew import LEASE_S, Wish

POLL_S = 1.0
CALL_S = 30.0
GONE_S = 1.25 * LEASE_S + 1.0
"""From losing a host until nothing of ours runs there: its crew looks every quarter of a lease."""


@dataclass(frozen=True)
class Remote:
    """Which process, where, and how it is started."""

    cluster: str
    crew: str
    process: str
    words: tuple[str, ...]
    env: dict[str, str]
    cpus: tuple[int, ...]
    ports: tuple[Wish, ...]


def run(remote: Remote, *, alive_fd: int | None) -> int:
    """Until it is gone; its exit code, or 1 where its host is."""
    ray = connect(remote.cluster)
    told_to_go = threading.Event()
    try:
        crew = ray.get_actor(remote.crew)
        pid = ray.get(
            crew.start.remote(remote.process, remote.words, remote.env, remote.cpus, remote.ports),
            timeout=CALL_S,
        )
        _log(f"{remote.process} is pid {pid} at {remote.crew}")

        def send(number: int) -> None:
            told_to_go.set()
            crew.signal.remote(remote.process, number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda n, _: send(n))
        if alive_fd is not None:
            threading.Thread(target=_leave_with, args=(alive_fd, send), daemon=True).start()
        code = _follow(lambda: ray.get(crew.poll.remote(remote.process, POLL_S), timeout=CALL_S))
    except (ValueError, ray.exceptions.RayError) as e:  # ValueError: no actor of that name
        _log(f"the host of {remote.process} is lost: {str(e).splitlines()[0]}")
        if not _host_lives(ray, remote.crew):
            _log(f"waiting {GONE_S:.0f} s: should it live on there, unseen, its crew has ended it by then")
            told_to_go.wait(GONE_S)
        return 1
    if code < 0:  # so that the supervisor tells of the same signal
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _host_lives(ray: Any, crew: str) -> bool:
    """Whether Ray still knows the node that this crew was made for: the end of its name is the node's beginning."""
    node = crew.rpartition("-")[2]
    return any(n["Alive"] and n["NodeID"].startswith(node) for n in ray.nodes())


def _follow(poll: Callable[[], dict[str, Any]]) -> int:
    """Say what it says until it is gone."""
    while True:
        told = poll()
        for line in told["lines"]:
            print(line, flush=True)
        for line in told["log"]:
            _log(line)
        if told["code"] is not None:
            return int(told["code"])


def wait_for_end(alive_fd: int) -> None:
    """Until nobody holds the other end. Not by reading: a child with libuv has made the pipe non-blocking for all."""
    poller = select.poll()
    poller.register(alive_fd, select.POLLIN)
    poller.poll()


def _leave_with(alive_fd: int, send: Callable[[int], None]) -> None:
    """The supervisor is gone: nobody may be left serving."""
    wait_for_end(alive_fd)
    send(signal.SIGKILL)
    threading.Event().wait(0.5)  # the call leaves in the background
    os._exit(1)


def _log(line: str) -> None:
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def parse_holds(texts: Sequence[str]) -> tuple[Wish, ...]:
    """ "decode-0.http=10.0.0.2=9000" -> ("decode-0.http", "10.0.0.2", 9000)."""
    found = []
    for text in texts:
        name, host, port = text.split("=")
        found.append((name, host, int(port)))
    return tuple(found)
