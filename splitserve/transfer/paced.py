"""A transport that carries one write at a time, each for so long: a slow link, planted, where faults are allowed.

    write ──▶ queue ── its turn and its time have come (poll) ──▶ the real transport ──▶ Written, Broken

Ids are our own, since a queued write has none yet. With no throttle and nothing queued, a write goes straight on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from splitserve.errors import SplitserveError
from splitserve.transfer.around import Around
from splitserve.transfer.faults import Faults
from splitserve.transfer.layout import Copies
from splitserve.transfer.transport import Broken, Transport, TransportEvent, Written


@dataclass(frozen=True)
class _Queued:
    id: int
    due_s: float
    peer: str
    copies: Copies
    note: bytes


class Paced(Around):
    """A Transport around another one. `slow_link` is seconds a write that carries bytes."""

    def __init__(
        self, inner: Transport, faults: Faults, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(inner)
        self._faults = faults
        self._clock = clock
        self._queue: deque[_Queued] = deque()
        self._ids: dict[int, int] = {}  # the inner transport's id -> ours
        self._broken: list[TransportEvent] = []
        self._next = 0
        self._free_at = 0.0  # when the link is through with what it has

    def write(self, peer: str, copies: Copies, note: bytes) -> int:
        """Queue one write behind those before it."""
        slow = self._faults.slowness("slow_link") if len(copies) else 0.0
        if not slow and not self._queue:
            number = self._inner.write(peer, copies, note)  # before an id of ours is given: it may raise
            self._next += 1
            self._ids[number] = self._next
            return self._next
        self._next += 1
        self._free_at = max(self._clock(), self._free_at) + slow
        self._queue.append(_Queued(self._next, self._free_at, peer, copies, note))
        return self._next

    def read(self, peer: str, copies: Copies) -> int:
        """Not slowed: handoffs write."""
        number = self._inner.read(peer, copies)
        self._next += 1
        self._ids[number] = self._next
        return self._next

    def poll(self) -> list[TransportEvent]:
        """Send on what is due; then what the link under us has to say, under our ids."""
        while self._queue and self._queue[0].due_s <= self._clock():
            self._send_on(self._queue.popleft())
        events, self._broken = self._broken, []
        for event in self._inner.poll():
            match event:
                case Written(id=number):
                    events.append(Written(self._ids.pop(number)))
                case Broken(id=number, error=error):
                    events.append(Broken(self._ids.pop(number), error))
                case _:
                    events.append(event)
        return events

    def disconnect(self, peer: str) -> None:
        """Queued writes to this peer never leave."""
        self._broken += [Broken(w.id, "the peer was disconnected") for w in self._queue if w.peer == peer]
        self._queue = deque(w for w in self._queue if w.peer != peer)
        super().disconnect(peer)

    def close(self) -> None:
        self._queue.clear()
        super().close()

    def _send_on(self, write: _Queued) -> None:
        try:
            self._ids[self._inner.write(write.peer, write.copies, write.note)] = write.id
        except SplitserveError as e:
            self._broken.append(Broken(write.id, e.message))
