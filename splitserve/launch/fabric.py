"""`doctor --fabric`: the links between prefill and decode ranks, measured by processes like theirs on their cores.

    source process i                         target process j
      put: writes of each size, alone  ────▶   registered memory, polls
      get: reads of each size, alone   ◀────   asks
      put, then get: all i, j of a pairing at once
      a plain copy, and a plain socket between the two, as yardsticks

The writes and reads go through the same transport, with the same settings, as a handoff's. What the rates mean is
decided in plan/fabric.py. Host memory only: ranks on GPUs are measured by `splitserve verify` on their real state.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from statistics import median
from typing import Any

from splitserve import wire
from splitserve.config import TransferConfig
from splitserve.errors import ConfigError, PeerLost, SplitserveError
from splitserve.launch.pairing import RankSeat
from splitserve.plan.fabric import GET, PUT, Fabric, Link
from splitserve.spec import Growth, Kind, Slab, StateSpec, Units, lay_out
from splitserve.transfer import transport as transports
from splitserve.transfer.layout import copies
from splitserve.transfer.port import make_card
from splitserve.transfer.transport import Broken, Transport, Written

SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)
ROW = 64 << 10
CELL_S = 0.1
"""Time for each size, direction and pair: enough moves for a median, so that sixteen pairs stay under a minute."""

TOGETHER_S = 0.5
POLL_S = 0.0002
START_S = 120.0
CALL_S = 60.0


def measure(
    config: TransferConfig,
    *,
    sources: Sequence[RankSeat],
    targets: Sequence[RankSeat],
    say: Callable[[str], None],
) -> Fabric:
    """All pairs of ranks on this host. ConfigError where the transport does not start, PeerLost where one dies."""
    with ExitStack() as closing:
        ends = [
            closing.enter_context(_child(f"{role} {seat.name}", f"{role}-{i}", seat.cpus, config))
            for role, group in (("source", sources), ("target", targets))
            for i, seat in enumerate(group)
        ]
        for end in ends:  # they start at the same time
            end.answer(START_S)
        writers, readers = ends[: len(sources)], ends[len(sources) :]
        say(f"{len(ends)} processes started")
        _meet(writers, readers)
        copy = [writer.call("copy", SIZES[-1], CELL_S) for writer in writers]
        links = []
        for i, writer in enumerate(writers):
            for j, reader in enumerate(readers):
                say(f"{sources[i].name} to {targets[j].name}")
                links.append(_measure_pair(i, j, writer, reader, copy[i]))
        say("all pairs at once")
        put = _together(PUT, writers, readers)
        get = {(i, j): rate for (j, i), rate in _together(GET, readers, writers).items()}
        links = [
            replace(
                link,
                together=put.get((link.source, link.target), 0.0),
                get_together=get.get((link.source, link.target), 0.0),
            )
            for link in links
        ]
        for end in ends:
            end.post("stop")  # they leave at the same time
    return Fabric(
        tuple(links),
        median(copy),
        median(link.tcp for link in links),
        sources=tuple(s.name for s in sources),
        targets=tuple(s.name for s in targets),
    )


def _meet(writers: list[_Remote], readers: list[_Remote]) -> None:
    for one, others in ((writers, readers), (readers, writers)):
        cards = [other.call("card") for other in others]
        for end in one:
            end.call("connect", cards)


def _measure_pair(i: int, j: int, writer: _Remote, reader: _Remote, copy: float) -> Link:
    reader.call("attend", True)
    put = {size: writer.call("move", PUT, j, size, CELL_S) for size in SIZES}
    reader.call("attend", False)
    writer.call("attend", True)
    get = {size: reader.call("move", GET, i, size, CELL_S) for size in SIZES}
    writer.call("attend", False)
    port = reader.call("listen")
    reader.post("drain")
    tcp = writer.call("tcp", port, SIZES[2], CELL_S)
    reader.answer()
    return Link(i, j, put, writer.call("lane", j), get=get, copy=copy, tcp=tcp)


def _together(direction: str, movers: list[_Remote], others: list[_Remote]) -> dict[tuple[int, int], float]:
    """GB/s by (mover, other): every one of either side takes part, and all move at the same time."""
    flows = [(k % len(movers), k % len(others)) for k in range(max(len(movers), len(others)))]
    own: dict[int, list[int]] = {}
    for mover, other in flows:
        own.setdefault(mover, []).append(other)
    for met in others:
        met.call("attend", True)
    begin = time.time() + 0.3
    for mover, peers in own.items():
        movers[mover].post("move_until", direction, peers, SIZES[2], begin, begin + TOGETHER_S)
    found = {}
    for mover, peers in own.items():
        for other, rate in zip(peers, movers[mover].answer(), strict=True):
            found[mover, other] = rate
    for met in others:
        met.call("attend", False)
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
def _child(who: str, name: str, cpus: tuple[int, ...], config: TransferConfig) -> Iterator[_Remote]:
    """One measuring process, stopped at the end whatever happens. Its first answer says that it has started."""
    context = mp.get_context("forkserver")
    # What takes longest to import is imported once. NIXL is not: it reads its environment as it loads.
    context.set_forkserver_preload(["torch"])
    ours, theirs = context.Pipe()
    name = f"fabric-{name}-{os.getpid()}"
    process = context.Process(target=_main, args=(theirs, name, cpus, config), name=name, daemon=True)
    process.start()
    theirs.close()
    try:
        yield _Remote(who, ours, process)
    finally:
        with suppress(OSError):
            ours.send(("stop", ()))
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join(5.0)
        ours.close()


def _main(line: Connection, name: str, cpus: tuple[int, ...], config: TransferConfig) -> None:
    """A child: answers calls until it is told to stop or its parent has gone."""
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        end = _End(name, config)
    except SplitserveError as e:
        line.send((False, e.message))
        return
    line.send((True, None))
    with suppress(EOFError, OSError):
        while True:
            while not line.poll(POLL_S if end.attends else None):
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

    def __init__(self, name: str, config: TransferConfig) -> None:
        self.transport: Transport = transports.make(config.transport, agent_name=f"{name}.0", config=config)
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
        self.attends = False

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
