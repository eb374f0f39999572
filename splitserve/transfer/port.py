"""One rank's end of every handoff: its card, its connected peers, and the bytes. Decides nothing, knows no deadlines.

    Sender, Receiver (rank 0)
          │ Order                    ▲ PortEvent
    ┌─────▼──────────────────────────┴─────┐
    │ PortGroup   the ports of all ranks   │   rank 0 only
    └─────┬────────────────────────────────┘
    ┌─────▼──────┐ copies, note    ┌────────┐
    │   Port     │────────────────▶│ peer's │   every rank
    │ digests    │◀────────────────│  Port  │
    └────────────┘           note  └────────┘

One WriteOrder becomes one write for each destination rank to which this rank owes anything of the handoff, and one
note with each, even where the chunk itself has no bytes for that link: so notes can be counted without knowing chunks.
Link (0, 0) is always noted: it carries the first token.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from splitserve import log, wire
from splitserve.errors import ConfigError, InvariantError, ProtocolError, SplitserveError
from splitserve.spec import Layout, Slab
from splitserve.transfer.digest import Digests, HostDigests, Words
from splitserve.transfer.events import (
    Compared,
    CompareOrder,
    Forget,
    Meet,
    NoteIn,
    Order,
    Part,
    PortEvent,
    PortFault,
    Settle,
    Settled,
    SlowWrite,
    TakeOrder,
    WriteDone,
    WriteOrder,
)
from splitserve.transfer.faults import Faults
from splitserve.transfer.lanes import SeenLanes
from splitserve.transfer.layout import Copies, Link
from splitserve.transfer.ledger import Pair
from splitserve.transfer.liveness import host_id, start_ticks
from splitserve.transfer.posting import Peers, Posted, Prepared, copies_of, first_row
from splitserve.transfer.probed import SlowPairs
from splitserve.transfer.transport import Broken, Lost, Noted, Slow, Transport, Written
from splitserve.wire import Card, Note

_log = log.get(__name__)

_MASK = (1 << 64) - 1


def make_card(
    transport: Transport,
    *,
    agent: bytes,
    engine: str,
    layout: Layout,
    slabs: Sequence[Slab],
    rank: int,
    size: int,
    weights: str = "",
) -> Card:
    """This rank's card: all that a peer needs to write here, and to know whether we live."""
    return Card(
        transport=transport.name,
        agent=agent,
        agent_name=f"{engine}.{rank}",
        tp_rank=rank,
        tp_size=size,
        page_tokens=layout.page_tokens,
        slabs=tuple(slabs),
        fields=(*layout.page_fields, *layout.slot_fields),
        host=host_id(),
        pid=os.getpid(),
        pid_start=start_ticks(os.getpid()),
        weights=weights,
    )


def engine_of(card: Card) -> str:
    """The id of the engine that a card belongs to."""
    return card.agent_name.rpartition(".")[0]


def links_between(sources: Sequence[Card], destinations: Sequence[Card]) -> dict[Pair, Link]:
    """(source rank, destination rank) -> what one owes the other, for all pairs of two engines.

    Raises ConfigError where the two sides' states cannot mean the same.
    """
    return {(a.tp_rank, b.tp_rank): Link(a, b) for a in sources for b in destinations}


def owed_bytes(links: Mapping[Pair, Link], *, begin: int, end: int) -> dict[Pair, int]:
    """Bytes of a handoff of tokens [begin, end) on each link that is noted."""
    owed = {pair: link.num_bytes(start=begin, stop=end, last=True) for pair, link in links.items()}
    return {pair: n for pair, n in owed.items() if n or pair == (0, 0)}


