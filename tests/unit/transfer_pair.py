"""A prefill and a decode side in one process, each with any number of ranks, over a transport made of two lists.

The transport keeps its promises in the most unhelpful way: writes end only when told to, notes come in reverse order,
and any write can be made to break. Sockets of the rendezvous are real; time is whatever the test says.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from splitserve.config import TransferConfig
from splitserve.errors import TransferError
from splitserve.spec import Growth, Kind, Slab, StateSpec, Units, lay_out
from splitserve.transfer.events import Order
from splitserve.transfer.faults import Faults
from splitserve.transfer.layout import Copies
from splitserve.transfer.port import Port, PortGroup
from splitserve.transfer.receiver import Receiver
from splitserve.transfer.rendezvous import Rendezvous
from splitserve.transfer.sender import Sender
from splitserve.transfer.transport import Broken, Noted, TransportEvent, Written
from splitserve.wire import Card, FirstToken, Room

PAGE_TOKENS = 4
NUM_PAGES = 32
SPECS = [StateSpec("kv", layer, Growth.PAGED, 32, pieces=4) for layer in range(3)]
SLOTTED = [*SPECS, StateSpec("window", 0, Growth.RING, 16, rows=4)]


class Network:
    """All transports of a test. `hold` keeps writes in flight; `breaks` says which notes' writes break."""

    def __init__(self) -> None:
        self.ends: dict[str, ListTransport] = {}
        self.hold = False
        self.breaks: Callable[[bytes], bool] = lambda note: False


class ListTransport:
    name = "list"

    def __init__(self, agent: str, network: Network) -> None:
        self.agent, self.network = agent, network
        self.flying: list[tuple[int, str, Copies, bytes]] = []
        self.events: list[TransportEvent] = []
        self.notes: list[Noted] = []
        self.peers: set[str] = set()
        self.count = 0
        self.prepared: list[Copies] = []
        network.ends[agent] = self

    def allocate(self, nbytes: int) -> Any:
        return np.zeros(nbytes, np.uint8)

    def register(self, slabs: Sequence[Slab]) -> bytes:
        return b""

    def connect(self, card: Card) -> str:
        self.peers.add(card.agent_name)
        return card.agent_name

    def prepare(self, peer: str, copies: Copies) -> None:
        self.prepared.append(copies)

    def write(self, peer: str, copies: Copies, note: bytes) -> int:
        if peer not in self.peers:
            raise TransferError(f"{peer} is not connected")
        self.count += 1
        self.flying.append((self.count, peer, copies, note))
        return self.count

    def poll(self) -> list[TransportEvent]:
        if not self.network.hold:
            while self.flying:
                self.land()
        events, self.events = [*self.events, *reversed(self.notes)], []
        self.notes.clear()
        return events

    def land(self) -> None:
        """The last write posted ends first."""
        number, peer, copies, note = self.flying.pop()
        if self.network.breaks(note):
            self.events.append(Broken(number, "cut"))
            return
        for (src, nbytes, _), (dst, _, _) in zip(copies.src.tolist(), copies.dst.tolist(), strict=True):
            ctypes.memmove(dst, src, nbytes)
        if note:
            self.network.ends[peer].notes.append(Noted(self.agent, note))
        self.events.append(Written(number))

    def disconnect(self, peer: str) -> None:
        self.peers.discard(peer)
        self.events += [Broken(w[0], "disconnected") for w in self.flying if w[1] == peer]
        self.flying = [w for w in self.flying if w[1] != peer]

    def settled(self, card: Card) -> bool:
        return True

    def lanes(self) -> dict[str, str]:
        return dict.fromkeys(self.peers, "a list")

    def fds(self) -> list[int]:
        return []

    def close(self) -> None: ...

    def check(self) -> None: ...


