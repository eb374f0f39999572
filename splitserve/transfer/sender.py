"""Rank 0 of prefill: all rooms that leave this engine. Carries out what the tables of handoff.py say.

    engine loop          Sender                         decode
    open ───────────────▶ HOLDING  ◀──── Offer ──────── rows to write to
    computed ───────────▶ digest taken, chunk held or written at once
    poll ◀─ Sent ──────── every rank's writes have ended
         ◀─ SendFailed ── deadline, lease, decode cancelled or dead, a write broke
         ◀─ Released ──── nobody reads the rows any more

Nothing here blocks and no clock is read: time is an argument. It does not know what the rows mean.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from math import inf
from typing import Any

from splitserve.config import TransferConfig
from splitserve.errors import (
    InvariantError,
    Overloaded,
    PeerLost,
    ProtocolError,
    RequestError,
    SplitserveError,
    TransferError,
)
from splitserve.spec import Units
from splitserve.transfer.events import (
    Forget,
    Meet,
    Part,
    PortFault,
    Released,
    SenderEvent,
    SendFailed,
    Sent,
    TakeOrder,
    WriteDone,
)
from splitserve.transfer.handoff import TX_FINAL, Action, Tx
from splitserve.transfer.liveness import Dead, Fence, Silent, Watch
from splitserve.transfer.outgoing import Outgoing
from splitserve.transfer.port import PortGroup
from splitserve.transfer.rendezvous import Rendezvous
from splitserve.transfer.rooms import MAX_RECORDS, UNKNOWN_ENGINE, HeldChunk, Leaving, used_before
from splitserve.wire import (
    PROTOCOL,
    Accepted,
    Cancel,
    Drained,
    FirstToken,
    HandoffFailed,
    Offer,
    Ping,
    Pong,
)

MAX_EXPECTED = 4_096  # offers whose request has not come; more are refused
MAX_REMEMBERED = 10_000
"""Rooms that are over and still answer late messages. Then an offer is held for its lease and a Cancel is drained."""


class Sender:
    def __init__(
        self, ports: PortGroup, door: Rendezvous, *, config: TransferConfig, fence: Fence | None = None
    ) -> None:
        self._ports = ports
        self._door = door
        self._config = config
        self._watch = Watch(silence_s=config.silence_s, fence=fence)
        self._rooms: dict[int, Leaving] = {}
        self._over: OrderedDict[int, Leaving] = OrderedDict()
        self._owned: set[int] = set()  # rooms of the engine's that have not been reported Released
        self._engines: dict[str, Offer] = {}  # decode engine -> the offer that carried its cards
        self._connections: dict[bytes, str] = {}  # connection -> decode engine
        self._met: set[str] = set()  # engines that our ports were told to connect to
        self._untrusted: set[str] = set()  # engines to which a write broke while they lived
        self._events: list[SenderEvent] = []
        self._records: deque[dict[str, Any]] = deque(maxlen=MAX_RECORDS)
        self._counts = dict.fromkeys(
            ("sent_handoffs", "sent_bytes", "sent_descriptors", "sent_seconds", "send_failures", "send_late"),
            0.0,
        )

    # ------------------------------------------------------------------ from the engine loop

    def open(self, room: int, num_tokens: int, *, now: float, deadline: float = inf, prompt: int = 0) -> None:
        """A request's first half has come: its chunks will be computed. Raises RequestError for a room used before.

        `prompt` names its tokens (rooms.prompt_name); an offer for others is refused.
        """
        old = self._find(room)
        if room in self._owned or (old and old.table.state not in (Tx.EXPECTED, Tx.REFUSED)):
            raise used_before(room)
        entry = old or self._enter(room, deadline)
        self._over.pop(room, None)
        self._rooms[room] = entry
        entry.num_tokens, entry.prompt = num_tokens, prompt
        self._owned.add(room)
        self._act(entry, entry.table.request(deadline=deadline), now)
        self._compare(entry, now)

    def prepare(self, room: int, start: int, stop: int, *, units: tuple[Units, ...]) -> None:
        """A step under way ends this prompt: while nobody waits for it, work out what its last chunk will need.

        On this rank only. Unknown rooms, and those without an offer, are ignored.
        """
        entry = self._rooms.get(room)
        if entry is not None and entry.table.state is Tx.SENDING:
            chunk = HeldChunk(start, stop, units, last=True, first=None, computed=0.0)
            self._ports.port.prepare(entry.order(entry.table.generation, len(entry.chunks), chunk))

    def computed(
        self,
        room: int,
        start: int,
        stop: int,
        *,
        units: tuple[Units, ...],
        last: bool,
        first: FirstToken | None,
        now: float,
    ) -> None:
        """Rows [start, stop) lie in this engine's slabs, and stay there until Released. `first` with the last chunk.

        Their digest is taken now, before anything can overwrite them. Raises ProtocolError when chunks do not follow
        each other or the last does not end the prompt.
        """
        entry = self._rooms.get(room)
        if entry is None or entry.table.state in TX_FINAL or entry.table.state is Tx.DRAINING:
            self._counts["send_late"] += 1
            return
        begin = entry.chunks[-1].stop if entry.chunks else 0
        if start != begin or last != (stop == entry.num_tokens) or last == (first is None):
            raise ProtocolError(
                f"room {room}: chunk [{start}, {stop}), last={last}, first token {'given' if first else 'missing'}; "
                f"expected a chunk from {begin} on, the last one ending at {entry.num_tokens} with a first token"
            )
        if entry.offer is None or entry.offer.digests:
            self._ports.post(TakeOrder(room, len(entry.chunks), units, start, stop, last))
        entry.chunks.append(HeldChunk(start, stop, units, last, first, now))
        self._act(entry, entry.table.computed(last=last, now=now), now)

    def fail(self, room: int, *, now: float, error: SplitserveError | None = None, reason: str = "") -> None:
        """The engine gives up the room: decode is told why. Released follows; unknown and ended rooms are ignored."""
        entry = self._rooms.get(room)
        if entry is not None:
            why = error or TransferError(reason or "prefill gave up the request")
            self._act(entry, entry.table.fail(why), now)

    def poll(self, now: float) -> list[SenderEvent]:
        """Take messages, move bytes, let time pass; what the engine must know since the last call."""
        self.work(now)
        for life in self._watch.poll(now):
            self._judge(life, now)
        for entry in list(self._rooms.values()):
            self._act(entry, entry.table.tick(now), now)
        events, self._events = self._events, []
        self._owned -= {e.room for e in events if isinstance(e, Released)}
        return events

    def work(self, now: float) -> None:
        """The part of `poll` that is safe in the middle of a step: answer decode, post what is held, see writes end.

        Without it a step that takes long would look like silence to decode, and an offer would wait for its end.
        """
        for peer, message in self._door.poll():
            self._hear(peer, message, now)
        for event in self._ports.sent():
            if isinstance(event, WriteDone):
                self._ended(event, now)
            else:
                self._fault(event)

    # ------------------------------------------------------------------ messages of decode

    def _hear(self, peer: bytes, message: Offer | Cancel | Ping, now: float) -> None:
        match message:
            case Ping():
                new = peer not in self._connections
                cards = self._ports.cards if new else ()
                self._connections[peer] = message.engine
                self._door.send(peer, Pong(message.sent, self._ports.engine, cards, PROTOCOL))
            case Offer():
                self._offered(peer, message, now)
            case Cancel():
                self._cancelled(peer, message, now)
        self._watch.heard(self._connections.get(peer, ""))

    def _offered(self, peer: bytes, offer: Offer, now: float) -> None:
        self._connections[peer] = offer.engine
        refusal = self._refusal(offer)
        if refusal is not None:
            code, why = refusal
            self._door.send(peer, HandoffFailed(offer.room, offer.generation, code, why.status, why.message))
            self._door.send(peer, Drained(offer.room, offer.generation))
            return
        if offer.cards:
            self._engines[offer.engine] = offer
            self._watch.add(offer.engine, offer.cards)
        entry = self._find(offer.room) or self._enter(offer.room, inf)
        if offer.generation > entry.table.generation:
            entry.offer, entry.peer = offer, peer
        self._act(entry, entry.table.offer(offer.generation, now=now), now)
        self._compare(entry, now)

    def _compare(self, entry: Leaving, now: float) -> None:
        """Once both halves are here: they must be halves of one request."""
        error = entry.disagreement()
        if error is not None and entry.table.state not in TX_FINAL:
            self._act(entry, entry.table.fail(error), now)

    def _refusal(self, offer: Offer) -> tuple[str, SplitserveError] | None:
        """Why an offer, and with which code, is not even looked up: nothing is and nothing will be written for it."""
        error: SplitserveError | None = None
        entry = self._find(offer.room)
        if offer.protocol != PROTOCOL:
            error = ProtocolError(f"{offer.engine} speaks protocol {offer.protocol}, prefill {PROTOCOL}")
        elif offer.to and offer.to != self._ports.engine:
            error = PeerLost(f"prefill engine {offer.to} is gone; {self._ports.engine} has taken its place")
        elif not offer.cards and offer.engine not in self._engines:
            return UNKNOWN_ENGINE, PeerLost(f"prefill does not know the cards of {offer.engine}")
        elif entry and entry.offer and entry.offer.engine != offer.engine:
            error = RequestError(f"room {offer.room} is another decode engine's", field="bootstrap_room")
        elif entry is None and self._num_in(Tx.EXPECTED) >= MAX_EXPECTED:
            error = Overloaded(f"{MAX_EXPECTED} offers wait for their request already")
        return (error.code, error) if error else None

    def _cancelled(self, peer: bytes, cancel: Cancel, now: float) -> None:
        entry, engine = self._find(cancel.room), self._connections.get(peer, "")
        if entry is None:
            if engine not in self._untrusted:
                self._door.send(peer, Drained(cancel.room, cancel.generation))
            return
        if entry.offer and entry.offer.engine != engine:
            self._counts["send_late"] += 1
            return
        entry.peer = peer
        error = PeerLost(f"decode gave up the request: {cancel.reason}")
        self._act(entry, entry.table.cancel(cancel.generation, error), now)

    # ------------------------------------------------------------------ what ports and processes do

    def _ended(self, done: WriteDone, now: float) -> None:
        entry = self._rooms.get(done.room)
        if entry is None:
            raise InvariantError(
                f"rank {done.rank} ended a write of room {done.room}, which has none in flight"
            )
        error = None
        if done.error:
            error = TransferError(f"rank {done.rank} could not write chunk {done.chunk}: {done.error}")
            self._part(entry)
        elif done.generation == entry.table.generation:
            entry.bytes += done.bytes
            entry.descriptors += done.descriptors
            chunk = entry.chunks[done.chunk]
            chunk.written, chunk.moving = now, max(chunk.moving, done.seconds)
        self._act(entry, entry.table.ended(done.generation, done.chunk, done.rank, error=error), now)

    def _fault(self, fault: PortFault) -> None:
        """A connection could not be made or was lost: meet again at the next offer. Its writes report themselves."""
        self._leave(fault.engine)

    def _part(self, entry: Leaving) -> None:
        assert entry.offer is not None
        engine = entry.offer.engine
        if engine in self._engines:
            self._untrusted.add(engine)
        self._leave(engine)

    def _leave(self, engine: str) -> None:
        if engine in self._met:
            self._met.discard(engine)
            self._ports.post(Part(engine))

    def _judge(self, life: Dead | Silent, now: float) -> None:
        rooms = [r for r in self._rooms.values() if r.offer and r.offer.engine == life.engine]
        if isinstance(life, Silent):
            for entry in rooms if life.count >= 2 else ():
                self._act(entry, entry.table.silent(), now)
            return
        for entry in rooms:
            self._act(entry, entry.table.dead(PeerLost("the decode engine has died")), now)
        self._leave(life.engine)
        self._watch.remove(life.engine)
        self._engines.pop(life.engine, None)
        self._untrusted.discard(life.engine)
        self._connections = {p: e for p, e in self._connections.items() if e != life.engine}

    # ------------------------------------------------------------------ actions

    def _find(self, room: int) -> Leaving | None:
        return self._rooms.get(room) or self._over.get(room)

    def _num_in(self, state: Tx) -> int:
        return sum(r.table.state is state for r in self._rooms.values())

    def _enter(self, room: int, deadline: float) -> Leaving:
        table = Outgoing(
            num_ranks=len(self._ports.cards), lease_s=self._config.hold_lease_s, deadline=deadline
        )
        entry = self._rooms[room] = Leaving(room, table)
        return entry

    def _act(self, entry: Leaving, actions: list[Action], now: float) -> None:
        """Carry out what a table has decided, in its order."""
        for action in actions:
            self._do(entry, action, now)
        if actions:
            self._stake(entry)
        if entry.table.state in TX_FINAL and entry.id in self._rooms:
            del self._rooms[entry.id]
            self._over[entry.id] = entry
            while len(self._over) > MAX_REMEMBERED:
                self._over.popitem(last=False)

    def _do(self, entry: Leaving, action: Action, now: float) -> None:
        error = entry.table.error
        match action.name:
            case "accept":
                self._accept(entry)
            case "write":
                self._write(entry, action, now)
            case "tell_failed":
                assert error is not None
                failed = HandoffFailed(entry.id, action.generation, error.code, error.status, error.message)
                self._door.send(entry.peer, failed)
            case "tell_drained":
                self._door.send(entry.peer, Drained(entry.id, action.generation))
            case "report_sent":
                self._report_sent(entry, now)
            case "report_failed":
                assert error is not None
                self._counts["send_failures"] += 1
                self._events.append(SendFailed(entry.id, error.code, error.status, error.message))
                self._record(entry, now, error)
            case "disconnect":
                self._part(entry)
            case "fence":
                assert entry.offer is not None
                self._watch.fence(entry.offer.engine)
            case "release":
                self._events.append(Released(entry.id))
                self._ports.post(Forget(entry.id))
                entry.chunks.clear()

    def _accept(self, entry: Leaving) -> None:
        assert entry.offer is not None
        engine = entry.offer.engine
        if engine not in self._met:
            self._met.add(engine)
            self._ports.post(Meet(engine, self._engines[engine].cards, write=True))
        self._door.send(entry.peer, Accepted(entry.id, entry.table.generation, ()))

    def _write(self, entry: Leaving, action: Action, now: float) -> None:
        chunk = entry.chunks[action.chunk]
        chunk.posted = now
        self._ports.post(entry.order(action.generation, action.chunk, chunk))

    def _report_sent(self, entry: Leaving, now: float) -> None:
        seconds = entry.seconds(now)
        self._events.append(Sent(entry.id, entry.bytes, entry.descriptors, seconds))
        self._counts["sent_handoffs"] += 1
        self._counts["sent_bytes"] += entry.bytes
        self._counts["sent_descriptors"] += entry.descriptors
        self._counts["sent_seconds"] += seconds
        self._record(entry, now, None)

    def _record(self, entry: Leaving, now: float, error: SplitserveError | None) -> None:
        lanes = list(self._ports.port.seen_lanes.used())  # to ask the transport takes a millisecond
        self._records.append(entry.record(now=now, lanes=lanes, error=error))

    def _stake(self, entry: Leaving) -> None:
        """An engine is judged by its silence while a failed room waits for writes to it."""
        if entry.offer is None:
            return
        engine = entry.offer.engine
        waits = any(
            r.table.state is Tx.DRAINING for r in self._rooms.values() if r.offer and r.offer.engine == engine
        )
        self._watch.stake(engine, waits)

    # ------------------------------------------------------------------ the rest

    def rooms(self) -> set[int]:
        """Rooms that the engine opened and that have not been reported Released."""
        return set(self._owned)

    def moving(self) -> bool:
        """Whether there is something to poll for that no descriptor tells."""
        return self._door.waiting() or bool(self._events) or any(r.table.flying for r in self._rooms.values())

    def next_deadline(self) -> float | None:
        """When poll has something to do even if nothing comes in."""
        times = [r.table.next_deadline() for r in self._rooms.values()]
        soonest = min(times, default=inf)
        return soonest if soonest < inf else None

    def fds(self) -> list[int]:
        return [*self._door.fds(), *self._watch.fds(), *self._ports.port.fds()]

    def records(self) -> list[dict[str, Any]]:
        """The last handoffs, oldest first, as plain values."""
        return list(self._records)

    def lanes(self) -> dict[str, str]:
        return self._ports.port.lanes()

    def stats(self) -> dict[str, float]:
        by_state = {f"send_{s}": 0.0 for s in Tx if s not in TX_FINAL and s is not Tx.NEW}
        for entry in self._rooms.values():
            by_state[f"send_{entry.table.state}"] += 1
        late = sum(r.table.num_late for r in (*self._rooms.values(), *self._over.values()))
        return {
            **self._counts,
            **by_state,
            "send_late": self._counts["send_late"] + late,
            "rendezvous_garbage": float(self._door.num_garbage),
            "fenced_decodes": float(self._watch.num_fenced),
        }

    def close(self) -> None:
        self._watch.close()
        self._door.close()

    def check(self) -> None:
        """Raise InvariantError when rooms, writes in flight and tables do not agree."""
        self._ports.port.check()
        self._watch.check()
        for room, entry in self._rooms.items():
            entry.table.check()
            if entry.table.state in TX_FINAL:
                raise InvariantError(f"room {room} is {entry.table.state} and still open")
            if entry.table.state is not Tx.EXPECTED and room not in self._owned:
                raise InvariantError(f"room {room} is {entry.table.state} and nobody's")
        for room in self._owned - set(self._rooms):
            if Released(room) not in self._events:
                raise InvariantError(f"room {room} was never released")
