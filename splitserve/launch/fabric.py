"""`doctor --fabric`: the links between prefill and decode ranks, measured by processes like theirs on their cores.

    source process i                         target process j
      put: writes of each size, alone  ────▶   registered memory, polls
      put: all i ──▶ j of a pairing at once
      memcpy and a plain socket on the same cores, as yardsticks

The writes go through the same transport, with the same settings, as a handoff's. What the rates mean is decided in
plan/fabric.py. Host memory only: ranks on GPUs are measured by `splitserve verify` on their real state.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from splitserve import wire
from splitserve.config import TransferConfig
from splitserve.errors import ConfigError, PeerLost, SplitserveError
from splitserve.plan.fabric import Fabric, Link
from splitserve.spec import Growth, Kind, Slab, StateSpec, Units, lay_out
from splitserve.transfer import transport as transports
from splitserve.transfer.layout import copies
from splitserve.transfer.port import make_card
from splitserve.transfer.transport import Broken, Transport, Written

SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)
ROW = 64 << 10
CELL_S = 0.15
"""Time for each size of each pair: enough writes for a median, so that sixteen pairs stay under a minute."""

TOGETHER_S = 0.5
POLL_S = 0.0002
START_S = 120.0
CALL_S = 60.0

Cores = tuple[tuple[int, ...], ...]
"""For each rank, the cpus of its process; empty: any."""


def measure(config: TransferConfig, *, sources: Cores, targets: Cores, say: Callable[[str], None]) -> Fabric:
    """All pairs of ranks on this host. ConfigError where the transport does not start, PeerLost where one dies."""
    with ExitStack() as closing:
        ends = [
            closing.enter_context(_child(role, i, cpus, config))
            for role, group in (("source", sources), ("target", targets))
            for i, cpus in enumerate(group)
        ]
        writers, readers = ends[: len(sources)], ends[len(sources) :]
        say(f"{len(ends)} processes started")
        cards = [reader.call("card") for reader in readers]
        for writer in writers:
            writer.call("connect", cards)
        links = []
        for i, writer in enumerate(writers):
            for j in range(len(readers)):
                say(f"prefill rank {i} to decode rank {j}")
                alone = {size: writer.call("put", j, size, CELL_S) for size in SIZES}
                links.append(Link(i, j, alone, writer.call("lane", j)))
        say("all pairs at once")
        together = _together(writers, len(readers))
        links = [replace(link, together=together.get((link.source, link.target), 0.0)) for link in links]
        say("memcpy and a socket")
        memcpy = writers[0].call("memcpy", SIZES[-1], CELL_S)
        port = readers[0].call("listen")
        readers[0].post("drain")
        tcp = writers[0].call("tcp", port, SIZES[2], CELL_S)
        readers[0].answer()
    return Fabric(tuple(links), memcpy, tcp)


def _together(writers: list[_Remote], num_targets: int) -> dict[tuple[int, int], float]:
    """Every target gets writes from one source, and every source writes, all at the same time."""
    flows = [(k % len(writers), k % num_targets) for k in range(max(len(writers), num_targets))]
    own: dict[int, list[int]] = {}
    for source, target in flows:
        own.setdefault(source, []).append(target)
    begin = time.time() + 0.3
    for source, targets in own.items():
        writers[source].post("put_until", targets, SIZES[2], begin, begin + TOGETHER_S)
    found = {}
    for source, targets in own.items():
        for target, rate in zip(targets, writers[source].answer(), strict=True):
            found[source, target] = rate
    return found


# ------------------------------------------------------------------ the measuring process


class _Remote:
    """The parent's end of one child: one call at a time."""

    def __init__(self, name: str, line: Connection, process: BaseProcess) -> None:
        self._name, self._line, self._process = name, line, process

    def post(self, op: str, *args: Any) -> None:
        self._line.send((op, args))

    def answer(self, within_s: float = CALL_S) -> Any:
        if not self._line.poll(within_s):
            raise PeerLost(f"{self._name} does not answer within {within_s:g} s")
        try:
            ok, value = self._line.recv()
        except EOFError:
            raise PeerLost(f"{self._name} ended (exit code {self._process.exitcode})") from None
        if not ok:
            raise ConfigError(f"{self._name}: {value}", field="transfer")
        return value

    def call(self, op: str, *args: Any) -> Any:
        self.post(op, *args)
        return self.answer()


