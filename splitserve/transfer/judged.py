"""A transport whose writes are compared with what the fabric doctor measured: a Transport around another one.

    write ─▶ noted ─▶ the real transport          poll ◀─ its events, and Slow for a write that took far too long

It changes no byte and no event of the transport under it. What counts as slow is decided in probed.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from splitserve.transfer.around import Around
from splitserve.transfer.layout import Copies
from splitserve.transfer.probed import Expectations
from splitserve.transfer.transport import Broken, Transport, TransportEvent, Written
from splitserve.wire import Card


class Judged(Around):
    def __init__(
        self, inner: Transport, expectations: Expectations, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(inner)
        self._expectations = expectations
        self._clock = clock
        self._ranks: dict[str, int] = {}  # handle of a peer -> its rank

    def connect(self, card: Card) -> str:
        handle = self._inner.connect(card)
        self._ranks[handle] = card.tp_rank
        return handle

    def write(self, peer: str, copies: Copies, note: bytes) -> int:
        now = self._clock()
        number = self._inner.write(peer, copies, note)
        num_bytes = copies.num_bytes if len(copies) else 0
        self._expectations.posted(number, peer, self._ranks[peer], num_bytes, now, pieces=len(copies))
        return number

    def poll(self) -> list[TransportEvent]:
        events = self._inner.poll()
        ended = [e.id for e in events if isinstance(e, Written)]
        broken = [e.id for e in events if isinstance(e, Broken)]
        return [*events, *self._expectations.looked(ended, broken, self._clock())]
