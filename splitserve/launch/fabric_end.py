"""One end of a link that the fabric doctor measures: a rank's memory and transport, in a process like the rank's own.

    parent ── (name of a call, arguments) ──▶ End | Copier ── (True, value) or (False, what went wrong) ──▶ parent

The process has the rank's cores, sees its engine's GPUs and no others, and takes memory where the rank keeps its state:
so UCX finds the same lanes as it will for a handoff. What is called when is fabric.py's business.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import TYPE_CHECKING

from splitserve import wire
from splitserve.config import TransferConfig
from splitserve.errors import ConfigError, PeerLost, SplitserveError, first_line
from splitserve.launch.engines.seat import visible
from splitserve.plan.fabric import PUT
from splitserve.spec import Growth, Kind, Slab, StateSpec, Units, lay_out
from splitserve.transfer import transport as transports
from splitserve.transfer.layout import copies
from splitserve.transfer.port import make_card
from splitserve.transfer.transport import Broken, Transport, Written

if TYPE_CHECKING:
    import torch

ROW = 64 << 10
POLL_S = 0.0002
CALL_S = 60.0
NO_GPU = -1


@dataclass(frozen=True)
class Spot:
    """Where a measuring process runs: its cpus, the GPUs that it sees (NVML's numbers), and its own among those."""

    cpus: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    index: int = NO_GPU


def main(line: Connection, make: Callable[[], End | Copier], spot: Spot) -> None:
    """A child: answers calls until it is told to stop or its parent has gone. Its first answer: it has started."""
    if spot.cpus:
        os.sched_setaffinity(0, spot.cpus)
    os.environ.update(visible(spot.gpus))  # CUDA reads it when it starts, which it has not yet
    try:
        end = make()
    except (SplitserveError, RuntimeError) as e:  # RuntimeError: torch's, of a full GPU or none
        line.send((False, first_line(e)))
        return
    line.send((True, None))
    with suppress(EOFError, OSError):
        while True:
            while not line.poll(POLL_S if end.attends else None):
                end.poll()
            op, args = line.recv()
            if op == "stop":
                break
            try:
                line.send((True, getattr(end, op)(*args)))
            except (SplitserveError, OSError, RuntimeError) as e:
                line.send((False, first_line(e)))
    end.close()


class Copier:
    """The yardstick of links between GPUs: one process that sees them all and copies plainly from one to another."""

    attends = False

    def poll(self) -> None:
        """It moves nothing that it has not been asked for."""

    def close(self) -> None:
        """Its memory goes with the process."""

    def rate(self, source: int, target: int, nbytes: int, seconds: float) -> float:
        """Median GB/s of single copies between GPUs as CUDA counts them here; NO_GPU: page-locked host memory."""
        from splitserve.engine.yardstick import copy_rate

        return copy_rate(source, target, nbytes, seconds)


class End:
    """One rank's memory and transport, and what can be asked of it."""

    def __init__(self, name: str, config: TransferConfig, nbytes: int, index: int = NO_GPU) -> None:
        """`nbytes` on GPU `index` of those that this process sees, or of host memory."""
        if index != NO_GPU and config.transport == "local":
            raise ConfigError("transport is local, which moves host memory only, and the state lies on a GPU")
        # The GPU first: NIXL looks at it as it starts.
        self._memory = _device_memory(nbytes, index) if index != NO_GPU else None
        self.transport: Transport = transports.make(config.transport, agent_name=f"{name}.0", config=config)
        self._layout = lay_out([StateSpec("probe", 0, Growth.PAGED, ROW)], page_tokens=1)
        if self._memory is None:
            self._memory = self.transport.allocate(nbytes)
        self._memory.fill_(1)  # touch every page of it: faults are not what is measured
        slab = Slab(Kind.PAGE, self._memory.data_ptr(), ROW, nbytes // ROW, index)
        self._card = make_card(
            self.transport,
            agent=self.transport.register([slab]),
            engine=name,
            layout=self._layout,
            slabs=[slab],
            rank=0,
            size=1,
        )
        self._peers: list[tuple[wire.Card, str]] = []
        self._door: socket.socket | None = None
        self.attends = False

    def poll(self) -> None:
        self.transport.poll()

    def card(self) -> bytes:
        return wire.encode(self._card)

    def attend(self, attends: bool) -> None:
        """Whether somebody writes or reads here and may need us to poll. Who is not met lets others have the core."""
        self.attends = attends

    def connect(self, cards: list[bytes]) -> None:
        for raw in cards:
            card = wire.decoder(wire.Card).decode(raw)
            self._peers.append((card, self.transport.connect(card)))

    def move(self, direction: str, peer: int, nbytes: int, seconds: float) -> float:
        """Median GB/s of single writes or reads, after one that nobody counts."""
        self._move(direction, peer, nbytes)
        times: list[float] = []
        end = time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < end:
            begun = time.perf_counter()
            self._move(direction, peer, nbytes)
            times.append(time.perf_counter() - begun)
        return nbytes / median(times) / 1e9

    def move_until(
        self, direction: str, peers: list[int], nbytes: int, begin: float, end: float
    ) -> list[float]:
        """GB/s to each peer while others move too; `begin` and `end` are the clock's, the same for all."""
        done = [0] * len(peers)
        while time.time() < begin:
            self.transport.poll()
        while time.time() < end:
            for k, peer in enumerate(peers):
                self._move(direction, peer, nbytes)
                done[k] += nbytes
        spent = max(time.time() - begin, end - begin)
        return [n / spent / 1e9 for n in done]

    def lane(self, target: int) -> str:
        lanes = self.transport.lanes()
        return lanes.get(self._peers[target][1]) or ", ".join(sorted(set(lanes.values())))

    def copy(self, nbytes: int, seconds: float) -> float:
        source = bytearray(nbytes)
        target = memoryview(bytearray(nbytes))
        best, end = 0.0, time.perf_counter() + seconds
        while not best or time.perf_counter() < end:
            begun = time.perf_counter()
            target[:] = source
            best = max(best, nbytes / (time.perf_counter() - begun) / 1e9)
        return best

    def listen(self) -> int:
        self._door = socket.create_server(("127.0.0.1", 0))
        return int(self._door.getsockname()[1])

    def drain(self) -> None:
        """Take one connection and read until its end."""
        assert self._door is not None
        into = bytearray(1 << 20)
        self._door.settimeout(CALL_S)
        with self._door, self._door.accept()[0] as peer:
            while peer.recv_into(into):
                pass

    def tcp(self, port: int, nbytes: int, seconds: float) -> float:
        block, sent = bytes(nbytes), 0
        with socket.create_connection(("127.0.0.1", port), timeout=CALL_S) as s:
            begun = time.perf_counter()
            while time.perf_counter() - begun < seconds:
                s.sendall(block)
                sent += nbytes
            return sent / (time.perf_counter() - begun) / 1e9

    def close(self) -> None:
        for _, handle in self._peers:
            with suppress(SplitserveError):
                self.transport.disconnect(handle)
        self.transport.close()

    def _move(self, direction: str, peer: int, nbytes: int) -> None:
        """One write or read, waited for. Raises PeerLost where it breaks."""
        card, handle = self._peers[peer]
        rows = nbytes // ROW
        units = (Units(Kind.PAGE, tuple(range(rows)), 0, 0, rows),)
        source, target = (self._card, card) if direction == PUT else (card, self._card)
        what = copies(source, target, units, units, start=0, stop=rows, last=True)
        write = direction == PUT
        number = self.transport.write(handle, what, b"") if write else self.transport.read(handle, what)
        end = time.monotonic() + CALL_S
        while time.monotonic() < end:
            for event in self.transport.poll():
                if event == Written(number):
                    return
                if isinstance(event, Broken) and event.id == number:
                    raise PeerLost(f"a {direction} broke: {event.error}")
        raise PeerLost(f"a {direction} of {nbytes} bytes did not end within {CALL_S:g} s")


def _device_memory(nbytes: int, index: int) -> torch.Tensor:
    """As a rank takes its own, with the same errors where there is no such GPU."""
    from splitserve.engine import device as devices

    return devices.allocator(devices.take("cuda", rank=0, tp=1, gpus=(index,)))(nbytes)
