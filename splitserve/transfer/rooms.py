"""What Sender and Receiver keep of a room beside its table: its rows, and marks of when each thing happened.

The marks become plain records, the source of what `verify` prints and of every transfer figure:

    prefill   computed ── posted ── written        of each chunk
    decode    offered ── accepted ── noted ── end  of each chunk on each link (source rank, destination rank)

All times are of the host's monotonic clock, so that on one host both sides' records can be laid over each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from splitserve.errors import RequestError, SplitserveError
from splitserve.spec import Kind, Units
from splitserve.transfer.events import WriteOrder
from splitserve.transfer.incoming import Incoming
from splitserve.transfer.outgoing import Outgoing
from splitserve.wire import FirstToken, Offer

MAX_RECORDS = 512
"""Of the last handoffs, on each side."""

UNKNOWN_ENGINE = "unknown_engine"
"""HandoffFailed.code that asks decode to offer again, with its cards."""

Door = tuple[str, int]
"""(host, port) of a rendezvous."""


@dataclass
class HeldChunk:
    """Rows [start, stop) at prefill, kept until the room is released."""

    start: int
    stop: int
    units: tuple[Units, ...]
    last: bool
    first: FirstToken | None
    computed: float
    posted: float = 0.0
    written: float = 0.0
    # Seconds of its bytes alone, of the slowest rank; the times above are of turns of a loop.
    moving: float = 0.0


def prompt_name(tokens: Sequence[int]) -> int:
    """64 bits that two prompts share only if they are equal, as far as chance goes; never 0."""
    raw = np.asarray(tokens, dtype=np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") or 1


@dataclass
class Leaving:
    """A room at prefill."""

    id: int
    table: Outgoing
    num_tokens: int = 0  # 0 until the request comes
    prompt: int = 0  # prompt_name of its tokens; 0 where nobody said
    chunks: list[HeldChunk] = field(default_factory=list)
    offer: Offer | None = None
    peer: bytes = b""  # the connection that decode speaks through
    bytes: int = 0
    descriptors: int = 0

    def order(self, generation: int, number: int, chunk: HeldChunk) -> WriteOrder:
        """To write chunk `number` into the rows that were offered."""
        offer = self.offer
        assert offer is not None
        return WriteOrder(
            room=self.id,
            generation=generation,
            engine=offer.engine,
            chunk=number,
            src=chunk.units,
            dst=offer.units,
            start=chunk.start,
            stop=chunk.stop,
            begin=offer.start,
            end=offer.num_tokens,
            last=chunk.last,
            digested=offer.digests,
            first=chunk.first,
        )

    def disagreement(self) -> RequestError | None:
        """Why the two halves are not of one request; None where they are, or where one is not here yet."""
        offer, why = self.offer, ""
        if offer is None or not self.num_tokens:
            return None
        if offer.num_tokens != self.num_tokens:
            why = f"prefill's prompt has {self.num_tokens} tokens, decode's {offer.num_tokens}"
        elif offer.prompt and self.prompt and offer.prompt != self.prompt:
            why = f"prefill and decode were given different prompts of {self.num_tokens} tokens"
        if not why:
            return None
        fix = "send both halves the same request"
        return RequestError(f"room {self.id}: {why}", field="bootstrap_room", fix=fix)

    def posted_at(self) -> float:
        """When the first write was posted; 0 where none was."""
        return min((c.posted for c in self.chunks if c.posted), default=0.0)

    def seconds(self, now: float) -> float:
        """Since the first write."""
        posted = self.posted_at()
        return now - posted if posted else 0.0

    def record(self, *, now: float, lanes: list[str], error: SplitserveError | None) -> dict[str, Any]:
        """This handoff as plain values, at its end."""
        seconds = self.seconds(now)
        pages = {i for c in self.chunks for u in c.units if u.kind is Kind.PAGE for i in u.ids}
        return {
            **_outcome(self.id, self.table.generation, error),
            "bytes": self.bytes,
            "descriptors": self.descriptors,
            "pages": len(pages),
            "lanes": lanes,
            "seconds": seconds,
            "gb_per_s": self.bytes / seconds / 1e9 if seconds else 0.0,
            "chunks": [
                {k: getattr(c, k) for k in ("start", "stop", "computed", "posted", "written", "moving")}
                for c in self.chunks
            ],
        }


@dataclass
class Coming:
    """A room at decode."""

    id: int
    door: Door
    table: Incoming
    num_tokens: int
    start: int
    units: tuple[Units, ...]
    opened: float
    prompt: int = 0
    engine: str = ""  # the prefill engine that the rows were offered to
    digests: bool = False  # asked for
    cancelled: bool = False  # by the engine loop, which then wants no ReceiveFailed
    offered_again: bool = False
    offered: float = 0.0
    accepted: float = 0.0
    notes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def watched(self) -> set[str]:
        """Names under which the silence of the other side counts."""
        return {self.engine, door_name(self.door)} - {""}

    def record(self, *, now: float, error: SplitserveError | None) -> dict[str, Any]:
        """This handoff as plain values, at its end."""
        ledger, seconds = self.table.ledger, now - self.offered
        links = ledger.expected or {}
        return {
            **_outcome(self.id, self.table.generation, error),
            "start": self.start,
            "num_tokens": self.num_tokens,
            "bytes": ledger.num_bytes,
            "expected_bytes": sum(links.values()),
            "notes_in": ledger.num_notes,
            "seconds": seconds,
            "gb_per_s": ledger.num_bytes / seconds / 1e9 if seconds else 0.0,
            "digests": [
                {
                    "src_rank": pair[0],
                    "dst_rank": pair[1],
                    "prefill": f"{ledger.digest(pair):016x}",
                    "decode": "" if (own := ledger.own_digest(pair)) is None else f"{own:016x}",
                }
                for pair in ledger.digested()
            ],
            "opened": self.opened,
            "offered": self.offered,
            "accepted": self.accepted,
            "notes": self.notes,
            "ended": now,
        }


@dataclass
class Contact:
    """One door, and which prefill engine is behind it. Before its first Pong the door itself is watched for silence."""

    door: Door
    engine: str = ""
    told: bool = False  # this engine has our cards
    ping_at: float = 0.0

    @property
    def watched(self) -> str:
        return self.engine or door_name(self.door)


def used_before(room: int) -> RequestError:
    return RequestError(
        f"room {room} has been used already",
        field="bootstrap_room",
        fix="draw a fresh room for every attempt",
    )


def door_name(door: Door) -> str:
    return f"{door[0]}:{door[1]}"


def _outcome(room: int, generation: int, error: SplitserveError | None) -> dict[str, Any]:
    return {
        "room": room,
        "generation": generation,
        "ok": error is None,
        "error": error.message if error else "",
    }
