"""Rank 0 of decode: all rooms that come to this engine. Carries out what the tables of handoff.py say.

    engine loop          Receiver                       prefill
    open ───────────────▶ Ping ───────────────────────▶ (first contact with this door only)
                                ◀────────────── Pong    who it is; from here on its process is watched
                          Offer ──────────────────────▶ our rows
                                ◀───── notes ────────── writes
    poll ◀─ Arrived ───── every link's chunks noted, bytes add up, digests agree
         ◀─ ReceiveFailed deadline, prefill refused or died, a note lost, a digest differs
         ◀─ Released ──── nobody can write to the failed room's rows any more

No row is offered to a process that is not known, since rows that an unknown process may write can never be had back.
Nothing here blocks and no clock is read.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from math import inf
from typing import Any

from splitserve import log, wire
from splitserve.config import TransferConfig
from splitserve.errors import (
    InvariantError,
    PeerLost,
    ProtocolError,
    SplitserveError,
    TransferError,
    by_code,
)
from splitserve.spec import Units
from splitserve.transfer.events import (
    Arrived,
    Compared,
    CompareOrder,
    Meet,
    NoteIn,
    Part,
    ReceiveFailed,
    ReceiverEvent,
    Released,
    Settle,
    Settled,
)
from splitserve.transfer.handoff import RX_FINAL, Action, Rx
from splitserve.transfer.incoming import Incoming
from splitserve.transfer.layout import Link
from splitserve.transfer.ledger import Pair
from splitserve.transfer.liveness import Dead, Fence, Silent, Watch
from splitserve.transfer.port import PortGroup, links_between, owed_bytes
from splitserve.transfer.rendezvous import Dial
from splitserve.transfer.rooms import (
    MAX_RECORDS,
    UNKNOWN_ENGINE,
    Coming,
    Contact,
    Door,
    door_name,
    used_before,
)
from splitserve.wire import PROTOCOL, Accepted, Cancel, Card, Drained, HandoffFailed, Offer, Ping, Pong, Room

_log = log.get(__name__)

PINGS_PER_SILENCE = 4
MAX_REMEMBERED = 10_000
"""Ids of rooms that are over: using one again is the client's error."""

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads room numbers evenly, for sampling