class Port:
    def __init__(
        self,
        transport: Transport,
        *,
        layout: Layout,
        slabs: Sequence[Slab],
        engine: str,
        rank: int = 0,
        size: int = 1,
        faults: Faults | None = None,
        weights: str = "",
    ) -> None:
        self._transport = transport
        self.rank = rank
        self.card = make_card(
            transport,
            agent=transport.register(slabs),
            engine=engine,
            layout=layout,
            slabs=slabs,
            rank=rank,
            size=size,
            weights=weights,
        )
        self.digests: Digests = HostDigests(slabs)  # replaced where the slabs do not lie in host memory
        self.seen_lanes = SeenLanes()
        self._faults = faults
        self._peers: dict[str, Peers] = {}  # that we may write to
        self._sources: dict[str, dict[Pair, Link]] = {}  # that write to us
        self._taken: dict[tuple[int, int], Words] = {}  # (room, chunk) -> digest of each of our fields
        self._prepared = Prepared()
        self._posted: dict[tuple[int, int, int], Posted] = {}  # (room, generation, chunk)
        self._writes: dict[int, tuple[int, int, int]] = {}  # write id -> key of _posted
        self._settling: dict[str, tuple[Card, ...]] = {}  # engines that are dead
        self._events: list[PortEvent] = []
        self._decoder = wire.decoder(Note)

    # ------------------------------------------------------------------ in

    def post(self, order: Order) -> None:
        """Begin to carry out an order. What comes of it is told by poll; nothing is raised for a peer's sake."""
        match order:
            case Meet():
                self._meet(order)
            case Part(engine=engine):
                self._part(engine)
            case TakeOrder():
                self._take(order)
            case WriteOrder():
                self._write(order)
            case CompareOrder(rank=self.rank):
                self._compare(order)
            case Settle(engine=engine, cards=cards):
                self._settling[engine] = cards
            case Forget(room=room):
                self._prepared.forget(room)
                for key in [k for k in self._taken if k[0] == room]:
                    del self._taken[key]
            case _:
                pass  # another rank's CompareOrder

    def prepare(self, order: WriteOrder) -> None:
        """Do what can be done before the rows of an order that will come are there. Nothing is read or promised."""
        found: dict[int, Copies] = {}
        peers = self._peers.get(order.engine)
        if peers is None:
            return
        try:
            for rank, handle in peers.handles.items():
                found[rank] = copies_of(order, peers.links[rank])
                self._transport.prepare(handle, found[rank])
        except SplitserveError:
            return  # the order itself will say so
        self._prepared.keep(order, found)

    def poll(self) -> list[PortEvent]:
        """Move bytes along; what has happened since the last call. Never waits."""
        for event in self._transport.poll():
            match event:
                case Written(id=number):
                    self._ended(number, "")
                case Broken(id=number, error=error):
                    self._ended(number, error)
                case Noted(sender=sender, note=raw):
                    self._noted(sender, raw)
                case Lost(peer=peer, error=error):
                    self._lost(peer, error)
                case Slow(peer=peer, rate=rate, usual=usual):
                    self._events.append(SlowWrite(self.card.agent_name, peer, rate, usual))
        for engine in [e for e, cards in self._settling.items() if all(map(self._transport.settled, cards))]:
            del self._settling[engine]
            self._events.append(Settled(self.rank, engine))
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------------ peers

    def _meet(self, order: Meet) -> None:
        if not order.write:
            self._sources[order.engine] = links_between(order.cards, [self.card])
            return
        if order.engine in self._peers:
            return
        handles: dict[int, str] = {}
        links: dict[int, Link] = {}
        try:
            for card in order.cards:
                if card.transport != self._transport.name:
                    raise ConfigError(
                        f"{card.agent_name} moves state by {card.transport}, this rank by {self._transport.name}",
                        field="transport",
                    )
                links[card.tp_rank] = Link(self.card, card)
                if links[card.tp_rank].src_fields or (self.rank, card.tp_rank) == (0, 0):
                    handles[card.tp_rank] = self._transport.connect(card)
        except SplitserveError as e:
            for handle in handles.values():
                self._transport.disconnect(handle)
            self._events.append(PortFault(self.rank, "meet", e.message, order.engine))
            return
        self._peers[order.engine] = Peers(order.cards, handles, links)

    def _part(self, engine: str) -> None:
        self._sources.pop(engine, None)
        peers = self._peers.pop(engine, None)
        for handle in peers.handles.values() if peers else ():
            self._transport.disconnect(handle)

    def _lost(self, peer: str, error: str) -> None:
        engine = next((e for e, p in self._peers.items() if peer in p.handles.values()), "")
        if engine:
            self._part(engine)
        self._events.append(PortFault(self.rank, "lost", f"{peer}: {error}", engine))

    # ------------------------------------------------------------------ out

    def _take(self, order: TakeOrder) -> None:
        self._taken[order.room, order.chunk] = self.digests.of_fields(
            self.card.fields,
            order.units,
            start=order.start,
            stop=order.stop,
            last=order.last,
        )

    def _write(self, order: WriteOrder) -> None:
        key = (order.room, order.generation, order.chunk)
        posted = self._posted[key] = Posted(order)
        peers = self._peers.get(order.engine)
        if peers is None:
            posted.error = f"rank {self.rank} is not connected to {order.engine}"
        else:
            try:
                for card in peers.cards:
                    self._write_link(order, posted, card, peers)
            except SplitserveError as e:
                posted.error = e.message
        self._finish(key)

    def _write_link(self, order: WriteOrder, posted: Posted, card: Card, peers: Peers) -> None:
        """One rank's share: its copies and its note."""
        link = peers.links[card.tp_rank]
        pair = (self.rank, card.tp_rank)
        if pair != (0, 0) and not link.num_bytes(start=order.begin, stop=order.end, last=True):
            return
        copies = self._prepared.take(order, card.tp_rank) or copies_of(order, link)
        note: Note | None = Note(
            room=order.room,
            generation=order.generation,
            src_rank=self.rank,
            chunk=order.chunk,
            bytes=copies.num_bytes,
            last=order.last,
            digest=self._link_digest(order, link, first_row(order)) if order.digested else 0,
            digested=order.digested,
            first=order.first if pair == (0, 0) else None,
        )
        if self._faults is not None and note is not None:
            copies, note = self._faults.damage(self.card, copies, note)
        raw = wire.encode(note) if note is not None else b""
        posted.began = posted.began or time.monotonic()
        number = self._transport.write(peers.handles[card.tp_rank], copies, raw)
        self._writes[number] = (order.room, order.generation, order.chunk)
        posted.ids.add(number)
        posted.bytes += copies.num_bytes
        posted.descriptors += len(copies)

    def _link_digest(self, order: WriteOrder, link: Link, start: int) -> int:
        """The digest taken when the chunk was computed, less that of the rows that decode has already."""
        taken = self._taken.get((order.room, order.chunk))
        if taken is None:
            raise ProtocolError(
                f"room {order.room}: chunk {order.chunk} is to be digested and was never taken"
            )
        whole = int(np.sum(taken[link.src_index], dtype=np.uint64))
        if start == order.start:
            return whole
        spared = self.digests.of_all(
            link.src_fields,
            order.src,
            start=order.start,
            stop=start,
            last=False,
        )
        return (whole - spared) & _MASK

    def _ended(self, number: int, error: str) -> None:
        key = self._writes.pop(number)
        posted = self._posted[key]
        posted.ids.remove(number)
        posted.error = posted.error or error
        self._finish(key)

    def _finish(self, key: tuple[int, int, int]) -> None:
        posted = self._posted[key]
        if posted.ids:
            return
        del self._posted[key]
        if posted.bytes and not posted.error:
            self._look_at_lanes(posted.order.engine)
        took = time.monotonic() - posted.began if posted.began else 0.0
        self._events.append(WriteDone(self.rank, *key, posted.bytes, posted.descriptors, posted.error, took))

    # ------------------------------------------------------------------ notes in

    def _noted(self, sender: str, raw: bytes) -> None:
        try:
            note = wire.decode(self._decoder, raw, sender)
        except ProtocolError as e:
            self._events.append(PortFault(self.rank, "note", e.message))
            return
        self._events.append(NoteIn(self.rank, sender, note))

    def _compare(self, order: CompareOrder) -> None:
        link = self._sources[order.engine][order.src_rank, self.rank]
        value = self.digests.of_all(
            link.dst_fields,
            order.units,
            start=order.start,
            stop=order.stop,
            last=True,
        )
        self._events.append(Compared(self.rank, order.room, order.generation, order.src_rank, value))

    # ------------------------------------------------------------------ the rest

    def moving(self) -> bool:
        """Whether writes are in flight."""
        return bool(self._posted)

    def lanes(self) -> dict[str, str]:
        return self._transport.lanes()

    def _look_at_lanes(self, engine: str) -> None:
        """Once for each peer, after its first bytes: reading lanes is slow, and none is known before."""
        peers = self._peers.get(engine)
        for card in peers.cards if peers else ():
            if why := self.seen_lanes.look(self.card, card, self.lanes):
                _log.warning("%s", why)

    def fds(self) -> list[int]:
        return self._transport.fds()

    def close(self) -> None:
        self._transport.close()

    def check(self) -> None:
        """Raise InvariantError when writes and orders do not agree."""
        self._transport.check()
        ids = {i for p in self._posted.values() for i in p.ids}
        if ids != set(self._writes):
            raise InvariantError(f"writes {sorted(self._writes)} in flight, orders wait for {sorted(ids)}")


