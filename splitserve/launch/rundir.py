"""The run directory of a deployment: what it keeps on disk while it runs, and how the next command cleans up after it.

    $XDG_RUNTIME_DIR/splitserve/  or  /tmp/splitserve-UID/      0700, ours
      .bench/                     measurements that go on without a terminal (bench/runs.py)
      .hosts/NAME-HOST/           a deployment's processes here, where `up` runs on another host (hosts/crew.py)
      NAME/                       0700
        lock                      flock held by the supervisor for life: free means it is dead
        state.json                0600: pids with start ticks, ports, urls; replaced whole
        control.sock              0600
        logs/NAME.log, NAME.log.1
        PROCESS/                  for a child's own sockets

A supervisor that was killed leaves this behind; `clean` ends what is left of its processes (by pid and start tick) and
removes it. Starts nothing and talks to nobody.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import time
from pathlib import Path
from typing import Any

from splitserve.errors import ConfigError
from splitserve.launch.identity import Identity, boot_id
from splitserve.locks import is_held, write_private

_SOCKET_PATH_MAX = 107
"""Longest path of a Unix socket on Linux (108 with the closing zero)."""


def root() -> Path:
    """Where this user's run directories are; made if missing. ConfigError where somebody else owns the place."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = (
        Path(base) / "splitserve" if base and os.path.isdir(base) else Path(f"/tmp/splitserve-{os.getuid()}")
    )
    return _own(path)


def subdirectory(name: str) -> Path:
    """A directory of ours beside those of deployments; its name begins with a dot, so that it is none of them."""
    return _own(root() / name)


def names(where: Path | None = None) -> list[str]:
    """Deployments with a run directory, running or not."""
    return sorted(p.name for p in (where or root()).iterdir() if p.is_dir() and not p.name.startswith("."))


def _own(path: Path) -> Path:
    """Make a directory of mode 0700, or accept one that is ours and closed to others."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"{path} exists and is not a directory of yours that others cannot enter",
                fix=f"remove it, or set XDG_RUNTIME_DIR to a directory of your own; then try again ({path})",
            ) from None
    except OSError as e:
        raise ConfigError(
            f"cannot make {path}: {e.strerror}", fix="set XDG_RUNTIME_DIR to a writable directory"
        ) from e
    return path


SWEEP_S = 60.0


class RunDir:
    """One deployment's directory. The supervisor takes it (`acquire`) and removes it; other commands only look."""

    def __init__(self, name: str, *, where: Path | None = None) -> None:
        self.name = name
        self.path = (where or root()) / name
        self._lock: int | None = None
        self._ended: list[str] = []

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def control(self) -> Path:
        return self.path / "control.sock"

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    def acquire(self) -> None:
        """Take the directory for this process's life, empty, after ending what a dead supervisor left.

        ConfigError where a supervisor of this name is running, or where the path is too long for a socket.
        """
        if len(os.fsencode(self.control)) > _SOCKET_PATH_MAX:
            raise ConfigError(
                f"{self.control} is longer than the {_SOCKET_PATH_MAX} bytes a socket path may have",
                fix="choose a shorter [deployment] name or XDG_RUNTIME_DIR",
            )
        self._take()
        self._end_leftovers()
        self._remove_contents(keep_logs=False)
        self.logs.mkdir(mode=0o700)

    def running(self) -> bool:
        """True while a supervisor holds the lock."""
        return is_held(self.path / "lock")

    def clean(self) -> list[str]:
        """End and remove what a dead supervisor left, but for its logs. Says what was ended; [] if there was none."""
        if not (self.path / "state.json").exists() or self.running():
            return []
        try:
            self._take()
        except ConfigError:  # one has just come up under this name
            return []
        self._end_leftovers()
        self.release(keep_logs=True)
        return self._ended

    def release(self, *, keep_logs: bool = False) -> None:
        """Remove the directory (but for logs that hold a word, if asked) and give the name back."""
        if self._lock is None:
            return
        self._remove_contents(keep_logs=keep_logs)
        (self.path / "lock").unlink(missing_ok=True)
        with contextlib.suppress(
            OSError
        ):  # not empty: logs are kept, or the next of this name is here already
            self.path.rmdir()
        os.close(self._lock)
        self._lock = None

    def write_state(self, state: dict[str, Any]) -> None:
        """Replace state.json in one step, so that a reader never sees half of it. OSError leaves the former one."""
        temporary = self.path / "state.json.new"
        try:
            write_private(temporary, json.dumps({"boot": boot_id(), **state}, indent=1))
            temporary.rename(self.path / "state.json")
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def read_state(self) -> dict[str, Any] | None:
        """What the supervisor last wrote, None if there is nothing readable."""
        try:
            state = json.loads((self.path / "state.json").read_text())
        except (OSError, ValueError):
            return None
        return state if isinstance(state, dict) else None

    def _try_lock(self) -> int | None:
        """The lock's descriptor, or None if the directory was removed under us and must be made again."""
        lock = self.path / "lock"
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == os.stat(lock).st_ino:
                return fd
        except FileNotFoundError:
            pass
        except OSError as e:
            os.close(fd)
            if e.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            state = self.read_state() or {}
            pid = state.get("supervisor", {}).get("pid", "?")
            raise ConfigError(
                f"deployment {self.name!r} is already up (supervisor pid {pid})",
                field="name",
                fix=f"stop it with `splitserve down {self.name}`, or start this one under another name: "
                "--set deployment.name=OTHER",
            ) from None
        os.close(fd)
        return None

    def _end_leftovers(self) -> None:
        """Kill the process groups that a dead supervisor's state names and that are still the same processes."""
        state = self.read_state() or {}
        self._ended = []
        if state.get("boot") != boot_id():
            return
        left = [(p["name"], _identity(p)) for p in state.get("processes", []) if p.get("pid")]
        ranks = [(p["name"], _identity(r)) for p in state.get("processes", []) for r in p.get("ranks", [])]
        for name, who in left:
            if members := who.kill_group():
                self._ended.append(f"{name} (pid {', '.join(map(str, members))})")
        self._ended += [f"rank of {name} (pid {who.pid})" for name, who in ranks if who.kill()]
        for _, who in [*left, *ranks]:
            who.wait_gone(5.0)

    def _take(self) -> None:
        """Make the directory if need be and lock it. ConfigError where a supervisor holds it."""
        while self._lock is None:
            _own(self.path)
            self._lock = self._try_lock()

    def _remove_contents(self, *, keep_logs: bool) -> None:
        for entry in self.path.iterdir():
            if entry.name != "lock" and not (keep_logs and entry.name == "logs" and _says_anything(entry)):
                _remove(entry)


def sweep(where: Path) -> None:
    """Remove directories whose owners were killed. Young ones are left: an owner may be about to lock one."""
    for path in where.iterdir():
        left = RunDir(path.name, where=where)
        with contextlib.suppress(ConfigError, OSError):
            if time.time() - path.stat().st_mtime > SWEEP_S and not left.running():
                left.acquire()
                left.release()


def _identity(state: dict[str, Any]) -> Identity:
    return Identity(int(state["pid"]), int(state["start"]))


def _says_anything(logs: Path) -> bool:
    return any(p.stat().st_size for p in logs.iterdir())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