@contextmanager
def _child(role: str, index: int, cpus: tuple[int, ...], config: TransferConfig) -> Iterator[_Remote]:
    """One measuring process, stopped at the end whatever happens."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    name = f"fabric-{role}-{index}-{os.getpid()}"
    process = context.Process(target=_main, args=(theirs, name, index, cpus, config), name=name, daemon=True)
    process.start()
    theirs.close()
    remote = _Remote(f"{role} rank {index}", ours, process)
    try:
        remote.answer(START_S)
        yield remote
    finally:
        with suppress(OSError):
            ours.send(("stop", ()))
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join(5.0)
        ours.close()


def _main(line: Connection, name: str, index: int, cpus: tuple[int, ...], config: TransferConfig) -> None:
    """A child: answers calls until it is told to stop or its parent has gone."""
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        end = _End(name, index, config)
    except SplitserveError as e:
        line.send((False, e.message))
        return
    line.send((True, None))
    with suppress(EOFError, OSError):
        while True:
            while not line.poll(POLL_S if end.reads else None):
                end.transport.poll()
            op, args = line.recv()
            if op == "stop":
                break
            try:
                line.send((True, getattr(end, op)(*args)))
            except (SplitserveError, OSError) as e:
                line.send((False, str(e)))
    end.close()


class _End:
    """One rank's memory and transport, and what can be asked of it."""

    def __init__(self, name: str, index: int, config: TransferConfig) -> None:
        self.transport: Transport = transports.make(config.transport, agent_name=f"{name}.0", config=config)
        self._index = index
        self._layout = lay_out([StateSpec("probe", 0, Growth.PAGED, ROW)], page_tokens=1)
        self._memory = self.transport.allocate(SIZES[-1])
        self._memory.fill_(1)  # touch every page of it: faults are not what is measured
        slab = Slab(Kind.PAGE, self._memory.data_ptr(), ROW, SIZES[-1] // ROW)
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
        self.reads = False

    def card(self) -> bytes:
        self.reads = True  # from now on somebody may write here, and needs us to poll
        return wire.encode(self._card)

    def connect(self, cards: list[bytes]) -> None:
        for raw in cards:
            card = wire.decoder(wire.Card).decode(raw)
            self._peers.append((card, self.transport.connect(card)))

    def put(self, target: int, nbytes: int, seconds: float) -> float:
        """Median GB/s of single writes, after one that nobody counts."""
        self._write(target, nbytes)
        times: list[float] = []
        end = time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < end:
            begun = time.perf_counter()
            self._write(target, nbytes)
            times.append(time.perf_counter() - begun)
        return nbytes / sorted(times)[len(times) // 2] / 1e9

    def put_until(self, targets: list[int], nbytes: int, begin: float, end: float) -> list[float]:
        """GB/s to each target while others write too; `begin` and `end` are the clock's, the same for all."""
        done = [0] * len(targets)
        while time.time() < begin:
            self.transport.poll()
        while time.time() < end:
            for k, target in enumerate(targets):
                self._write(target, nbytes)
                done[k] += nbytes
        spent = max(time.time() - begin, end - begin)
        return [n / spent / 1e9 for n in done]

    def lane(self, target: int) -> str:
        lanes = self.transport.lanes()
        return lanes.get(self._peers[target][1]) or ", ".join(sorted(set(lanes.values())))

    def memcpy(self, nbytes: int, seconds: float) -> float:
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

    def _write(self, target: int, nbytes: int) -> None:
        """One write, waited for. Raises PeerLost where it breaks."""
        card, handle = self._peers[target]
        rows = nbytes // ROW
        units = (Units(Kind.PAGE, tuple(range(rows)), 0, 0, rows),)
        what = copies(self._card, card, units, units, start=0, stop=rows, last=True)
        number = self.transport.write(handle, what, b"probe")
        end = time.monotonic() + CALL_S
        while time.monotonic() < end:
            for event in self.transport.poll():
                if event == Written(number):
                    return
                if isinstance(event, Broken) and event.id == number:
                    raise PeerLost(f"a write broke: {event.error}")
        raise PeerLost(f"a write of {nbytes} bytes did not end within {CALL_S:g} s")
