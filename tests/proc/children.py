"""Starts tests/proc/transfer_child.py and talks to it. Everything waits with a bound, and nothing outlives its test."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("transfer_child.py")
ANSWER_S = 60.0  # starting NIXL on a busy two-core machine can take ten seconds


class ChildError(Exception):
    """The child answered with an error of ours."""


class ChildProcess:
    def __init__(
        self, engine: str, transport: str, *, num_pages: int = 64, settings: dict[str, Any] | None = None
    ) -> None:
        given = {"engine": engine, "transport": transport, "num_pages": num_pages, "settings": settings or {}}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            bufsize=0,
        )
        self.engine = engine
        self.buffer = b""
        self.events: list[dict[str, Any]] = []

    @property
    def pid(self) -> int:
        return self.process.pid

    def ready(self) -> ChildProcess:
        self.answer()
        return self

    def send(self, do: str, **args: Any) -> None:
        """A command whose answer is read later."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **args}).encode() + b"\n")

    def answer(self) -> Any:
        deadline = time.monotonic() + ANSWER_S
        assert self.process.stdout is not None
        while b"\n" not in self.buffer:
            left = deadline - time.monotonic()
            assert left > 0, f"{self.engine} did not answer"
            if select.select([self.process.stdout], [], [], left)[0]:
                got = os.read(self.process.stdout.fileno(), 1 << 20)
                assert got, f"{self.engine} has gone"
                self.buffer += got
        line, _, self.buffer = self.buffer.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            raise ChildError(reply["error"])
        return reply["ok"]

    def ask(self, do: str, **args: Any) -> Any:
        self.send(do, **args)
        return self.answer()

    def wait_for(
        self, wanted: Callable[[dict[str, Any]], bool], *, timeout_s: float = 20.0
    ) -> list[dict[str, Any]]:
        """Events up to and including the first that is wanted; later ones are kept for the next call."""
        seen: list[dict[str, Any]] = []
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.events += self.ask("events")
            while self.events:
                seen.append(self.events.pop(0))
                if wanted(seen[-1]):
                    return seen
            time.sleep(0.005)
        raise AssertionError(f"{self.engine}: not within {timeout_s} s; saw {seen}")

    def wait_until(self, condition: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{self.engine}: condition not met within {timeout_s} s"
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def start(*children: ChildProcess) -> tuple[ChildProcess, ...]:
    """Wait for children that start at the same time."""
    for child in children:
        child.ready()
    return children
