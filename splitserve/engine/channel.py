"""The line from rank 0 to the other ranks of its engine: steps and orders out, port events back.

ZeroMQ PAIR over a socket file in the run directory, one for each other rank. Messages of one line arrive in order, so
every rank runs the same steps in the same order; that is all that keeps the collectives of a TP group together.

    rank 0  ── Join ──▶  rank r      where to meet, before anything is loaded
            ◀─ Loaded ─              what its device has left
            ── Sized ─▶              pages and slots, equal on all ranks
            ◀─ Joined ─              its card, when it can run steps
            ── Step, Order, Poison ─▶
            ◀─ Events ─
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from splitserve import wire
from splitserve.engine.step import Step
from splitserve.errors import PeerLost
from splitserve.transfer.events import Order, PortEvent
from splitserve.wire import Card


class Join(msgspec.Struct, frozen=True, tag=True):
    engine_id: str
    group_port: int  # of the TP group's store, on this host


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """A rank has its weights; `free_bytes` of its device are left."""

    free_bytes: int


class Sized(msgspec.Struct, frozen=True, tag=True):
    """What fits on the fullest rank, and so what all take."""

    num_pages: int
    num_slots: int  # those for snapshots included
    max_len: int  # tokens that a sequence may have


class Joined(msgspec.Struct, frozen=True, tag=True):
    rank: int
    card: Card | None  # None: this engine has no transport


class Poison(msgspec.Struct, frozen=True, tag=True):
    pages: tuple[int, ...]
    slots: tuple[int, ...]


class Events(msgspec.Struct, frozen=True, tag=True):
    events: tuple[PortEvent, ...]


ToRank = Join | Sized | Step | Order | Poison
FromRank = Loaded | Joined | Events

JOIN_S = 600.0
"""Longest wait for the other ranks to load. The server ends everything at once when one of them dies."""


def address(run_dir: str, name: str, rank: int) -> str:
    return f"ipc://{run_dir}/{name}-step{rank}.sock"


class Line:
    """One end of one line."""

    def __init__(self, endpoint: str, *, bind: bool) -> None:
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 200)
        (self.socket.bind if bind else self.socket.connect)(endpoint)
        self._decoder = wire.decoder(FromRank if bind else ToRank)
        self._who = "another rank" if bind else "rank 0"

    def send(self, message: ToRank | FromRank) -> None:
        self.socket.send(wire.encode(message))

    def receive(self) -> list[Any]:
        """All messages that are here, in order."""
        out: list[Any] = []
        while True:
            try:
                raw = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return out
            out.append(wire.decode(self._decoder, raw, self._who))

    def wait(self, within_s: float) -> Any:
        """The next message. Raises PeerLost when none comes in time."""
        if not self.socket.poll(int(within_s * 1000)):
            raise PeerLost(f"no message from {self._who} within {within_s:g} s")
        return wire.decode(self._decoder, self.socket.recv(), self._who)

    def close(self) -> None:
        self.socket.close()
        self._context.term()


class Ranks:
    """Rank 0's lines to all others. With none, everything here does nothing."""

    def __init__(self, run_dir: str, name: str, size: int) -> None:
        self._lines = [Line(address(run_dir, name, r), bind=True) for r in range(1, size)]

    def free_bytes(self) -> list[int]:
        """Wait for all others to have loaded; what each has left, in rank order."""
        return [loaded.free_bytes for loaded in self._each()]

    def cards(self) -> list[Card]:
        """Wait for all others to be ready; their cards, in rank order, where they have some."""
        return [joined.card for joined in self._each() if joined.card is not None]

    def _each(self) -> list[Any]:
        """The next message of every other rank."""
        end = time.monotonic() + JOIN_S
        return [line.wait(max(0.1, end - time.monotonic())) for line in self._lines]

    def send(self, message: ToRank) -> None:
        for line in self._lines:
            line.send(message)

    def events(self) -> list[PortEvent]:
        """What the ports of the other ranks have reported."""
        return [e for line in self._lines for message in line.receive() for e in message.events]

    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        return [line.socket for line in self._lines]

    def close(self) -> None:
        for line in self._lines:
            line.close()
