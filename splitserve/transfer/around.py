"""A transport around another one: the base of those that change some of what passes, and hand on the rest as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from splitserve.spec import Slab
from splitserve.transfer.layout import Copies
from splitserve.transfer.transport import Transport, TransportEvent
from splitserve.wire import Card

if TYPE_CHECKING:
    import torch


class Around:
    """A Transport. Everything here goes to the one inside; what each call promises stands in transport.py."""

    def __init__(self, inner: Transport) -> None:
        self.name = inner.name
        self._inner = inner

    def allocate(self, nbytes: int) -> torch.Tensor:
        return self._inner.allocate(nbytes)

    def register(self, slabs: Sequence[Slab]) -> bytes:
        return self._inner.register(slabs)

    def connect(self, card: Card) -> str:
        return self._inner.connect(card)

    def prepare(self, peer: str, copies: Copies) -> None:
        self._inner.prepare(peer, copies)

    def write(self, peer: str, copies: Copies, note: bytes) -> int:
        return self._inner.write(peer, copies, note)

    def read(self, peer: str, copies: Copies) -> int:
        return self._inner.read(peer, copies)

    def poll(self) -> list[TransportEvent]:
        return self._inner.poll()

    def disconnect(self, peer: str) -> None:
        self._inner.disconnect(peer)

    def settled(self, card: Card) -> bool:
        return self._inner.settled(card)

    def lanes(self) -> dict[str, str]:
        return self._inner.lanes()

    def fds(self) -> list[int]:
        return self._inner.fds()

    def close(self) -> None:
        self._inner.close()

    def check(self) -> None:
        self._inner.check()
