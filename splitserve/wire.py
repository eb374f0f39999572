"""Messages between our own processes: HTTP server <-> rank 0, rank 0 <-> other ranks, decode <-> prefill.

msgspec structs, tagged by name, encoded as msgpack. Nothing is pickled. Both ends of a connection compare `PROTOCOL`
first; a field may be added only with a default, anything else raises PROTOCOL.

    server  --- ToEngine ---> rank 0       Generate, Abort, Control
    server <--- ToServer ---- rank 0       Hello, Outputs, Failed, Reply
    decode  --- ToPrefill --> prefill      Offer, Cancel, Ping        (ZeroMQ DEALER -> ROUTER, the rendezvous)
    decode <--- ToDecode ---- prefill      Accepted, HandoffFailed, Drained, Pong
    prefill rank --- Note --> decode rank  rides on a one-sided write, after its bytes
"""

from __future__ import annotations

from typing import Any

import msgspec

from splitserve.errors import ProtocolError
from splitserve.spec import Field, Slab, Units
from splitserve.types import Rid, SamplingParams, TokenEvent, TokenLogprobs

PROTOCOL = 1

# ------------------------------------------------------------------ server -> engine


class Room(msgspec.Struct, frozen=True):
    """Where the two halves of one split request meet. `id` is 63 bits, fresh for every attempt."""

    id: int
    host: str
    port: int


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Run one request (one choice). `half` says which part of a split request this engine does, if any.

    Tokens behind `num_prompt` were emitted by another engine, whose work this one continues: they count towards
    max_tokens, penalties and the like, and the next token is the one that engine would have emitted.
    """

    rid: Rid
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    half: str = ""  # "" (all of it), "prefill", "decode"
    room: Room | None = None
    priority: int = 0  # higher first
    deadline: float = 0.0  # time.monotonic() of this host; 0 is none


class Abort(msgspec.Struct, frozen=True, tag=True):
    rid: Rid
    reason: str = "client left"


class Control(msgspec.Struct, frozen=True, tag=True):
    """An operator's call, answered by exactly one Reply with the same id.

    op: flush_cache, poison, stats, handoffs, check, plant, drain.
    """

    id: int
    op: str
    args: dict[str, Any] = {}


ToEngine = Generate | Abort | Control

# ------------------------------------------------------------------ engine -> server


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of an engine: it can serve. `facts` feeds /server_info and the start banner."""

    protocol: int
    max_len: int  # longest prompt + output this engine can hold
    facts: dict[str, Any]


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress before Hello."""

    stage: str
    done: float  # 0..1


class Outputs(msgspec.Struct, frozen=True, tag=True):
    events: tuple[TokenEvent, ...]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A request ended with an error of errors.py: its code, status and message."""

    rid: Rid
    code: str
    status: int
    message: str
    retry_after_s: float = 0.0
    field: str = ""  # of the request, where one is at fault
    fix: str = ""


class Reply(msgspec.Struct, frozen=True, tag=True):
    id: int
    ok: bool
    body: dict[str, Any]


class Load(msgspec.Struct, frozen=True, tag=True):
    """Sent when it changes, at most ten times a second: what routers and /metrics want to know."""

    num_running: int
    num_waiting: int
    queued_tokens: int
    free_pages: int
    total_pages: int
    quarantined_pages: int
    counters: dict[str, float]
    lanes: tuple[str, ...] = ()  # what carries state from here to peers, as far as any has
    slow_writes: dict[str, int] = {}  # by pair of ranks: writes far slower than the fabric doctor's


ToServer = Hello | Loading | Outputs | Failed | Reply | Load

# ------------------------------------------------------------------ decode <-> prefill


