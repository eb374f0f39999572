"""Whether the processes that may touch our rows are alive. Knows processes and silences, not rooms.

    same host   a pidfd for each process: readable at the instant it is gone, whatever killed it       -> Dead
    any host    the time since its last message, counted only while we were listening                  -> Silent

A process id alone proves nothing, since ids are reused: a card also carries which kernel and namespaces it runs in and
its start time in clock ticks. Where those do not match, that process is gone.

    silence   |──── silence_s ────|──── silence_s ────|
              last heard          Silent 1: quarantine Silent 2: fence
"""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import msgspec

from splitserve import log
from splitserve.errors import InvariantError
from splitserve.wire import Card

_log = log.get(__name__)

MAX_OWN_GAP_SHARE = 0.25
"""Of silence_s: a longer gap between two polls is our own absence, and counts no further against a peer."""

Fence = Callable[[Card], None]
"""Ask whoever may (the supervisor) to kill the process of a card. Death is confirmed by its pidfd, not by this call."""


class Dead(msgspec.Struct, frozen=True):
    """Every process of this engine is gone."""

    engine: str


class Silent(msgspec.Struct, frozen=True):
    """This engine has been silent for `count` whole silences."""

    engine: str
    count: int
    seconds: float


def host_id() -> str:
    """Equal in two processes only where they share a kernel and see the same process ids and the same network.

    The boot id alone would not do: in another process namespace a peer's pid names somebody else, or nobody, which
    would pass for its death.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "/".join([boot, *(str(os.stat(f"/proc/self/ns/{ns}").st_ino) for ns in ("pid", "net"))])


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot (field 22 of /proc/<pid>/stat); 0 when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(
        stat.rpartition(")")[2].split()[19]
    )  # what follows the name, which may hold anything, is field 3


@dataclass
class _Engine:
    cards: tuple[Card, ...]
    pidfds: dict[int, int]  # pid -> pidfd, of those still alive
    local: bool
    waited: float = 0.0  # seconds of silence
    count: int = 0
    dead: bool = False
    at_stake: bool = field(default=False)


class Watch:
    """The engines on the other side. `at_stake` engines are judged by their silence; all are judged by death."""

    def __init__(self, *, silence_s: float, fence: Fence | None = None) -> None:
        self._silence_s = silence_s
        self._fence = fence
        self._host = host_id()
        self._engines: dict[str, _Engine] = {}
        self._poller = select.poll()
        self._polled_at: float | None = None
        self.num_fenced = 0

    def add(self, engine: str, cards: tuple[Card, ...]) -> None:
        """Watch the processes of an engine. Known engines are left as they are."""
        if engine in self._engines:
            return
        local = bool(cards) and all(c.host == self._host for c in cards)
        entry = _Engine(cards, {}, local)
        for card in cards if local else ():
            fd = _open_pidfd(card)
            if fd is not None:
                entry.pidfds[card.pid] = fd
                self._poller.register(fd, select.POLLIN)
        self._engines[engine] = entry

    def heard(self, engine: str) -> None:
        """A message from this engine has come."""
        entry = self._engines.get(engine)
        if entry:
            entry.waited, entry.count = 0.0, 0

    def stake(self, engine: str, at_stake: bool) -> None:
        """Whether rows of ours depend on this engine's answering."""
        entry = self._engines.get(engine)
        if entry and entry.at_stake != at_stake:
            entry.at_stake, entry.waited, entry.count = at_stake, 0.0, 0

    def dead(self, engine: str) -> bool:
        entry = self._engines.get(engine)
        return bool(entry and entry.dead)

    def poll(self, now: float) -> list[Dead | Silent]:
        """What has happened since the last call; never waits. Dead is reported once."""
        gap = 0.0 if self._polled_at is None else now - self._polled_at
        self._polled_at = now
        gap = min(gap, self._silence_s * MAX_OWN_GAP_SHARE)
        gone = {fd for fd, _ in self._poller.poll(0)}
        events: list[Dead | Silent] = []
        for name, entry in self._engines.items():
            if entry.dead:
                continue
            for pid, fd in [(p, f) for p, f in entry.pidfds.items() if f in gone]:
                self._forget_pid(entry, pid, fd)
            if entry.local and not entry.pidfds:
                entry.dead = True
                events.append(Dead(name))
            elif entry.at_stake:
                entry.waited += gap
                if entry.waited >= self._silence_s * (entry.count + 1):
                    entry.count += 1
                    events.append(Silent(name, entry.count, entry.waited))
        return events

    def fence(self, engine: str) -> bool:
        """Have an engine's processes killed; False when nobody here may. Its Dead, if it comes, is the proof."""
        entry = self._engines.get(engine)
        if entry is None or entry.dead or self._fence is None:
            return False
        for card in entry.cards:
            if not entry.local or card.pid in entry.pidfds:
                _log.warning("fencing %s (pid %d): silent with rows at stake", card.agent_name, card.pid)
                self._fence(card)
        self.num_fenced += 1
        return True

    def next_deadline(self, now: float) -> float:
        """When poll may next have a Silent to tell."""
        waits = [
            self._silence_s * (e.count + 1) - e.waited
            for e in self._engines.values()
            if e.at_stake and not e.dead
        ]
        return now + max(0.0, min(waits)) if waits else inf

    def cards(self, engine: str) -> tuple[Card, ...]:
        entry = self._engines.get(engine)
        return entry.cards if entry else ()

    def remove(self, engine: str) -> None:
        """Stop watching."""
        entry = self._engines.pop(engine, None)
        if entry:
            for pid, fd in list(entry.pidfds.items()):
                self._forget_pid(entry, pid, fd)

    def fds(self) -> list[int]:
        return [fd for e in self._engines.values() for fd in e.pidfds.values()]

    def close(self) -> None:
        for engine in list(self._engines):
            self.remove(engine)

    def check(self) -> None:
        """Raise InvariantError when an open pidfd belongs to a dead engine."""
        for name, entry in self._engines.items():
            if entry.dead and entry.pidfds:
                raise InvariantError(f"{name} is dead and still watched by {len(entry.pidfds)} descriptors")

    def _forget_pid(self, entry: _Engine, pid: int, fd: int) -> None:
        self._poller.unregister(fd)
        os.close(fd)
        del entry.pidfds[pid]


def _open_pidfd(card: Card) -> int | None:
    """A descriptor of the process the card means; None when that process is gone."""
    try:
        fd = os.pidfd_open(card.pid)
    except OSError as e:
        if e.errno in (errno.ESRCH, errno.EINVAL):
            return None
        raise
    if start_ticks(card.pid) != card.pid_start:  # read after opening: the descriptor pins what we compare
        os.close(fd)
        return None
    return fd
