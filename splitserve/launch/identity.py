"""Which process is meant: a pid and the clock tick it started at, so that a reused pid is never mistaken for it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Identity:
    """One process of this boot. `start` is in clock ticks since boot, as in /proc/PID/stat."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """Who has this pid now; None if nobody."""
        fields = _stat(pid)
        return cls(pid, int(fields[19])) if fields else None

    @property
    def exists(self) -> bool:
        """True while the process runs or is a zombie not yet reaped."""
        return Identity.of(self.pid) == self

    @property
    def alive(self) -> bool:
        """True while it can still touch memory: a zombie cannot."""
        fields = _stat(self.pid)
        return bool(fields) and int(fields[19]) == self.start and _runs(self.pid)

    def kill_group(self) -> list[int]:
        """SIGKILL to the process group that this process leads or led; the pids that ran in it: zombies do not.

        A leader that is gone may leave members behind (its number stays taken while the group lives). They are killed
        only if their command line is ours; nobody is, if the number belongs to another process by now.
        """
        now = Identity.of(self.pid)
        if now not in (self, None):
            return []
        members = [pid for pid in _pids() if _group_of(pid) == self.pid and _runs(pid)]
        if now is None:
            members = [pid for pid in members if b"splitserve" in _bytes(f"/proc/{pid}/cmdline")]
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return members

    def kill(self) -> bool:
        """SIGKILL to this process alone, if it is still the one meant."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.alive:
                return False
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            return True
        finally:
            os.close(fd)

    def wait_gone(self, timeout_s: float) -> bool:
        """True once it no longer runs; False when `timeout_s` is over first."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if not self.alive:
                return True
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            return bool(poller.poll(timeout_s * 1000)) or not self.alive
        finally:
            os.close(fd)


def boot_id() -> str:
    """Differs after every boot of this kernel: pids and ticks of another boot mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def descendants(pid: int) -> list[Identity]:
    """Everybody below a process, children before their children."""
    children: dict[int, list[int]] = {}
    for each in _pids():
        children.setdefault(parent_of(each), []).append(each)
    below, found = [pid], []
    for parent in below:
        for child in children.get(parent, []):
            below.append(child)
            if who := Identity.of(child):
                found.append(who)
    return found


def parent_of(pid: int) -> int:
    """The parent's pid, 0 if the process is gone."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _group_of(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[2]) if fields else -1


def _runs(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on (state, ppid, ...): the name before them may hold spaces."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text[text.rindex(")") + 1 :].split()
