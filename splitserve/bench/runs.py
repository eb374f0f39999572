"""Measurements that outlive their terminal: what `bench --detach` starts, and `bench status` and `bench results` read.

    WHERE/ID/                0700; WHERE is given by the caller
      lock                   flock held by the run for life: free while the state says running means it was killed
      state.json             0600, replaced whole; no API key is kept, here or in results
      report.txt  log        its stdout and stderr
      result.json page.html  at the end

A run is an ordinary `splitserve bench` in a session of its own, with its words and --recorded DIR. The newest `KEEP`
are kept: a new one removes what is older and has ended.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from splitserve.errors import ConfigError
from splitserve.locks import is_held, write_private
from splitserve.net.keys import ENVIRONMENT

KEEP = 20

_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{4}")
_LOCK, _STATE, _LOG, _REPORT, _RESULT, _PAGE = (
    "lock",
    "state.json",
    "log",
    "report.txt",
    "result.json",
    "page.html",
)


@dataclass(frozen=True)
class State:
    """What state.json says, and `died` where it cannot be true any more."""

    id: str
    url: str
    words: tuple[str, ...]
    pid: int
    begun: float  # seconds since 1970
    state: str = "running"  # done, failed or died later
    code: int | None = None
    ended: float | None = None


@dataclass(frozen=True)
class Run:
    """One run's directory."""

    path: Path

    @property
    def result(self) -> Path:
        return self.path / _RESULT

    @property
    def page(self) -> Path:
        return self.path / _PAGE

    @property
    def report(self) -> str:
        """The tables as they were printed; empty before the end."""
        return _text(self.path / _REPORT)

    @property
    def last_words(self) -> str:
        """The last line of the log: progress while it runs, the reason when it has failed."""
        lines = _text(self.path / _LOG).strip().splitlines()
        return lines[-1] if lines else ""

    def read(self) -> State:
        """ConfigError where the directory holds no state that can be read."""
        state = self._stored()
        if state.state == "running" and not is_held(self.path / _LOCK):
            state = self._stored()  # it may have ended between the two looks
            if state.state == "running":
                return replace(state, state="died")
        return state

    def write(self, state: State) -> None:
        """Replace the state in one step, so that a reader never sees half of it."""
        temporary = self.path / f"{_STATE}.new"
        write_private(temporary, json.dumps(asdict(state)))
        temporary.replace(self.path / _STATE)

    def started(self) -> None:
        """Called by the run itself, first."""
        self.write(replace(self._stored(), pid=os.getpid()))

    def end(self, code: int) -> None:
        """Called by the run itself, last."""
        self.write(replace(self._stored(), state="failed" if code else "done", code=code, ended=time.time()))

    def _stored(self) -> State:
        try:
            found = json.loads((self.path / _STATE).read_text(encoding="utf-8"))
            return State(**{**found, "words": tuple(found["words"])})
        except (OSError, ValueError, TypeError, KeyError) as e:
            raise ConfigError(f"{self.path / _STATE} cannot be read: {e}", field="id") from None


def begin(where: Path, words: Sequence[str], *, url: str, program: Sequence[str], key: str = "") -> Run:
    """Start `program bench words` so that nothing of this terminal can end it, and return at once.

    `key` is the API key of `url`, "" for none.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    run = Run(where / name)
    run.path.mkdir(mode=0o700)
    lock = os.open(run.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(
            lock, fcntl.LOCK_EX
        )  # of the open file, which the child inherits: held as long as it lives
        run.write(State(name, url, tuple(words), 0, time.time()))
        with open(run.path / _REPORT, "wb") as report, open(run.path / _LOG, "wb") as log:
            subprocess.Popen(
                [*program, "bench", *words, "--recorded", str(run.path)],
                stdin=subprocess.DEVNULL,
                stdout=report,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **({ENVIRONMENT: key} if key else {})},
                pass_fds=(lock,),
            )
    finally:
        os.close(lock)
    for old in newest_first(where)[KEEP:]:
        if not is_held(old.path / _LOCK):
            shutil.rmtree(old.path, ignore_errors=True)
    return run


def remove(run: Run) -> None:
    """Remove all that a run has left. ConfigError while it runs."""
    if is_held(run.path / _LOCK):
        pid = run.read().pid
        raise ConfigError(f"{run.path.name} is running", field="id", fix=f"wait, or end it first: kill {pid}")
    shutil.rmtree(run.path)


def find(where: Path, name: str) -> Run:
    """The run of that ID. ConfigError where there is none."""
    run = Run(where / name)
    if not _ID.fullmatch(name) or not run.path.is_dir():
        known = [r.path.name for r in newest_first(where)[:5]]
        fix = f"known are {', '.join(known)}" if known else "start one with `splitserve bench --detach`"
        raise ConfigError(f"there is no run {name!r}", field="id", fix=fix)
    return run


def newest_first(where: Path) -> list[Run]:
    """All runs."""
    try:
        found = [p for p in where.iterdir() if _ID.fullmatch(p.name)]
    except OSError:
        return []
    return [Run(p) for p in sorted(found, reverse=True)]


def describe(run: Run) -> dict[str, Any]:
    """One run as `status --json` shows it."""
    state = run.read()
    seconds = (state.ended or time.time()) - state.begun
    return {
        **asdict(state),
        "seconds": round(seconds, 1),
        "last_words": run.last_words,
        "path": str(run.path),
    }


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
