"""`splitserve attend`: runs another engine's server as a child and speaks for it to the supervisor. Knows no engine.

    supervisor ──▶ attend ──▶ vllm serve ...        one process group, one log
      ▲  JSON lines │  GET /health until 200
      └─────────────┘

It binds itself, and so all that it starts, to cpus and a memory node; says `ready` when the server answers; ends the
server when the alive pipe ends or a SIGTERM comes; and leaves with the server's exit code. What the server prints goes
to the log. It restarts nothing: the supervisor does.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

from splitserve import numa
from splitserve.errors import ConfigError, SplitserveError
from splitserve.launch.lifecycle import describe_exit
from splitserve.net.client import Client

POLL_S = 0.25
HEALTH_TIMEOUT_S = 5.0
SAY_S = 5.0
"""How often it says how long the server has been starting."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Attended:
    """What to run, where it answers, and what it is bound to."""

    engine: str
    words: tuple[str, ...]
    url: str
    health: str
    cpus: tuple[int, ...] = ()
    memory: str = "none"
    nodes: tuple[int, ...] = ()
    alive_fd: int | None = None


def run(attended: Attended) -> int:
    """Run until the server ends or is to end; its exit code. ConfigError for a program or cpus that are not there."""
    if attended.cpus:
        try:
            os.sched_setaffinity(0, attended.cpus)
        except OSError as e:
            raise ConfigError(
                f"--cpus {numa.short_list(attended.cpus)}: {e.strerror}", field="cpus"
            ) from None
    numa.set_policy(attended.memory, attended.nodes)
    return asyncio.run(_Attendant(attended).run())


class _Attendant:
    def __init__(self, attended: Attended) -> None:
        self._attended = attended
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        if self._attended.alive_fd is not None:
            loop.add_reader(self._attended.alive_fd, self._orphaned)
        self._process = _start(self._attended)
        watching = asyncio.create_task(self._say_ready())
        try:
            return await self._wait()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _wait(self) -> int:
        """The server's exit code, or 0 once it has ended as it was told to."""
        assert self._process is not None
        told = False
        while (code := self._process.poll()) is None:
            if self._stopping.is_set() and not told:
                # Those in our own group have had the supervisor's signal; saying it once more does no harm.
                self._process.terminate()
                told = True
            await asyncio.sleep(POLL_S / 5 if told else POLL_S)
        if self._stopping.is_set():
            return 0
        print(f"{self._attended.engine} {describe_exit(code)}", file=sys.stderr, flush=True)
        return code if code > 0 else 1

    async def _say_ready(self) -> None:
        client = Client()
        loop = asyncio.get_running_loop()
        begun = said = loop.time()
        name = self._attended.engine
        _say({"loading": f"{name} is starting", "done": 0.0})
        try:
            while not await self._answers(client):
                await asyncio.sleep(POLL_S)
                if loop.time() - said > SAY_S:
                    said = loop.time()
                    _say({"loading": f"{name} is starting, {said - begun:.0f} s so far", "done": 0.0})
        finally:
            await client.close()
        _say({"ready": True, "url": self._attended.url})

    async def _answers(self, client: Client) -> bool:
        where = self._attended.url + self._attended.health
        try:
            answer = await client.request("GET", where, timeout_s=HEALTH_TIMEOUT_S)
        except SplitserveError:  # nobody listens yet, or it is too busy loading to answer
            return False
        return answer.status == 200

    def _orphaned(self) -> None:
        """The supervisor is gone: nobody is left who could end a server that takes its time."""
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        if self._process is not None:
            self._process.kill()
        os._exit(1)


def _start(attended: Attended) -> subprocess.Popen[bytes]:
    """The server, its output in our log. ConfigError where there is no such program."""
    libc = ctypes.CDLL(None)
    try:
        return subprocess.Popen(
            attended.words,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),  # our own stdout carries messages
            # Should this process be killed, its server ends too; what that leaves is the supervisor's to collect.
            # There is one thread here yet, so that the child may run a function before its program.
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # noqa: PLW1509
        )
    except OSError as e:
        raise ConfigError(
            f"cannot run {attended.words[0]}: {e.strerror}",
            field="python",
            fix=f"set python to an interpreter that has {attended.engine} installed",
        ) from None


def _say(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)
