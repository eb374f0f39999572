"""Writes that the destination carries out by reading: a Transport around another one, for where reads do better.

    source                                          destination
    write(copies, note) ──── Ask: which bytes ────▶ read ◀═══ bytes
    Written, Broken     ◀─── Fetched ────────────── has ended
                        ──── Plain: the note ─────▶ Noted

The note leaves only when the source, which still holds the rows then, has heard that they are there. So a destination
that falls behind and reads rows which have been given away meanwhile never takes them for what it asked for. Both sides
must agree on it: their cards name this transport "NAME+get". See doctor --fabric for when it is worth the messages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from splitserve import log
from splitserve.errors import SplitserveError, TransferError
from splitserve.spec import Slab
from splitserve.transfer.around import Around
from splitserve.transfer.layout import Copies
from splitserve.transfer.liveness import host_id, start_ticks
from splitserve.transfer.transport import Broken, Noted, Transport, TransportEvent, Written
from splitserve.wire import Card

_log = log.get(__name__)

_NOTHING = Copies(np.empty((0, 3), np.uint64), np.empty((0, 3), np.uint64))


class _Ask(msgspec.Struct, tag=True):
    """Read these: tables of layout.Copies as bytes. `card` with the first to a peer: how to reach our memory."""

    number: int
    src: bytes
    dst: bytes
    card: Card | None


class _Fetched(msgspec.Struct, tag=True):
    number: int
    error: str = ""


class _Plain(msgspec.Struct, tag=True):
    note: bytes


@dataclass
class _Asked:
    """A write of ours that the peer is to carry out."""

    peer: str
    note: bytes


class Pulled(Around):
    def __init__(self, inner: Transport, agent_name: str) -> None:
        super().__init__(inner)
        self.name = f"{inner.name}+get"
        self._agent_name = agent_name
        self._card: Card | None = None
        self._slabs: tuple[Slab, ...] = ()
        self._introduced: set[str] = set()  # peers that have our card
        self._asked: dict[int, _Asked] = {}  # our number of a write -> where it goes
        self._ends: dict[
            int, Callable[[str], None]
        ] = {}  # the inner transport's number -> what its end means
        self._fetching: dict[int, str] = {}  # reads of ours under way -> source
        self._sources: set[str] = set()  # peers that we read from
        self._events: list[TransportEvent] = []
        self._next = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(_Ask | _Fetched | _Plain)

    # ------------------------------------------------------------------ source

    def prepare(self, peer: str, copies: Copies) -> None: ...  # it is the peer who will read

    def write(self, peer: str, copies: Copies, note: bytes) -> int:
        self._next += 1
        number = self._next
        if not len(copies):
            self._say_note(peer, number, note)
            return number
        card = None if peer in self._introduced else self._card
        ask = _Ask(
            number, copies.src.astype(np.uint64).tobytes(), copies.dst.astype(np.uint64).tobytes(), card
        )
        self._asked[number] = _Asked(peer, note)
        try:
            self._say(peer, ask, lambda error: self._ask_left(number, error))
        except SplitserveError:
            del self._asked[number]
            raise
        self._introduced.add(peer)
        return number

    def _ask_left(self, number: int, error: str) -> None:
        if error and self._asked.pop(number, None) is not None:
            self._events.append(Broken(number, error))

    def _fetched(self, sender: str, fetched: _Fetched) -> None:
        """The bytes are there, or never will be; what we have given up meanwhile gets no note."""
        asked = self._asked.get(fetched.number)
        if asked is None or asked.peer != sender:
            return
        del self._asked[fetched.number]
        if fetched.error:
            self._events.append(Broken(fetched.number, fetched.error))
            return
        try:
            self._say_note(asked.peer, fetched.number, asked.note)
        except SplitserveError as e:
            self._events.append(Broken(fetched.number, e.message))

    def _say_note(self, peer: str, number: int, note: bytes) -> None:
        """The last of a write: its end is the write's."""

        def ended(error: str) -> None:
            self._events.append(Broken(number, error) if error else Written(number))

        if note:
            self._say(peer, _Plain(note), ended)
        else:
            ended("")

    def disconnect(self, peer: str) -> None:
        """A read that is still under way there finds whatever lies in our rows, and no note will follow it."""
        for number in [n for n, asked in self._asked.items() if asked.peer == peer]:
            del self._asked[number]
            self._events.append(Broken(number, "disconnected"))
        self._introduced.discard(peer)
        self._inner.disconnect(peer)

    # ------------------------------------------------------------------ destination

    def _fetch(self, sender: str, ask: _Ask) -> None:
        try:
            if ask.card is not None:
                if ask.card.agent_name != sender:
                    raise TransferError(f"{sender} shows the card of {ask.card.agent_name}")
                self._inner.connect(ask.card)
                self._sources.add(sender)
            src, dst = (np.frombuffer(raw, np.uint64).reshape(-1, 3) for raw in (ask.src, ask.dst))
            self._check_own(dst)
            read = self._inner.read(sender, Copies(src, dst))
        except (SplitserveError, ValueError) as e:
            self._answer(sender, _Fetched(ask.number, str(e) or "it cannot be read"))
            return
        self._fetching[read] = sender
        self._ends[read] = lambda error: self._read_ended(read, sender, ask.number, error)

    def _read_ended(self, read: int, sender: str, number: int, error: str) -> None:
        del self._fetching[read]
        self._answer(sender, _Fetched(number, error))

    def _answer(self, sender: str, fetched: _Fetched) -> None:
        try:
            self._say(sender, fetched, _nothing)
        except SplitserveError as e:
            _log.warning("%s cannot be told that its write has ended: %s", sender, e.message)

    def _check_own(self, dst: np.ndarray) -> None:
        """TransferError where anything lies outside of our slabs: what to change here is another process's word."""
        inside = np.zeros(len(dst), bool)
        for slab in self._slabs:
            begin, end = np.uint64(slab.addr), np.uint64(slab.addr + slab.count * slab.unit_bytes)
            inside |= (
                (dst[:, 0] >= begin) & (dst[:, 0] <= end) & (dst[:, 1] <= end - np.minimum(dst[:, 0], end))
            )
        if not inside.all():
            raise TransferError("it would be written outside of the memory that is open to peers")

    # ------------------------------------------------------------------ both

    def poll(self) -> list[TransportEvent]:
        for event in self._inner.poll():
            match event:
                case Written(id=number) if number in self._ends:
                    self._ends.pop(number)("")
                case Broken(id=number, error=error) if number in self._ends:
                    self._ends.pop(number)(error)
                case Noted(sender=sender, note=raw):
                    self._heard(sender, raw)
                case _:
                    self._events.append(event)
        events, self._events = self._events, []
        return events

    def _heard(self, sender: str, raw: bytes) -> None:
        try:
            message = self._decoder.decode(raw)
        except msgspec.DecodeError:
            self._events.append(Noted(sender, raw))  # no message of ours: the port counts it as garbage
            return
        match message:
            case _Ask():
                self._fetch(sender, message)
            case _Fetched():
                self._fetched(sender, message)
            case _Plain(note=note):
                self._events.append(Noted(sender, note))

    def _say(self, peer: str, message: _Ask | _Fetched | _Plain, ended: Callable[[str], None]) -> None:
        self._ends[self._inner.write(peer, _NOTHING, self._encoder.encode(message))] = ended

    def read(self, peer: str, copies: Copies) -> int:
        self._next += 1
        number = self._next

        def ended(error: str) -> None:
            self._events.append(Broken(number, error) if error else Written(number))

        self._ends[self._inner.read(peer, copies)] = ended
        return number

    def register(self, slabs: Sequence[Slab]) -> bytes:
        agent = self._inner.register(slabs)
        self._slabs = tuple(slabs)
        pid = os.getpid()
        self._card = Card(
            transport=self._inner.name,
            agent=agent,
            agent_name=self._agent_name,
            tp_rank=0,
            tp_size=1,
            page_tokens=1,
            slabs=self._slabs,
            fields=(),
            host=host_id(),
            pid=pid,
            pid_start=start_ticks(pid),
        )
        return agent

    def settled(self, card: Card) -> bool:
        """Nothing that a dead peer wrote is on its way: we read, and reads from it have ended. Forgets the peer."""
        if card.agent_name in self._fetching.values() or not self._inner.settled(card):
            return False
        if card.agent_name in self._sources:
            self._sources.discard(card.agent_name)
            self._inner.disconnect(card.agent_name)
        return True

    def lanes(self) -> dict[str, str]:
        return {p: "we read" if p in self._sources else "the peer reads" for p in self._inner.lanes()}


def _nothing(_: str) -> None:
    return None