class Engine:
    """The ranks of one engine; rank 0's PortGroup hands orders to the others as the step channel would."""

    def __init__(
        self, name: str, size: int, network: Network, specs: list[StateSpec], faults: Faults | None
    ) -> None:
        self.memory: list[dict[Kind, np.ndarray]] = []
        self.ports: list[Port] = []
        for rank in range(size):
            layout = lay_out(specs, page_tokens=PAGE_TOKENS, rank=rank, size=size)
            pages = np.zeros((NUM_PAGES, layout.page_bytes), np.uint8)
            slots = np.zeros((4, layout.slot_bytes), np.uint8)
            slabs = [Slab(Kind.PAGE, pages.ctypes.data, layout.page_bytes, NUM_PAGES)]
            if layout.slot_bytes:
                slabs.append(Slab(Kind.SLOT, slots.ctypes.data, layout.slot_bytes, 4))
            self.memory.append({Kind.PAGE: pages, Kind.SLOT: slots})
            transport = ListTransport(f"{name}.{rank}", network)
            self.ports.append(
                Port(transport, layout=layout, slabs=slabs, engine=name, rank=rank, size=size, faults=faults)
            )
        self.group = PortGroup(self.ports[0], cards=[p.card for p in self.ports], send=self.send)

    def send(self, order: Order) -> None:
        raw = msgspec.msgpack.encode(order)  # it must survive the channel
        for port in self.ports[1:]:
            port.post(msgspec.msgpack.decode(raw, type=Order))

    def feed(self) -> None:
        for port in self.ports[1:]:
            self.group.feed(port.poll())

    def fill(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for rank in self.memory:
            for slab in rank.values():
                slab[:] = rng.integers(0, 256, slab.shape, np.uint8)


class TransferPair:
    """Both sides and a clock that the test moves."""

    def __init__(
        self,
        *,
        src: int = 1,
        dst: int = 1,
        specs: list[StateSpec] = SPECS,
        faults: Faults | None = None,
        dst_specs: list[StateSpec] | None = None,
        **config: Any,
    ) -> None:
        self.config = TransferConfig(**{"hold_lease_s": 5.0, "silence_s": 2.0, "deadline_s": 20.0, **config})
        self.network = Network()
        self.prefill = Engine("prefill", src, self.network, specs, faults)
        self.decode = Engine("decode", dst, self.network, dst_specs or specs, None)
        self.prefill.fill(1)
        self.door = Rendezvous()
        self.killed: list[Card] = []
        self.sender = Sender(self.prefill.group, self.door, config=self.config, fence=self.killed.append)
        self.receiver = Receiver(self.decode.group, config=self.config, fence=self.killed.append)
        self.now = 100.0
        self.sent: list[Any] = []
        self.received: list[Any] = []

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()

    def room(self, number: int) -> Room:
        return Room(number, "127.0.0.1", self.door.port)

    def open(self, room: int, num_tokens: int, *, deadline: float = 15.0) -> None:
        self.sender.open(room, num_tokens, now=self.now, deadline=self.now + deadline)

    def ask(
        self, room: int, num_tokens: int, *, start: int = 0, deadline: float = 15.0, first_page: int = 16
    ) -> None:
        units = self.units(first_page, start, num_tokens)
        self.receiver.open(
            self.room(room), num_tokens, start=start, units=units, now=self.now, deadline=self.now + deadline
        )

    def compute(self, room: int, start: int, stop: int, *, last: bool = False) -> None:
        first = FirstToken(9, seed=3) if last else None
        units = self.units(0, 0, stop)
        self.sender.computed(room, start, stop, units=units, last=last, first=first, now=self.now)

    def units(self, first_page: int, start: int, stop: int) -> tuple[Units, ...]:
        low, high = start // PAGE_TOKENS, -(-stop // PAGE_TOKENS)
        pages = Units(Kind.PAGE, tuple(range(first_page + low, first_page + high)), low, start, stop)
        return pages, Units(Kind.SLOT, (2,), 0, start, stop)

    def run(self, until: Callable[[], bool], *, step_s: float = 0.0, timeout_s: float = 10.0) -> None:
        """Poll both sides until something is so. Sockets need real moments; the clock moves by `step_s` a poll."""
        end = time.monotonic() + timeout_s
        while not until():
            assert time.monotonic() < end, f"sent {self.sent}, received {self.received}"
            self.poll()
            self.now += step_s
            time.sleep(0.0005)

    def poll(self, *, prefill: bool = True, decode: bool = True) -> None:
        if prefill:
            self.prefill.feed()
            self.sent += self.sender.poll(self.now)
            self.sender.check()
        if decode:
            self.decode.feed()
            self.received += self.receiver.poll(self.now)
            self.receiver.check()

    def kinds(self, events: list[Any], room: int) -> list[str]:
        return [type(e).__name__ for e in events if e.room == room]

    def got(self, kind: str, room: int) -> Callable[[], bool]:
        """Whether either side has reported this of a room."""
        return lambda: any(type(e).__name__ == kind and e.room == room for e in (*self.sent, *self.received))

    def over(self) -> bool:
        return not self.sender.rooms() and not self.receiver.rooms()
