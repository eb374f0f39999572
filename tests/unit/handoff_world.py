"""Both sides of a handoff, the messages between them and the writes under way: every order of events, one at a time.

    Outgoing ──▶ to_rx (in order) ──▶ Incoming        flying   posted writes: may land at any time
             ◀── (in order) to_tx ◀──                 stray    broken ones, and a dead sender's: may still land
             ──▶ notes (in any order, some twice) ─▶

A World is one moment. handoff_moves.py lists what may happen next; `go` makes it happen in a copy and asserts what must
hold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from splitserve.errors import PeerLost, RequestError, TransferError
from splitserve.transfer.handoff import RX_FINAL, TX_FINAL, Action, Rx, Tx
from splitserve.transfer.incoming import Incoming
from splitserve.transfer.outgoing import Outgoing
from splitserve.wire import FirstToken, Note

T = TypeVar("T")

LATE = 1e9  # later than every deadline
CHUNK_BYTES = 10

Write = tuple[int, int, int]  # generation, chunk, source rank


@dataclass(frozen=True)
class Scenario:
    """How much of what may go wrong. Everything else, and every order, is always tried."""

    ranks: int = 2
    chunks: int = 2
    offers: int = 1  # generations that decode makes
    failures: int = 0  # local failures, on either side
    breaks: int = 0  # writes that break
    duplicates: int = 0  # notes delivered twice
    losses: int = 0  # control messages lost
    lost_notes: int = 0
    silences: int = 0
    prefill_dies: bool = False
    decode_dies: bool = False
    no_request: bool = False  # prefill's half never comes
    prefill_stops: bool = False  # for good, unless it is killed
    decode_stops: bool = False
    digests: bool = False
    wrong: bool = False  # the digest differs
    time: bool = False  # deadlines and leases may pass at any moment, not only when nothing else can happen


@dataclass
class World:
    left: Scenario
    tx: Outgoing
    rx: Incoming
    to_tx: tuple[tuple[str, int], ...] = ()
    to_rx: tuple[tuple[str, int], ...] = ()
    notes: frozenset[tuple[int, int, int]] = frozenset()  # generation, chunk, rank: noted, not delivered
    heard: frozenset[tuple[int, int, int]] = frozenset()  # delivered; may come again
    flying: frozenset[Write] = frozenset()
    stray: frozenset[Write] = frozenset()
    landed: frozenset[Write] = frozenset()
    tx_holds: bool = False
    rx_holds: str = "held"  # held, admitted, released
    tx_alive: bool = True
    rx_alive: bool = True
    tx_knows_death: bool = False
    rx_knows_death: bool = False
    fenced: frozenset[str] = frozenset()
    tx_told: tuple[str, ...] = ()  # what the engine at prefill was told
    rx_told: tuple[str, ...] = ()
    rx_cancelled: bool = False
    repeated: int = 0  # how often decode has asked again for a Drained
    lost: int = 0  # control messages
    note_lost: bool = False
    comparing: bool = False
    broke: bool = False  # a write
    stopped: frozenset[str] = frozenset()

    def key(self) -> tuple[object, ...]:
        tx, rx, ledger = self.tx, self.rx, self.rx.ledger
        return (
            self.left,
            (
                tx.state,
                tx.generation,
                tx.num_chunks,
                frozenset(tx.flying),
                frozenset(tx.superseded),
                frozenset(tx.tainted),
            ),
            (
                rx.state,
                rx.generation,
                frozenset(rx.undrained),
                ledger.expected is None,
                _noted(ledger),
                rx._overdue_at,
                rx._gap_at,
            ),
            (
                self.to_tx,
                self.to_rx,
                self.notes,
                self.heard if self.left.duplicates else (),
                self.flying,
                self.stray,
            ),
            (self.landed, self.tx_holds, self.rx_holds, self.tx_alive, self.rx_alive),
            (
                self.tx_knows_death,
                self.rx_knows_death,
                self.fenced,
                self.tx_told,
                self.rx_told,
                self.rx_cancelled,
                self.repeated,
                self.lost,
                self.note_lost,
                self.comparing,
                self.broke,
                self.stopped,
            ),
        )

    def clone(self) -> World:
        w = _copy(self)
        w.tx, w.rx = tx, rx = _copy(self.tx), _copy(self.rx)
        tx.flying, tx.superseded, tx.tainted = set(tx.flying), set(tx.superseded), set(tx.tainted)
        rx.undrained = set(rx.undrained)
        rx.ledger = _copy(rx.ledger)
        rx.ledger._notes = {pair: dict(chunks) for pair, chunks in rx.ledger._notes.items()}
        rx.ledger._digests = dict(rx.ledger._digests)
        return w

    def runs(self, who: str) -> bool:
        """Whether a side is alive and not stopped."""
        return (self.tx_alive if who == "tx" else self.rx_alive) and who not in self.stopped

    # ------------------------------------------------------------------ making it happen

    def go(self, move: tuple[str, object]) -> World:
        """The world after one move; AssertionError where it breaks a promise."""
        w = self.clone()
        name, what = move
        getattr(w, "_" + name.replace(" ", "_"))(what)
        w.tx.check()
        w.rx.check()
        w._check_told()
        return w

    def _use(self, **spent: object) -> None:
        self.left = replace(self.left, **spent)  # type: ignore[arg-type]

    def _request(self, _: object) -> None:
        self.tx_holds = True
        self.tx_told += ("requested",)
        self._tx_do(self.tx.request(deadline=1.0))

    def _computed(self, _: object) -> None:
        last = self.tx.num_chunks + 1 == self.left.chunks
        self._tx_do(self.tx.computed(last=last, now=0.0))

    def _offer(self, _: object) -> None:
        self._use(offers=self.left.offers - 1)
        self._rx_do(self.rx.offer())

    def _compare(self, equal: object) -> None:
        self.comparing = False
        for pair in self.rx.ledger.digested():
            if self.rx.state is Rx.CHECKING:
                said = self.rx.ledger.digest(pair)
                self._rx_do(self.rx.compared(pair, said if equal else said + 1, now=0.0))

    def _deliver_to_tx(self, _: object) -> None:
        (name, generation), self.to_tx = self.to_tx[0], self.to_tx[1:]
        if self.tx_knows_death:
            return  # Sender refuses the offers of an engine that it has forgotten
        if name == "offer":
            self._tx_do(self.tx.offer(generation, now=0.0))
        elif self.tx.state is Tx.NEW:
            self.to_rx += (("drained", generation),)  # Sender answers for rooms that it does not know
        else:
            self._tx_do(self.tx.cancel(generation, PeerLost("cancelled")))

    def _deliver_to_rx(self, _: object) -> None:
        (name, generation), self.to_rx = self.to_rx[0], self.to_rx[1:]
        if name == "accepted":
            links = {(rank, 0): CHUNK_BYTES * self.left.chunks for rank in range(self.left.ranks)}
            self._rx_do(self.rx.accepted(generation, links, now=0.0))
        elif name == "failed":
            self._rx_do(self.rx.refused(generation, TransferError("failed"), now=0.0))
        else:
            unasked = self.rx.state is Rx.OFFERED and generation == self.rx.generation
            assert self.lost or not unasked, "decode was told drained without a reason"
            self._rx_do(self.rx.drained(generation, now=0.0))

    def _note(self, note: object) -> None:
        self.notes -= {note}
        self.heard |= {note}
        self._deliver_note(note)

    def _note_again(self, note: object) -> None:
        self._use(duplicates=self.left.duplicates - 1)
        self._deliver_note(note)

    def _lose_note(self, note: object) -> None:
        self._use(lost_notes=self.left.lost_notes - 1)
        self.notes -= {note}
        self.note_lost = True

    def _deliver_note(self, note: tuple[int, int, int]) -> None:
        generation, chunk, rank = note
        last = chunk == self.left.chunks - 1
        first = FirstToken(1) if last and rank == 0 else None
        sent = Note(7, generation, rank, chunk, CHUNK_BYTES, last, 5, self.left.digests, first)
        self._rx_do(self.rx.noted(0, sent, now=0.0))

    def _land(self, write: Write) -> None:
        self.flying -= {write}
        self._arrive(write)
        self.notes |= {write}
        self._tx_do(self.tx.ended(*write))

    def _break(self, write: Write) -> None:
        self._use(breaks=self.left.breaks - 1)
        self.broke = True
        self.flying -= {write}
        self.stray |= {write}
        self._tx_do(self.tx.ended(*write, error=TransferError("broke")))

    def _stray_lands(self, write: Write) -> None:
        self.stray -= {write}
        self._arrive(write)

    def _stray_vanishes(self, write: Write) -> None:
        self.stray -= {write}

    def _arrive(self, write: Write) -> None:
        self.landed |= {write}
        if self.rx_alive:
            assert self.rx_holds == "held", f"write {write} landed in rows that are {self.rx_holds}"

    def _tx_fails(self, _: object) -> None:
        self._use(failures=self.left.failures - 1)
        self._tx_do(self.tx.fail(TransferError("failed")))

    def _rx_fails(self, _: object) -> None:
        self._use(failures=self.left.failures - 1)
        self._rx_do(self.rx.fail(TransferError("failed"), now=0.0))

    def _rx_cancels(self, _: object) -> None:
        self._use(failures=self.left.failures - 1)
        self.rx_cancelled = True
        self._rx_do(self.rx.cancel(RequestError("client left"), now=0.0))

    def _lose_to_tx(self, _: object) -> None:
        self._use(losses=self.left.losses - 1)
        self.lost += 1
        self.to_tx = self.to_tx[1:]

    def _lose_to_rx(self, _: object) -> None:
        self._use(losses=self.left.losses - 1)
        self.lost += 1
        self.to_rx = self.to_rx[1:]

    def _rx_hears_nothing(self, _: object) -> None:
        self._use(silences=max(0, self.left.silences - 1))
        self._rx_do(self.rx.silent(PeerLost("silent"), now=0.0))

    def _tx_hears_nothing(self, _: object) -> None:
        self._use(silences=max(0, self.left.silences - 1))
        self._tx_do(self.tx.silent())

    def _tx_dies(self, _: object) -> None:
        self._use(prefill_dies=False)
        self.tx_alive = False
        self.stray |= self.flying
        self.flying = frozenset()

    def _rx_dies(self, _: object) -> None:
        self._use(decode_dies=False)
        self.rx_alive = False

    def _tx_stops(self, _: object) -> None:
        self._use(prefill_stops=False)
        self.stopped |= {"tx"}

    def _rx_stops(self, _: object) -> None:
        self._use(decode_stops=False)
        self.stopped |= {"rx"}

    def _rx_learns_of_death(self, _: object) -> None:
        self.rx_knows_death = True
        self._rx_do(self.rx.dead(PeerLost("died"), now=0.0))

    def _tx_learns_of_death(self, _: object) -> None:
        self.tx_knows_death = True
        self._tx_do(self.tx.dead(PeerLost("died")))

    def _tx_is_late(self, _: object) -> None:
        self._tx_do(self.tx.tick(LATE))

    def _rx_is_late(self, _: object) -> None:
        self._rx_do(self.rx.tick(LATE))

    def _rx_misses_a_note(self, _: object) -> None:
        self._rx_do(self.rx.tick(self.rx._gap_at))

    def _rx_asks_again(self, _: object) -> None:
        self.repeated += 1
        self._rx_do(self.rx.tick(self.rx._again_at))
        if not self.tx_alive:
            self.to_tx = ()

    def _rx_waits_on(self, _: object) -> None:
        self._rx_do(self.rx.tick(self.rx._overdue_at))

    # ------------------------------------------------------------------ actions

    def _tx_do(self, actions: list[Action]) -> None:
        for action in actions:
            name, g = action.name, action.generation
            if name == "write":
                assert self.tx_holds, "a write was posted from rows that prefill does not hold"
                if self.rx_alive:
                    assert self.rx_holds == "held", f"a write was posted into rows that are {self.rx_holds}"
                self.flying |= {(g, action.chunk, rank) for rank in range(self.left.ranks)}
            elif name == "release":
                assert self.tx_holds, "prefill released twice"
                assert not self.flying, "prefill let its rows go under a write"
                self.tx_holds = False
            elif name in ("accept", "tell_failed", "tell_drained"):
                message = {"accept": "accepted", "tell_failed": "failed", "tell_drained": "drained"}[name]
                self.to_rx += ((message, g),)
                if message == "drained":
                    assert not any(w[0] == g for w in (*self.flying, *self.stray)), (
                        "drained with writes under way"
                    )
            elif name == "disconnect":
                self.stray |= self.flying
                broken, self.flying = self.flying, frozenset()
                for write in sorted(broken):
                    self._tx_do(self.tx.ended(*write, error=PeerLost("disconnected")))
            elif name == "fence":
                self.fenced |= {"rx"}
            else:
                self.tx_told += (name,)

    def _rx_do(self, actions: list[Action]) -> None:
        for action in actions:
            name, g = action.name, action.generation
            if name == "send_offer":
                assert self.rx_holds == "held", "decode offered rows that it does not hold"
                self.to_tx += (("offer", g),)
            elif name == "tell_cancel":
                self.to_tx += (("cancel", g),)
            elif name == "admit":
                assert self.rx_holds == "held", f"decode admitted rows that are {self.rx_holds}"
                everything = {(g, c, r) for c in range(self.left.chunks) for r in range(self.left.ranks)}
                assert everything <= self.landed, f"admitted without {everything - self.landed}"
                assert not self.left.digests or self.rx.ledger._digests, "admitted without comparing digests"
                self._let_go("admitted")
                self.rx_told += ("admit",)
            elif name == "release":
                assert self.rx_holds == "held", f"decode released rows that are {self.rx_holds}"
                self._let_go("released")
            elif name == "fence":
                self.fenced |= {"tx"}
            elif name == "compare":
                self.comparing = True
            else:
                self.rx_told += (name,)

    def _let_go(self, how: str) -> None:
        assert not self.flying | self.stray, f"decode's rows were {how} with writes under way"
        self.rx_holds = how

    # ------------------------------------------------------------------ the end

    def _check_told(self) -> None:
        """Whoever is through has told its engine, once."""
        if self.tx_alive and "requested" in self.tx_told:
            told = [t for t in self.tx_told if t in ("report_sent", "report_failed")]
            assert len(told) == (self.tx.state in (*TX_FINAL, Tx.DRAINING)), (
                f"prefill's engine was told {told}"
            )
        told = [t for t in self.rx_told if t in ("admit", "report_failed")]
        ended = self.rx.state in (*RX_FINAL, Rx.QUARANTINE, Rx.FENCING)
        assert len(told) == ended or (self.rx_cancelled and not told), f"decode's engine was told {told}"
        assert (self.rx_holds == "admitted") == ("admit" in told), f"told {told}, rows {self.rx_holds}"

    def check_end(self) -> None:
        """Nothing more can happen: both sides are through and no rows are lost."""
        if self.runs("tx") and not (self.left.no_request and self.tx.state is Tx.NEW):
            assert self.tx.state in TX_FINAL, f"prefill is stuck in {self.tx.state}"
            assert not self.tx_holds, "prefill's rows are lost"
        if self.runs("rx"):
            assert self.rx.state in RX_FINAL, f"decode is stuck in {self.rx.state}"
            assert self.rx_holds != "held", "decode's rows are lost"


def _copy(thing: T) -> T:
    """copy.copy without its ceremony: a walk spends its time here."""
    new = object.__new__(type(thing))
    new.__dict__.update(thing.__dict__)
    return new


def _noted(ledger: object) -> frozenset[tuple[object, int]]:
    return frozenset((pair, c) for pair, chunks in ledger._notes.items() for c in chunks)  # type: ignore[attr-defined]
