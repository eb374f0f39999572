"""The handoff of one request's state, seen from each side. No socket, no clock, no tensor: events in, actions out.

    prefill: Outgoing                                     decode: Incoming

    NEW ─request─▶ HOLDING    chunks wait for an offer    OPEN       rows reserved, offer not out yet
     │               │ offer                                │ offer                          ─▶ Offer
    offer            ▼        ─▶ Accepted, writes         OFFERED    prefill may write at any time
     ▼             SENDING    chunk done ─▶ write           │ every chunk of every link noted
    EXPECTED ─────▶  │ last one written                   CHECKING   digests are being compared
             request ▼                                      │ equal
                   SENT       rows released               DONE       the rows are the request's

    any failure ─▶ DRAINING   writes still in flight      any failure ─▶ QUARANTINE  prefill may still write
                ─▶ FAILED     none ─▶ Drained, released               ─▶ FENCING     and will not answer: killed
                                                                      ─▶ FAILED      drained or dead: released

The one rule that matters: rows are released only when nobody can still read or write them. What may happen is data
(`SENDER`, `RECEIVER`); an event that is not in the table raises ProtocolError. outgoing.py and incoming.py feed the
tables; tests/unit/test_handoff_walk.py runs both against each other through every interleaving; docs/handoff.md is
drawn from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

from splitserve.errors import ProtocolError, SplitserveError
from splitserve.transfer.ledger import Pair


class Tx(StrEnum):
    """Where a room stands at prefill."""

    NEW = "new"  # nobody has said anything
    EXPECTED = "expected"  # decode's offer is here, the request is not
    HOLDING = "holding"  # the request is here, the offer is not
    SENDING = "sending"  # both: each computed chunk is written
    SENT = "sent"  # every byte is at decode
    DRAINING = "draining"  # failed, with writes in flight
    REFUSED = "refused"  # failed before the request came: no rows of ours
    FAILED = "failed"


class Rx(StrEnum):
    """Where a room stands at decode."""

    OPEN = "open"  # rows reserved; nobody else knows them
    OFFERED = "offered"  # prefill knows the rows
    CHECKING = "checking"  # every write has landed; digests are being compared
    DONE = "done"  # admitted
    QUARANTINE = "quarantine"  # failed, but prefill may still write
    FENCING = "fencing"  # as QUARANTINE, and its process has been asked to be killed
    FAILED = "failed"


S = TypeVar("S", bound=StrEnum)
Table = Mapping[S, Mapping[str, tuple[S, tuple[str, ...]]]]
"""state -> event -> (next state, actions in order)"""

_OVER = ("tell_failed", "tell_drained")

SENDER: Table[Tx] = {
    Tx.NEW: {
        "request": (Tx.HOLDING, ()),
        "offer": (Tx.EXPECTED, ()),
    },
    Tx.EXPECTED: {
        "request": (Tx.SENDING, ("accept",)),
        "offer": (Tx.EXPECTED, ()),
        "cancel": (Tx.REFUSED, ("tell_drained",)),
        "fail": (Tx.REFUSED, _OVER),
        "dead": (Tx.REFUSED, ()),
    },
    Tx.HOLDING: {
        "offer": (Tx.SENDING, ("accept", "write_held")),
        "computed": (Tx.HOLDING, ()),
        "cancel": (Tx.FAILED, ("tell_drained", "report_failed", "release")),
        "fail": (Tx.FAILED, ("report_failed", "release")),
    },
    Tx.SENDING: {
        "computed": (Tx.SENDING, ("write",)),
        "written": (Tx.SENDING, ()),
        "offer": (Tx.SENDING, ("accept", "write_held")),
        "all_written": (Tx.SENT, ("report_sent", "release")),
        "broken": (Tx.DRAINING, ("tell_failed", "report_failed")),
        "cancel": (Tx.DRAINING, ("report_failed",)),
        "fail": (Tx.DRAINING, ("tell_failed", "report_failed")),
        "dead": (Tx.DRAINING, ("report_failed", "disconnect")),
    },
    Tx.DRAINING: {
        "written": (Tx.DRAINING, ()),
        "broken": (Tx.DRAINING, ()),
        "offer": (Tx.DRAINING, ("tell_failed",)),
        "cancel": (Tx.DRAINING, ()),
        "fail": (Tx.DRAINING, ()),
        "dead": (Tx.DRAINING, ("disconnect",)),
        "silent": (Tx.DRAINING, ("fence",)),
        "idle": (Tx.FAILED, ("tell_drained", "release")),
        "idle_broken": (Tx.FAILED, ("release",)),
    },
    Tx.SENT: {
        "offer": (Tx.SENT, _OVER),
        "cancel": (Tx.SENT, ("tell_drained",)),
    },
    Tx.REFUSED: {
        "request": (Tx.FAILED, ("report_failed", "release")),
        "offer": (Tx.REFUSED, _OVER),
        "cancel": (Tx.REFUSED, ("tell_drained",)),
    },
    Tx.FAILED: {
        "offer": (Tx.FAILED, _OVER),
        "cancel": (Tx.FAILED, ("tell_drained",)),
    },
}
"""`all_written`, `idle` and `idle_broken` are concluded by Outgoing itself when the last write in flight has ended.
Decode may ask about a room long after its end, so final states still answer offers and cancels."""

RECEIVER: Table[Rx] = {
    Rx.OPEN: {
        "offer": (Rx.OFFERED, ("send_offer",)),
        "cancel": (Rx.FAILED, ("release",)),
        "fail": (Rx.FAILED, ("report_failed", "release")),
        "dead": (Rx.FAILED, ("report_failed", "release")),
        "silent": (Rx.FAILED, ("report_failed", "release")),
    },
    Rx.OFFERED: {
        "offer": (Rx.OFFERED, ("send_offer",)),
        "all_noted": (Rx.CHECKING, ("compare",)),
        "fail": (Rx.QUARANTINE, ("tell_cancel", "report_failed")),
        "cancel": (Rx.QUARANTINE, ("tell_cancel",)),
        "silent": (Rx.QUARANTINE, ("tell_cancel", "report_failed")),
        "refused": (Rx.QUARANTINE, ("report_failed",)),
        "drained": (Rx.FAILED, ("report_failed", "release")),
        "dead": (Rx.FAILED, ("report_failed", "release")),
    },
    Rx.CHECKING: {
        "equal": (Rx.DONE, ("admit",)),
        "fail": (Rx.FAILED, ("report_failed", "release")),
        "cancel": (Rx.FAILED, ("release",)),
        "silent": (Rx.CHECKING, ()),
        "refused": (Rx.CHECKING, ()),
        "dead": (Rx.CHECKING, ()),
    },
    Rx.QUARANTINE: {
        "all_noted": (Rx.FAILED, ("release",)),
        "drained": (Rx.FAILED, ("release",)),
        "dead": (Rx.FAILED, ("release",)),
        "silent": (Rx.FENCING, ("fence",)),
        "overdue": (Rx.FENCING, ("fence",)),
        "again": (Rx.QUARANTINE, ("tell_cancel",)),
        "fail": (Rx.QUARANTINE, ()),
        "cancel": (Rx.QUARANTINE, ()),
        "refused": (Rx.QUARANTINE, ()),
    },
    Rx.FENCING: {
        "all_noted": (Rx.FAILED, ("release",)),
        "drained": (Rx.FAILED, ("release",)),
        "dead": (Rx.FAILED, ("release",)),
        "silent": (Rx.FENCING, ()),
        "overdue": (Rx.FENCING, ()),
        "again": (Rx.FENCING, ("tell_cancel",)),
        "fail": (Rx.FENCING, ()),
        "cancel": (Rx.FENCING, ()),
        "refused": (Rx.FENCING, ()),
    },
    Rx.DONE: {},
    Rx.FAILED: {},
}
"""`all_noted` and `equal` are concluded by Incoming itself from its Ledger. After the end nothing is answered."""

TX_FINAL = frozenset({Tx.SENT, Tx.REFUSED, Tx.FAILED})
RX_FINAL = frozenset({Rx.DONE, Rx.FAILED})


class Action(msgspec.Struct, frozen=True):
    """Something the caller must do now. `chunk` belongs to "write", `link` to "compare"."""

    name: str
    generation: int = 0
    chunk: int = 0
    link: Pair = (0, 0)


class Side(Generic[S]):
    """A state, its table, and why it failed: the common part of Outgoing and Incoming."""

    def __init__(self, table: Table[S], state: S) -> None:
        self._table = table
        self.state: S = state
        self.generation = 0
        self.error: SplitserveError | None = None
        self.num_late = 0  # messages about the past: ignored and counted

    def _go(self, event: str) -> tuple[str, ...]:
        try:
            self.state, actions = self._table[self.state][event]
        except KeyError:
            where = f"{self.state.name} (generation {self.generation})"
            raise ProtocolError(f"{event!r} cannot happen in {where}") from None
        return actions

    def _because(self, error: SplitserveError) -> None:
        """The first reason is the one that counts."""
        self.error = self.error or error
