"""Plain data that crosses the borders of transfer/: orders to ranks, what ranks report, what the engine loop is told.

    engine loop ──open, computed, fail──▶ Sender ────┐ Order     ┌──▶ Port of rank 0
                ◀──Sent, SendFailed, Released──────   ├──────────▶├──▶ Port of rank 1   (by the step channel)
    engine loop ──open, cancel──────────▶ Receiver ──┘           └──▶ ...
                ◀──Arrived, ReceiveFailed, Released── ◀─PortEvent─┘

All are msgspec structs, so that orders and port events can travel between ranks as they are.
"""

from __future__ import annotations

import msgspec

from splitserve.spec import Units
from splitserve.wire import Card, FirstToken, Note

# ------------------------------------------------------------------ orders: rank 0 -> every rank of its engine


class Meet(msgspec.Struct, frozen=True, tag=True):
    """Know the ranks of another engine: as destinations to write to (`write`), or only to judge what they send."""

    engine: str
    cards: tuple[Card, ...]
    write: bool


class Part(msgspec.Struct, frozen=True, tag=True):
    """Forget an engine: unfinished writes to it break."""

    engine: str


class TakeOrder(msgspec.Struct, frozen=True, tag=True):
    """Take the digest of rows [start, stop) of this rank now, while they are known to be what was computed."""

    room: int
    chunk: int  # in order of computation
    units: tuple[Units, ...]
    start: int
    stop: int
    last: bool


class WriteOrder(msgspec.Struct, frozen=True, tag=True):
    """Write what this rank owes each rank of `engine` of chunk `chunk`, rows [start, stop), from `begin` on."""

    room: int
    generation: int
    engine: str
    chunk: int
    src: tuple[Units, ...]
    dst: tuple[Units, ...]
    start: int
    stop: int
    begin: int  # where the handoff begins and
    end: int  # ends: says which links exist
    last: bool
    digested: bool
    first: FirstToken | None = None  # with the last chunk only


class CompareOrder(msgspec.Struct, frozen=True, tag=True):
    """Rank `rank` of ours: take the digest of what source rank `src_rank` of `engine` owed it of rows [start, stop)."""

    rank: int
    room: int
    generation: int
    engine: str
    src_rank: int
    units: tuple[Units, ...]
    start: int
    stop: int


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Drop what is remembered of a room."""

    room: int


class Settle(msgspec.Struct, frozen=True, tag=True):
    """These processes are dead: report Settled once nothing that they sent can still land here."""

    engine: str
    cards: tuple[Card, ...]


Order = Meet | Part | TakeOrder | WriteOrder | CompareOrder | Forget | Settle

# ------------------------------------------------------------------ port events: every rank -> rank 0


class WriteDone(msgspec.Struct, frozen=True, tag=True):
    """This rank is through with one WriteOrder, on all its links. `error` is empty when every byte is in place."""

    rank: int
    room: int
    generation: int
    chunk: int
    bytes: int
    descriptors: int
    error: str = ""
    seconds: float = 0.0  # by this rank's clock, from its first bytes posted until all were seen to be there


class NoteIn(msgspec.Struct, frozen=True, tag=True):
    rank: int
    sender: str
    note: Note


class Compared(msgspec.Struct, frozen=True, tag=True):
    rank: int
    room: int
    generation: int
    src_rank: int
    digest: int


class Settled(msgspec.Struct, frozen=True, tag=True):
    rank: int
    engine: str


class PortFault(msgspec.Struct, frozen=True, tag=True):
    """Something came in, or went wrong, that belongs to no room: counted, never fatal."""

    rank: int
    kind: str  # "note": no note of ours; "meet": cannot reach `engine`; "lost": the connection to `engine` is gone
    error: str
    engine: str = ""


class SlowWrite(msgspec.Struct, frozen=True, tag=True):
    """A write took far longer than the fabric doctor's. Agent names; GB/s: `rate` at most, where `usual` was had."""

    source: str
    peer: str
    rate: float
    usual: float


PortEvent = WriteDone | NoteIn | Compared | Settled | PortFault | SlowWrite

# ------------------------------------------------------------------ what the engine loop is told


class Sent(msgspec.Struct, frozen=True, tag=True):
    """Every byte of the room is at decode. Released follows in the same poll."""

    room: int
    bytes: int
    descriptors: int
    seconds: float  # from the first write's posting to the last one's end


class SendFailed(msgspec.Struct, frozen=True, tag=True):
    """The handoff will not happen; stop computing. Rows stay the sender's until Released."""

    room: int
    code: str  # of errors.py
    status: int
    message: str


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """State [0, num_tokens) is complete in the request's rows, which are the request's alone from here on."""

    room: int
    first: FirstToken
    num_bytes: int
    digest_checked: bool
    seconds: float  # from the offer to here


class ReceiveFailed(msgspec.Struct, frozen=True, tag=True):
    """The state did not come. `retriable`: the same tokens may be computed here instead. Rows wait for Released."""

    room: int
    retriable: bool
    code: str
    status: int
    message: str


class Released(msgspec.Struct, frozen=True, tag=True):
    """Nobody can read (sender's) or write (receiver's) the room's rows any more on behalf of this handoff."""

    room: int


SenderEvent = Sent | SendFailed | Released
ReceiverEvent = Arrived | ReceiveFailed | Released
