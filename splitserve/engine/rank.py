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
from dataclasses import dataclass
from typing import Any

from splitserve import log, wire
from splitserve.config import EngineConfig, TransferConfig, resolve
from splitserve.engine.link import ServerLink
from splitserve.errors import SplitserveError

_log = log.get(__name__)


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
    _bind(start.engine)
    link = ServerLink(start.server_endpoint)
    try:
        return _serve(start, link, args.alive_fd)
    except SplitserveError as e:
        _log.error("%s%s", e.message, f" ({e.fix})" if e.fix else "")
        link.send(wire.Failed("", e.code, e.status, f"{e.message}. {e.fix}" if e.fix else e.message))
        return 2
    finally:
        link.close()


def _serve(start: Start, link: ServerLink, alive_fd: int | None) -> int:
    from splitserve.engine.assembly import assemble  # torch comes in here, after the cores are bound

    engine = assemble(start, link, alive_fd)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: engine.loop.stop())
    try:
        link.send(wire.Hello(wire.PROTOCOL, engine.max_len, engine.facts))
        engine.loop.run()
    finally:
        engine.close()
    return 0


def _bind(config: EngineConfig) -> None:
    """Keep this process, and every thread it will start, on its cores."""
    if config.cpus:
        os.sched_setaffinity(0, config.cpus)
    threads = config.threads or len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["MKL_NUM_THREADS"] = str(threads)


if __name__ == "__main__":
    sys.exit(main())
