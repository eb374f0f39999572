"""The process of one rank: bind to its cores, load the model, take memory, meet the transport, run until told or left.

    python -m splitserve.engine.rank --config FILE --alive-fd N

FILE (mode 0600, written by the server) holds the fields of `Start` as JSON.
Rank 0 reports Loading and Hello to its server; a start that fails sends Failed with an empty rid and exits with 2.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from splitserve import log, numa, wire
from splitserve.config import EngineConfig, TransferConfig, resolve
from splitserve.engine.channel import Line, address
from splitserve.engine.link import ServerLink
from splitserve.errors import SplitserveError

_log = log.get(__name__)

START_FAILED = 2
"""Exit code after a typed error at the start: trying again will not help."""


@dataclass(frozen=True)
class Start:
    """What a rank is told at its start."""

    engine: EngineConfig
    transfer: TransferConfig
    server_endpoint: str
    rank: int
    tp: int
    run_dir: str
    name: str
    fence_socket: str = ""  # the supervisor's control socket


def read_start(path: str) -> Start:
    """Raises ConfigError for a file that this version does not understand."""
    with open(path, encoding="utf-8") as f:
        raw: dict[str, Any] = json.load(f)
    engine, _ = resolve(EngineConfig, "engine", ("flags", raw.pop("engine")), environ={})
    transfer, _ = resolve(TransferConfig, "transfer", ("flags", raw.pop("transfer")), environ={})
    return Start(engine=engine, transfer=transfer, **raw)


def main() -> int:
    parser = argparse.ArgumentParser(prog="splitserve.engine.rank")
    parser.add_argument("--config", required=True)
    parser.add_argument("--alive-fd", type=int)
    args = parser.parse_args()
    start = read_start(args.config)
    log.setup(f"{start.name}/{start.rank}")
    _bind(start)
    with ExitStack() as closing:
        if start.rank:
            return _follow(start, args.alive_fd, closing)
        return _lead(start, args.alive_fd, closing)


def _lead(start: Start, alive_fd: int | None, closing: ExitStack) -> int:
    """Rank 0: the server is told of everything, a failed start included."""
    link = ServerLink(start.server_endpoint)
    closing.callback(link.close)
    try:
        numa.set_policy(start.engine.memory_bind, _memory_nodes(start))
        from splitserve.engine.assembly import (
            assemble,
        )  # torch comes in here, after cores and memory are bound

        engine = assemble(start, link, alive_fd, closing)
    except SplitserveError as e:
        _log.error("%s%s", e.message, f" ({e.fix})" if e.fix else "")
        link.send(wire.Failed("", e.code, e.status, e.message, field=e.field or "", fix=e.fix or ""))
        return START_FAILED
    _stop_on_signals(engine.loop.stop)
    link.send(wire.Hello(wire.PROTOCOL, engine.max_len, engine.facts))
    engine.loop.run()
    return 0


def _follow(start: Start, alive_fd: int | None, closing: ExitStack) -> int:
    """Any other rank. Its server sees it die where it cannot start."""
    line = Line(address(start.run_dir, start.name, start.rank), bind=False)
    closing.callback(line.close)
    try:
        numa.set_policy(start.engine.memory_bind, _memory_nodes(start))
        from splitserve.engine.assembly import assemble_follower

        follower = assemble_follower(start, line, alive_fd, closing)
    except SplitserveError as e:
        _log.error("%s%s", e.message, f" ({e.fix})" if e.fix else "")
        return START_FAILED
    _stop_on_signals(follower.stop)
    follower.run()
    return 0


def _stop_on_signals(stop: Callable[[], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop())


def _bind(start: Start) -> None:
    """Keep this process, and every thread it will start, on its cores: its share of the engine's, if they suffice."""
    cpus = numa.share_of(start.engine.cpus, start.rank, start.tp)
    if cpus:
        os.sched_setaffinity(0, cpus)
    threads = start.engine.threads or len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["MKL_NUM_THREADS"] = str(threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads would spin where ops/cpu's compute


def _memory_nodes(start: Start) -> tuple[int, ...]:
    """The nodes of this rank's memory; all that there are where it is interleaved."""
    if start.engine.memory_bind == "interleave":
        return numa.online_nodes()
    return (start.engine.node,) if start.engine.node >= 0 else ()


if __name__ == "__main__":
    sys.exit(main())