class Receiver:
    def __init__(
        self,
        ports: PortGroup,
        *,
        config: TransferConfig,
        fence: Fence | None = None,
    ) -> None:
        self.compare_all = False  # digests of every handoff, whatever the configured rate: for `verify`
        self._ports = ports
        self._config = config
        self._dial = Dial(allow_hosts=config.allow_hosts)
        self._watch = Watch(silence_s=config.silence_s, fence=fence)
        self._contacts: dict[Door, Contact] = {}
        self._sources: dict[str, tuple[Card, ...]] = {}  # prefill engine -> its cards
        self._links: dict[str, dict[Pair, Link]] = {}  # prefill engine -> what its ranks owe ours
        self._settling: dict[str, set[int]] = {}  # dead engine -> ranks of ours that have not settled
        self._handoffs_of: dict[str, int] = {}  # how many each engine has made, for the warm-up
        self._rooms: dict[int, Coming] = {}
        self._used: OrderedDict[int, None] = OrderedDict()
        self._events: list[ReceiverEvent] = []
        self._records: deque[dict[str, Any]] = deque(maxlen=MAX_RECORDS)
        self._counts = dict.fromkeys(
            ("received_handoffs", "received_bytes", "receive_failures", "digests_checked", "receive_late"),
            0.0,
        )

    # ------------------------------------------------------------------ from the engine loop

    def admit(self, room: Room) -> None:
        """Check a room as soon as its request comes in. Raises RequestError: host, port, or used before."""
        self._dial.check_address(room.host, room.port)
        if room.id in self._rooms or room.id in self._used:
            raise used_before(room.id)

    def open(
        self,
        room: Room,
        num_tokens: int,
        *,
        start: int,
        units: tuple[Units, ...],
        now: float,
        deadline: float = inf,
        prompt: int = 0,
    ) -> None:
        """Ask for the state of tokens [start, num_tokens), to be written into `units`. Raises as `admit`."""
        self.admit(room)
        if not 0 <= start < num_tokens:
            raise ProtocolError(f"room {room.id}: nothing to receive for tokens [{start}, {num_tokens})")
        config = self._config
        table = Incoming(
            deadline=deadline, gap_s=config.silence_s, deadline_s=config.deadline_s, again_s=config.silence_s
        )
        door = (room.host, room.port)
        self._used[room.id] = None
        while len(self._used) > MAX_REMEMBERED:
            self._used.popitem(last=False)
        entry = self._rooms[room.id] = Coming(room.id, door, table, num_tokens, start, units, now, prompt)
        contact = self._contacts.setdefault(door, Contact(door))
        if not contact.engine:
            self._watch.add(contact.watched, ())
            self._watch.stake(contact.watched, True)
            self._ping(contact, now)
        else:
            self._offer(entry, contact, now)

    def cancel(self, room: int, *, reason: str, now: float) -> None:
        """The engine no longer wants it. No ReceiveFailed follows, Released does; ended rooms are ignored."""
        entry = self._rooms.get(room)
        if entry is not None:
            entry.cancelled = True
            self._act(entry, entry.table.cancel(TransferError(reason), now=now), now)

    def poll(self, now: float) -> list[ReceiverEvent]:
        """Take messages and notes, let time pass; what the engine must know since the last call."""
        for door, message in self._dial.poll():
            self._hear(self._contacts[door], message, now)
        for event in self._ports.arrived():
            match event:
                case NoteIn():
                    self._noted(event, now)
                case Compared():
                    entry = self._rooms.get(event.room)
                    if entry and entry.table.generation == event.generation:
                        pair = (event.src_rank, event.rank)
                        self._act(entry, entry.table.compared(pair, event.digest, now=now), now)
                case Settled():
                    self._settled(event, now)
        for life in self._watch.poll(now):
            self._judge(life, now)
        for entry in list(self._rooms.values()):
            self._act(entry, entry.table.tick(now), now)
        self.work(now)
        events, self._events = self._events, []
        return events

    def work(self, now: float) -> None:
        """The part of `poll` that is safe, and due, in the middle of a step: show prefill that we live."""
        wanted = {r.door for r in self._rooms.values()}
        for door, contact in list(self._contacts.items()):
            if door in wanted and now >= contact.ping_at:
                self._ping(contact, now)
            elif (
                door not in wanted and not contact.engine
            ):  # it never answered, and nobody waits for it any more
                self._dial.hang_up(door)
                self._watch.remove(contact.watched)
                del self._contacts[door]

    # ------------------------------------------------------------------ messages of prefill

    def _hear(self, contact: Contact, message: wire.ToDecode, now: float) -> None:
        self._watch.heard(contact.watched)
        if isinstance(message, Pong):
            self._met(contact, message, now)
            return
        entry = self._rooms.get(message.room)
        if entry is None:
            self._counts["receive_late"] += 1
            return
        match message:
            case Accepted(generation=generation):
                self._accepted(entry, generation, now)
            case HandoffFailed(code=code) if code == UNKNOWN_ENGINE and not entry.offered_again:
                entry.offered_again = True
                contact.told = False
                self._act(entry, entry.table.offer(), now)
            case HandoffFailed(generation=generation, code=code, message=text):
                self._act(entry, entry.table.refused(generation, by_code(code, text), now=now), now)
            case Drained(generation=generation):
                self._act(entry, entry.table.drained(generation, now=now), now)

    def _met(self, contact: Contact, pong: Pong, now: float) -> None:
        """Somebody answers at this door: the one we know, the first one, or the successor of one that is gone."""
        if not pong.cards or contact.engine == pong.engine:
            return
        try:
            wire.check_protocol(pong.protocol, f"prefill {pong.engine}")
            self._links[pong.engine] = links_between(pong.cards, self._ports.cards)
        except SplitserveError as e:
            self._fail_waiting(contact, e, now)
            return
        if not contact.engine:
            self._watch.remove(contact.watched)
        contact.engine, contact.told = pong.engine, False
        self._sources[pong.engine] = pong.cards
        self._watch.add(pong.engine, pong.cards)
        self._ports.post(Meet(pong.engine, pong.cards, write=False))
        for entry in [r for r in self._rooms.values() if r.door == contact.door and r.table.state is Rx.OPEN]:
            self._offer(entry, contact, now)

    def _offer(self, entry: Coming, contact: Contact, now: float) -> None:
        """Make the rows known to the process behind the door."""
        number = self._handoffs_of.get(contact.engine, 0)
        self._handoffs_of[contact.engine] = number + 1
        entry.engine = contact.engine
        warming = number < self._config.digest_warmup
        entry.digests = self.compare_all or warming or _sampled(entry.id, self._config.digest_rate)
        entry.offered = now
        self._act(entry, entry.table.offer(), now)

    def _accepted(self, entry: Coming, generation: int, now: float) -> None:
        entry.accepted = now
        owed = owed_bytes(self._links[entry.engine], begin=entry.start, end=entry.num_tokens)
        self._act(entry, entry.table.accepted(generation, owed, now=now), now)

    # ------------------------------------------------------------------ notes and processes

    def _noted(self, event: NoteIn, now: float) -> None:
        note = event.note
        entry = self._rooms.get(note.room)
        if entry is None or event.sender != f"{entry.engine}.{note.src_rank}":
            self._counts["receive_late"] += 1
            return
        if note.generation == entry.table.generation:
            mark = {"src_rank": note.src_rank, "dst_rank": event.rank, "chunk": note.chunk, "at": now}
            entry.notes.append({**mark, "bytes": note.bytes})
        self._watch.heard(entry.engine)
        self._act(entry, entry.table.noted(event.rank, note, now=now), now)

    def _judge(self, life: Dead | Silent, now: float) -> None:
        if isinstance(life, Dead):
            # Not yet the end of its rooms: what it handed to the kernel may still land here.
            self._settling[life.engine] = {c.tp_rank for c in self._ports.cards}
            self._ports.post(Settle(life.engine, self._sources[life.engine]))
            for contact in [c for c in self._contacts.values() if c.engine == life.engine]:
                self._hang_up(contact)
            return
        error = PeerLost(f"prefill {life.engine} has been silent for {life.seconds:.1f} s")
        for entry in list(self._rooms.values()):
            if life.engine in entry.watched:
                self._act(entry, entry.table.silent(error, now=now), now)

    def _hang_up(self, contact: Contact) -> None:
        """Nothing more is sent to a door whose process is dead; a successor is met anew."""
        self._dial.hang_up(contact.door)
        contact.engine, contact.told, contact.ping_at = "", False, 0.0
        self._watch.add(contact.watched, ())

    def _settled(self, event: Settled, now: float) -> None:
        ranks = self._settling.get(event.engine)
        if ranks is None:
            return
        ranks.discard(event.rank)
        if ranks:
            return
        del self._settling[event.engine]
        for entry in [r for r in self._rooms.values() if r.engine == event.engine]:
            self._act(entry, entry.table.dead(PeerLost("the prefill engine has died"), now=now), now)
        self._ports.post(Part(event.engine))
        self._watch.remove(event.engine)
        self._sources.pop(event.engine, None)
        self._links.pop(event.engine, None)
        self._handoffs_of.pop(event.engine, None)

    def _fail_waiting(self, contact: Contact, error: SplitserveError, now: float) -> None:
        for entry in [r for r in self._rooms.values() if r.door == contact.door and r.table.state is Rx.OPEN]:
            self._act(entry, entry.table.fail(error, now=now), now)

    # ------------------------------------------------------------------ actions

    def _act(self, entry: Coming, actions: list[Action], now: float) -> None:
        """Carry out what a table has decided, in its order."""
        for action in actions:
            self._do(entry, action, now)
        if entry.table.state in RX_FINAL:
            self._rooms.pop(entry.id, None)
        if actions:
            self._stake(entry)

    def _do(self, entry: Coming, action: Action, now: float) -> None:
        match action.name:
            case "send_offer":
                self._send_offer(entry, action.generation)
            case "tell_cancel":
                why = str(entry.table.error)
                self._dial.send(entry.door, Cancel(entry.id, action.generation, why))
            case "compare":
                src_rank, dst_rank = action.link
                self._ports.post(
                    CompareOrder(
                        rank=dst_rank,
                        room=entry.id,
                        generation=action.generation,
                        engine=entry.engine,
                        src_rank=src_rank,
                        units=entry.units,
                        start=entry.start,
                        stop=entry.num_tokens,
                    )
                )
            case "admit":
                self._admit(entry, now)
            case "report_failed":
                self._report_failed(entry, now)
            case "fence":
                self._watch.fence(entry.engine)
            case "release":
                self._events.append(Released(entry.id))

    def _send_offer(self, entry: Coming, generation: int) -> None:
        contact = self._contacts[entry.door]
        cards = () if contact.told else self._ports.cards
        contact.told = True
        offer = Offer(
            protocol=PROTOCOL,
            room=entry.id,
            generation=generation,
            engine=self._ports.engine,
            cards=cards,
            units=entry.units,
            start=entry.start,
            num_tokens=entry.num_tokens,
            digests=entry.digests,
            prompt=entry.prompt,
            to=entry.engine,
        )
        self._dial.send(entry.door, offer)

    def _admit(self, entry: Coming, now: float) -> None:
        ledger = entry.table.ledger
        assert ledger.first is not None
        checked = entry.digests and bool(ledger.digested())
        seconds = now - entry.offered
        self._events.append(Arrived(entry.id, ledger.first, ledger.num_bytes, checked, seconds))
        self._counts["received_handoffs"] += 1
        self._counts["received_bytes"] += ledger.num_bytes
        self._counts["digests_checked"] += checked
        self._record(entry, now, None)

    def _report_failed(self, entry: Coming, now: float) -> None:
        error = entry.table.error
        assert error is not None
        self._counts["receive_failures"] += 1
        self._record(entry, now, error)
        if not entry.cancelled:
            _log.info("room %d: %s (%d bytes had come)", entry.id, error, entry.table.ledger.num_bytes)
            retriable = isinstance(error, TransferError | PeerLost)
            self._events.append(ReceiveFailed(entry.id, retriable, error.code, error.status, error.message))

    def _ping(self, contact: Contact, now: float) -> None:
        contact.ping_at = now + self._config.silence_s / PINGS_PER_SILENCE
        self._dial.send(contact.door, Ping(now, self._ports.engine))

    def _stake(self, entry: Coming) -> None:
        """A prefill engine is judged by its silence while it may write into our rows, or while we wait to meet it."""
        for engine in entry.watched:
            waits = any(
                (r.engine == engine and r.table.at_stake())
                or (r.table.state is Rx.OPEN and door_name(r.door) == engine)
                for r in self._rooms.values()
            )
            self._watch.stake(engine, waits)

    def _record(self, entry: Coming, now: float, error: SplitserveError | None) -> None:
        self._records.append(entry.record(now=now, error=error))

    # ------------------------------------------------------------------ the rest

    def rooms(self) -> set[int]:
        """Rooms that have neither arrived nor been reported Released."""
        return set(self._rooms) | {e.room for e in self._events if not isinstance(e, ReceiveFailed)}

    def moving(self) -> bool:
        """Whether there is something to poll for that no descriptor tells."""
        return (
            bool(self._events or self._settling)
            or self._dial.waiting()
            or any(r.table.at_stake() or r.table.state is Rx.CHECKING for r in self._rooms.values())
        )

    def next_deadline(self) -> float | None:
        """When poll has something to do even if nothing comes in."""
        times = [r.table.next_deadline() for r in self._rooms.values()]
        doors = {r.door for r in self._rooms.values()}
        times += [c.ping_at for c in self._contacts.values() if c.door in doors]
        soonest = min(times, default=inf)
        return soonest if soonest < inf else None

    def fds(self) -> list[int]:
        return [*self._dial.fds(), *self._watch.fds(), *self._ports.port.fds()]

    def records(self) -> list[dict[str, Any]]:
        """The last handoffs, oldest first, as plain values."""
        return list(self._records)

    def stats(self) -> dict[str, float]:
        by_state = {f"receive_{s}": 0.0 for s in Rx if s not in RX_FINAL}
        for entry in self._rooms.values():
            by_state[f"receive_{entry.table.state}"] += 1
        return {
            **self._counts,
            **by_state,
            "receive_garbage": float(self._dial.num_garbage + self._ports.num_garbage),
            "fenced_prefills": float(self._watch.num_fenced),
        }

    def close(self) -> None:
        self._watch.close()
        self._dial.close()

    def check(self) -> None:
        """Raise InvariantError when rooms and tables do not agree."""
        self._watch.check()
        for room, entry in self._rooms.items():
            entry.table.check()
            if entry.table.state in RX_FINAL:
                raise InvariantError(f"room {room} is {entry.table.state} and still open")
            if entry.table.at_stake() and entry.engine not in self._sources:
                raise InvariantError(
                    f"room {room} is {entry.table.state} and its prefill engine is not watched"
                )


def _sampled(room: int, rate: float) -> bool:
    """Whether this room is in the sample: the same answer every time, and evenly spread over rooms."""
    return (room * GOLDEN) % 2**64 < rate * 2**64
