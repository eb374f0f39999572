"""What moves bytes between two ranks: the interface, its events, and the one place that picks an implementation.

A transport writes one-sidedly into memory that a peer has registered, and each write carries a note that reaches the
peer after its bytes (never a promise about other writes). It knows no rooms, no layouts and no requests.

    source rank                                     destination rank
    write(peer, copies, note) ── bytes ───────────▶ (memory changes; nobody is told)
                              ── note ────────────▶ poll() -> Noted(sender, note)
    poll() -> Written(id) | Broken(id)

`nixl` (transfer/nixl.py) is the real one, `local` (transfer/local.py) needs nothing but Linux. Both pass one
conformance test. This module imports neither of them, nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import msgspec

from splitserve.config import TransferConfig
from splitserve.errors import ConfigError
from splitserve.spec import Slab
from splitserve.wire import Card

if TYPE_CHECKING:
    import torch

    from splitserve.transfer.layout import Copies


class Written(msgspec.Struct, frozen=True, tag=True):
    """The bytes of write `id` lie in the peer's memory and its note follows (or has arrived)."""

    id: int


class Broken(msgspec.Struct, frozen=True, tag=True):
    """Write `id` did not finish and never will be retried. Part of its bytes may have landed, its note has not.

    Nothing reads the source memory of this write any more. Whether bytes that had already left may still land at
    the peer is unknown: only the peer's own `settled` can tell.
    """

    id: int
    error: str


class Noted(msgspec.Struct, frozen=True, tag=True):
    """A peer's note. `sender` is the peer's agent name as the transport knows it."""

    sender: str
    note: bytes


class Lost(msgspec.Struct, frozen=True, tag=True):
    """The connection to `peer` is gone; writes to it have been or will be reported Broken."""

    peer: str
    error: str


class Slow(msgspec.Struct, frozen=True, tag=True):
    """A write to `peer` that has ended took far longer than the fabric doctor's. GB/s: `rate` at most, not `usual`."""

    peer: str
    rate: float
    usual: float


TransportEvent = Written | Broken | Noted | Lost | Slow


class Transport(Protocol):
    """One rank's end. Not thread safe: one thread calls everything. Nothing here blocks for longer than one copy."""

    name: str

    def allocate(self, nbytes: int) -> torch.Tensor:
        """`nbytes` zeroed bytes (uint8) that `register` accepts; the tensor owns the memory."""
        ...

    def register(self, slabs: Sequence[Slab]) -> bytes:
        """Open this rank's memory to peers; once. Returns the address that goes into the Card (`Card.agent`)."""
        ...

    def connect(self, card: Card) -> str:
        """Make a peer's memory writable; returns its handle. Raises TransferError when it cannot be reached."""
        ...

    def prepare(self, peer: str, copies: Copies) -> None:
        """A hint: these very `copies` will soon be written to `peer`. Reads no memory and never raises."""
        ...

    def write(self, peer: str, copies: Copies, note: bytes) -> int:
        """Post one write; returns its id, unique in this transport. No copies: only the note is sent.

        Raises TransferError when the write cannot even be posted (nothing was read or written then).
        """
        ...

    def read(self, peer: str, copies: Copies) -> int:
        """Fetch: `copies.src` lies at the peer, `copies.dst` here. Ends as a write does, and nobody is sent a note."""
        ...

    def poll(self) -> list[TransportEvent]:
        """Make progress and return what happened since the last call. Never waits."""
        ...

    def disconnect(self, peer: str) -> None:
        """No new writes to this peer; unfinished ones are reported Broken by a later poll."""
        ...

    def settled(self, card: Card) -> bool:
        """Whether nothing that a *dead* peer sent can still change this rank's memory.

        A dead process writes nothing, but bytes it had handed to the kernel may still wait to be applied by our own
        `poll`. Call poll between two calls.
        """
        ...

    def lanes(self) -> dict[str, str]:
        """For each connected peer, what really carries the bytes, for example "cma" or "tcp/lo"."""
        ...

    def fds(self) -> list[int]:
        """File descriptors that become readable when poll has something to do; may be empty (then poll often)."""
        ...

    def close(self) -> None:
        """Let go of everything; idempotent."""
        ...

    def check(self) -> None:
        """Raise InvariantError when writes, handles or peers do not add up."""
        ...


def make(name: str, *, agent_name: str, config: TransferConfig) -> Transport:
    """The transport called `name`. Imports it only now: NIXL pulls in a large library.

    `agent_name` must be unique among all engines that may meet. Raises ConfigError for an unknown name or where the
    host cannot run it.
    """
    if config.direction == "get":
        from splitserve.transfer.pulled import Pulled

        inner = make(name, agent_name=agent_name, config=replace(config, direction="put"))
        pulled: Transport = Pulled(inner, agent_name)
        return pulled
    if name == "local":
        from splitserve.transfer.local import LocalTransport

        local: Transport = LocalTransport(agent_name)
        return local
    if name == "nixl":
        from splitserve.transfer.nixl import NixlTransport

        nixl: Transport = NixlTransport(agent_name, config)
        return nixl
    raise ConfigError(f"transport is {name!r}", field="transport", fix="one of nixl, local")
