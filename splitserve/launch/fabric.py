"""`doctor --fabric`: the links between prefill and decode ranks, measured by processes like theirs on their cores.

    source process i                         target process j
      put: writes of each size, alone  ────▶   registered memory, polls
      get: reads of each size, alone   ◀────   asks
      put, then get: all i, j of a pairing at once
      a plain copy, and a plain socket between the two, as yardsticks

The writes and reads go through the same transport as a handoff's, with the same settings and in the same kind of memory
(fabric_end.py). What the rates mean is decided in plan/fabric.py.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from statistics import median
from typing import Any

from splitserve.config import TransferConfig
from splitserve.errors import ConfigError, PeerLost
from splitserve.launch.fabric_end import CALL_S, NO_GPU, Copier, End, Spot, main
from splitserve.launch.pairing import RankSeat
from splitserve.plan.fabric import GET, GPU, HOST, PUT, Fabric, Link

SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)
CELL_S = 0.1
"""Time for each size, direction and pair: enough moves for a median, so that sixteen pairs stay under a minute."""

TOGETHER_S = 0.5
START_S = 120.0


def measure(
    config: TransferConfig,
    *,
    sources: Sequence[RankSeat],
    targets: Sequence[RankSeat],
    say: Callable[[str], None],
) -> Fabric:
    """All pairs of ranks on this host, in the memory of their GPUs where they have some.

    ConfigError where the transport or a GPU does not start, PeerLost where a process dies.
    """
    config = replace(
        config, direction=PUT
    )  # a transport that turns writes into reads would measure reads twice
    copy = _plain_copies(sources, targets, say)
    with ExitStack() as closing:
        ends = [
            closing.enter_context(_child(f"{role} {seat.name}", *_end(f"{role}-{i}", seat, group, config)))
            for role, group in (("source", sources), ("target", targets))
            for i, seat in enumerate(group)
        ]
        for end in ends:  # they start at the same time
            end.answer(START_S)
        writers, readers = ends[: len(sources)], ends[len(sources) :]
        say(f"{len(ends)} processes started")
        _meet(writers, readers)
        for i, writer in enumerate(writers):
            by_core = writer.call("copy", SIZES[-1], CELL_S)
            copy = {(i, j): by_core for j in range(len(readers))} | copy
        links = []
        for i, writer in enumerate(writers):
            for j, reader in enumerate(readers):
                say(f"{sources[i].name} to {targets[j].name}")
                links.append(_measure_pair(i, j, writer, reader, copy[i, j]))
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
        median(link.copy for link in links),
        median(link.tcp for link in links),
        sources=tuple(s.name for s in sources),
        targets=tuple(s.name for s in targets),
        memory=memory_of(sources, targets),
    )


def memory_of(sources: Sequence[RankSeat], targets: Sequence[RankSeat]) -> str:
    """What kind of memory the links join: "host", "gpu", "gpu to host", "host to gpu"."""
    kinds = [" or ".join(sorted({HOST if s.gpu < 0 else GPU for s in side})) for side in (sources, targets)]
    return " to ".join(dict.fromkeys(kinds))


def _plain_copies(
    sources: Sequence[RankSeat], targets: Sequence[RankSeat], say: Callable[[str], None]
) -> dict[tuple[int, int], float]:
    """GB/s of plain copies for those pairs that have a GPU, by a process that sees them all."""
    gpus = tuple(dict.fromkeys(s.gpu for s in (*sources, *targets) if s.gpu >= 0))
    if not gpus:
        return {}
    say("plain copies between GPUs")
    at = {gpu: i for i, gpu in enumerate(gpus)}
    with _child("plain copies", "copies", Copier, Spot(gpus=gpus)) as copier:
        copier.answer(START_S)
        return {
            (i, j): copier.call("rate", at.get(a.gpu, NO_GPU), at.get(b.gpu, NO_GPU), SIZES[-1], CELL_S)
            for i, a in enumerate(sources)
            for j, b in enumerate(targets)
            if a.gpu >= 0 or b.gpu >= 0
        }


def _end(
    name: str, seat: RankSeat, group: Sequence[RankSeat], config: TransferConfig
) -> tuple[str, Callable[[], End], Spot]:
    """What `_child` needs to be this rank: it sees the GPUs of its engine, in the order of the ranks."""
    gpus = tuple(dict.fromkeys(s.gpu for s in group if s.engine == seat.engine and s.gpu >= 0))
    index = gpus.index(seat.gpu) if seat.gpu >= 0 else NO_GPU
    agent = f"fabric-{name}-{os.getpid()}"
    return agent, partial(End, agent, config, SIZES[-1], index), Spot(seat.cpus, gpus, index)


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


# ------------------------------------------------------------------ the measuring processes


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
def _child(who: str, name: str, make: Callable[[], End | Copier], spot: Spot) -> Iterator[_Remote]:
    """One measuring process, stopped at the end whatever happens. Its first answer says that it has started."""
    context = mp.get_context("forkserver")
    # What takes longest to import is imported once. NIXL is not: it reads its environment as it loads.
    context.set_forkserver_preload(["torch"])
    ours, theirs = context.Pipe()
    process = context.Process(target=main, args=(theirs, make, spot), name=name, daemon=True)
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
