"""Child processes: start one, read its JSON lines, and make sure that nothing of it outlives it. Decides nothing.

Each child leads its own process group (a Ctrl-C at the terminal reaches the supervisor only, and one signal reaches a
server with its ranks). It inherits the read end of the alive pipe: when the supervisor dies in any way, that pipe ends
and the child leaves. stdout carries JSON lines, stderr goes to the log file directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from splitserve.launch.commands import with_flags
from splitserve.launch.identity import Identity, descendants, parent_of

_MAX_LINE = 1 << 16
_PR_SET_CHILD_SUBREAPER = 36


class AlivePipe:
    """A pipe that nobody writes to: its end tells every reader that this process is gone."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()

    def close(self) -> None:
        os.close(self.reader)
        os.close(self._writer)


class Running:
    """One child from start to exit."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path) -> None:
        found = Identity.of(popen.pid)
        assert found is not None, "a child that is not reaped keeps its pid"
        self.identity = found
        self.popen = popen
        self.log = log
        self.ended = False
        self.ranks: list[Identity] = []  # as of when it was ready

    @property
    def pid(self) -> int:
        return self.popen.pid

    def signal(self, number: int) -> None:
        """To the whole group. Nothing happens if it is gone: its exit is then on its way to us."""
        if self.ended:
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return

    def reap(self) -> int:
        """Kill what is left of the group, then collect the exit code. Only once the leader has exited.

        In this order because the zombie leader keeps the group's number from being given to somebody else.
        """
        self.signal(signal.SIGKILL)
        self.ended = True
        return self.popen.wait()

    async def read_lines(self, on_message: Callable[[dict[str, Any]], None]) -> None:
        """Pass on each JSON object of stdout until it ends; anything else printed there goes to the log."""
        assert self.popen.stdout is not None
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_MAX_LINE)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self.popen.stdout
        )
        try:
            while True:
                try:
                    line = await reader.readline()
                except ValueError:  # longer than _MAX_LINE: no message of ours
                    continue
                if not line:
                    return
                message = _parse(line)
                if message is None:
                    self._to_log(line)
                else:
                    on_message(message)
        finally:
            transport.close()

    def _to_log(self, line: bytes) -> None:
        with contextlib.suppress(OSError), self.log.open("ab", buffering=0) as log:
            log.write(line)


def start(
    words: tuple[str, ...],
    log: Path,
    *,
    alive: AlivePipe,
    cpus: tuple[int, ...],
    env: Mapping[str, str],
    command: tuple[str, ...],
) -> Running:
    """Start `command` + `words` on `cpus`. OSError where the system refuses a process or the log."""
    line = [*command, *with_flags(words, ("--alive-fd", str(alive.reader)))]
    stderr = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        _write_if_possible(stderr, f"$ {' '.join(line)}\n".encode())
        popen = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            process_group=0,
            pass_fds=(alive.reader,),
            env=dict(env),
        )
    finally:
        os.close(stderr)
    # Still one thread here, so that every thread it will ever have inherits this.
    os.sched_setaffinity(popen.pid, cpus)
    return Running(popen, log)


def child_env(extra: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child: ours, without settings that the supervisor has resolved into flags already."""
    kept = {k: v for k, v in environ.items() if not (k.startswith("SPLITSERVE_") and k != "SPLITSERVE_DEBUG")}
    return {**kept, **extra}


def adopt_orphans() -> None:
    """Make ranks whose server died children of this process, so that they can be reaped here and not nowhere."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def exited(known: Mapping[int, str]) -> list[str]:
    """Names of known children that have exited (not reaped yet); reaps adopted orphans on the way."""
    found = []
    for pid, name in known.items():
        try:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                found.append(name)
        except ChildProcessError:
            continue
    while True:
        try:
            zombie = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return found
        if zombie is None or zombie.si_pid in known:
            return found
        os.waitpid(zombie.si_pid, 0)


def orphans(known: Mapping[int, str]) -> list[Identity]:
    """Adopted processes that still run: ranks of an engine whose server has died."""
    me = os.getpid()
    return [who for who in descendants(me) if who.pid not in known and parent_of(who.pid) == me and who.alive]


def _write_if_possible(fd: int, text: bytes) -> None:
    """To a log. A full disk costs words there and nothing else."""
    with contextlib.suppress(OSError):
        os.write(fd, text)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
