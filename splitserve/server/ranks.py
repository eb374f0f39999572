"""The engine's processes: start one for each rank, notice any death at once, leave none behind.

Each child holds the read end of a pipe whose only write end is here; when this process dies in any way the pipe
closes and the child leaves. Their settings travel in files of mode 0600, since a command line is visible to all.
A child's stdout goes to our stderr: our own stdout carries JSON lines for whoever started us.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from splitserve import log

_log = log.get(__name__)

Argv = Callable[[Path, int], list[str]]
"""From a rank's config file and the descriptor it must watch to its command line."""


def rank_argv(config: Path, alive_fd: int) -> list[str]:
    """The real engine."""
    return [
        sys.executable,
        "-m",
        "splitserve.engine.rank",
        "--config",
        str(config),
        "--alive-fd",
        str(alive_fd),
    ]


class Ranks:
    """Processes of one engine. `on_death(rank, exit status)` is called once, for the first that ends unasked."""

    def __init__(self, run_dir: Path, name: str, *, argv: Argv = rank_argv) -> None:
        self._run_dir = run_dir
        self._name = name
        self._argv = argv
        self._processes: list[asyncio.subprocess.Process] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._pipes: list[int] = []
        self._files: list[Path] = []
        self._stopping = False
        self.on_death: Callable[[int, int], None] | None = None

    @property
    def pids(self) -> list[int]:
        return [p.pid for p in self._processes]

    async def start(self, configs: Sequence[Mapping[str, Any]], *, threads: int) -> None:
        """One process for each config, in rank order. `threads` compute threads each; 0 leaves it to the engine."""
        env = dict(os.environ)
        if threads:
            env["OMP_NUM_THREADS"] = str(threads)
        for rank, config in enumerate(configs):
            path = self._write(rank, config)
            theirs, ours = os.pipe()
            self._pipes.append(ours)
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._argv(path, theirs),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=sys.stderr.fileno(),
                    env=env,
                    pass_fds=(theirs,),
                    start_new_session=True,  # Ctrl-C is for us; we tell them
                )
            finally:
                os.close(theirs)
            self._processes.append(process)
            self._watchers.append(asyncio.create_task(self._watch(rank, process)))

    async def stop(self, *, within_s: float = 5.0) -> None:
        """Ask the ranks to leave; kill those that are still there after `within_s`.

        By their pipes, and by SIGTERM too: one that still imports or loads looks at no pipe yet, and just ends.
        """
        self._stopping = True
        for fd in self._pipes:
            os.close(fd)
        self._pipes.clear()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        if self._watchers:
            _, late = await asyncio.wait(self._watchers, timeout=within_s)
            if late:
                _log.warning("killing %d engine process(es) that did not leave in %g s", len(late), within_s)
                for process in self._processes:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                await asyncio.wait(late)
        for path in self._files:
            path.unlink(missing_ok=True)

    async def _watch(self, rank: int, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        if not self._stopping and self.on_death is not None:
            told, self.on_death = self.on_death, None
            told(rank, status)

    def _write(self, rank: int, config: Mapping[str, Any]) -> Path:
        path = self._run_dir / f"{self._name}-rank{rank}.json"
        path.unlink(missing_ok=True)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w") as file:
                json.dump(config, file)
        except OSError as e:  # a full disk names no file by itself
            raise OSError(e.errno, e.strerror, str(path)) from e
        self._files.append(path)
        return path


def describe(rank: int, status: int) -> str:
    """How a rank ended, for people."""
    return (
        f"rank {rank} was killed by signal {-status}"
        if status < 0
        else f"rank {rank} exited with status {status}"
    )