class Card(msgspec.Struct, frozen=True):
    """What a peer must know to write into one rank. Self-describing: a new kind of state changes no field."""

    transport: str
    agent: bytes  # transport's own address (NIXL agent metadata; socket and memory names for `local`)
    agent_name: str
    tp_rank: int
    tp_size: int
    page_tokens: int
    slabs: tuple[Slab, ...]
    fields: tuple[Field, ...]  # of pages, then of slots
    host: str  # boot id: equal on both sides means the same kernel, so pid and memory are reachable
    pid: int
    pid_start: int  # clock ticks since boot, so that a reused pid is not mistaken for the peer
    weights: str = (
        ""  # weights/fingerprint.py: state of other weights would be taken for one's own and answer wrongly
    )


class FirstToken(msgspec.Struct, frozen=True):
    token: int
    logprobs: TokenLogprobs | None = None
    seed: int = 0
    num_cached: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    draft: int = -1  # a guess of the token after it, where prefill makes some


class Note(msgspec.Struct, frozen=True, array_like=True):
    """Rides on one write from one source rank to one destination rank and arrives after that write's bytes.

    `digest` is over exactly the `bytes` of this write (see transfer/digest.py), 0 when digests are off.
    """

    room: int
    generation: int
    src_rank: int
    chunk: int  # 0, 1, 2 ... for each (src_rank, dst_rank)
    bytes: int
    last: bool
    digest: int = 0
    digested: bool = False
    first: FirstToken | None = None  # in the last note of source rank 0 only


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Decode has rows for this room: write tokens [start, num_tokens) into `units`. A later generation replaces it."""

    protocol: int
    room: int
    generation: int
    engine: str  # unique id of the decode engine's life; its cards are sent once
    cards: tuple[Card, ...]  # empty when this connection has already carried them
    units: tuple[Units, ...]
    start: int
    num_tokens: int
    digests: bool
    prompt: int = 0  # prompt_name of the tokens: state of another prompt would answer wrongly; 0: not told
    to: str = ""  # prefill engine's life (its id, from Pong) that may act on this; any other must refuse


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Decode no longer wants the room. Prefill answers Drained once no write can touch the rows."""

    room: int
    generation: int
    reason: str


class Ping(msgspec.Struct, frozen=True, tag=True):
    sent: float
    engine: str = ""  # the decode engine's id


ToPrefill = Offer | Cancel | Ping


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The offer found its other half. `cards` tell decode which source ranks will write and who to watch."""

    room: int
    generation: int
    cards: tuple[Card, ...]


class HandoffFailed(msgspec.Struct, frozen=True, tag=True):
    """Prefill gives up this room. `status` and `code` as in errors.py; a 4xx is never recomputed."""

    room: int
    generation: int
    code: str
    status: int
    message: str


class Drained(msgspec.Struct, frozen=True, tag=True):
    """No write of prefill's for this room and generation is, or ever will be, in flight."""

    room: int
    generation: int


class Pong(msgspec.Struct, frozen=True, tag=True):
    """Answers a Ping, and says who answers: no row is offered before its writer is known and can be watched."""

    sent: float
    engine: str = ""  # the prefill engine's id
    cards: tuple[Card, ...] = ()  # empty when this connection has already carried them
    protocol: int = 0


ToDecode = Accepted | HandoffFailed | Drained | Pong

# ------------------------------------------------------------------ coding

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder for one of the unions above (or Note). Make it once and keep it."""
    return msgspec.msgpack.Decoder(kind)


def decode(dec: msgspec.msgpack.Decoder[Any], raw: bytes, sender: str) -> Any:
    """Decode one message; ProtocolError names the sender instead of a bare msgspec error."""
    try:
        return dec.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError) as e:
        raise ProtocolError(
            f"{sender} sent {len(raw)} bytes that are no message of protocol {PROTOCOL}: {e}"
        ) from e


def check_protocol(theirs: int, who: str) -> None:
    """Raise ProtocolError when a peer speaks another protocol number."""
    if theirs != PROTOCOL:
        raise ProtocolError(
            f"{who} speaks protocol {theirs}, this process {PROTOCOL}: run one version everywhere"
        )