class PortGroup:
    """The ports of all ranks of this engine, as Sender and Receiver see them. For one rank: just its port.

    `send` carries an Order to every other rank; what their ports report comes back through `feed`.
    """

    def __init__(
        self, port: Port, *, cards: Sequence[Card] = (), send: Callable[[Order], None] | None = None
    ) -> None:
        self.port = port
        self.cards: tuple[Card, ...] = tuple(cards) or (port.card,)
        self._send = send
        self._sent: list[WriteDone | PortFault] = []
        self._arrived: list[NoteIn | Compared | Settled] = []
        self.num_garbage = 0  # notes that were none
        self.slow = SlowPairs()

    def post(self, order: Order) -> None:
        """To every rank."""
        if self._send is not None:
            self._send(order)
        self.port.post(order)

    def feed(self, events: Sequence[PortEvent]) -> None:
        """What a port has reported."""
        for event in events:
            match event:
                case PortFault(kind="note"):
                    self.num_garbage += 1
                case SlowWrite():
                    if warning := self.slow.add(event):
                        _log.warning("%s", warning)
                case WriteDone() | PortFault():
                    self._sent.append(event)
                case NoteIn() | Compared() | Settled():
                    self._arrived.append(event)

    def sent(self) -> list[WriteDone | PortFault]:
        """Writes that have ended and peers that were lost since the last call (for Sender)."""
        self.feed(self.port.poll())
        events, self._sent = self._sent, []
        return events

    def arrived(self) -> list[NoteIn | Compared | Settled]:
        """What has come in since the last call (for Receiver)."""
        self.feed(self.port.poll())
        events, self._arrived = self._arrived, []
        return events

    @property
    def engine(self) -> str:
        """The id of this engine's life."""
        return engine_of(self.cards[0])
