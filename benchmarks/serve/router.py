"""Our router against sglang_router and vllm-router in front of mock engines: requests/s, added latency, CPU a request.

    python -m benchmarks.serve.router --tools DIR [--routers ours,sglang,vllm] [--concurrency 1,32,128]

DIR holds C sources: `fmock.c`, a mock of a prefill and a decode engine, and `lg.c`, a closed-loop load generator. Both
are compiled into a temporary directory. Every router is pinned to the first core, mock and load to the second:

    core 0   router                     core 1   load generator ─▶ (router) ─▶ mock prefill, mock decode

All routers are up at once, and each cell measures them in turn, A B C, B C A, C A B, so that whatever else the machine
does meets all of them; ratios are taken within a round, and on a busy machine that of CPU a request says most. Two
workloads: a short JSON answer to a 1 KB prompt, and a stream of 64 events (14 KB) that decode writes at once. Added
latency is a router's minus that of the mock asked directly in the same round. Routers log warnings only. Ours has
health checks, metrics, retries and cache_aware on (with one engine of each kind it has nothing to choose, and hashes
nothing). sglang_router runs cache_aware too; vllm-router round_robin, since its cache_aware asks the engines twice more
for each request.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.measure import keep, spread
from splitserve.net.probe import free_ports

ROUTER_CORE, LOAD_CORE = 0, 1
PATH = "/v1/chat/completions"
STREAMS = {"json": "0", "stream": "1"}
READY_S = 60.0


@dataclass(frozen=True)
class Peer:
    """Something to send requests to. `pid` 0: the mock itself, whose CPU is not counted."""

    name: str
    port: int
    pid: int = 0


@dataclass(frozen=True)
class Reading:
    """One measurement: requests/s, milliseconds, and microseconds of the router's CPU a request."""

    rate: float
    p50_ms: float
    p99_ms: float
    cpu_us: float
    errors: int


def compiled(tools: Path, home: Path) -> None:
    for name in ("fmock", "lg"):
        subprocess.run(["gcc", "-O2", "-w", "-o", home / name, tools / f"{name}.c"], check=True)


@contextmanager
def running(words: Sequence[str], core: int, log: Path) -> Iterator[int]:
    """A process on one core; its pid. Killed with its children at the end."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *words],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
    try:
        yield process.pid
    finally:
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for member in tree:
            member.kill()
        process.wait()


def ours(port: int, prefill: int, decode: int) -> list[str]:
    words = ["--prefill", f"http://127.0.0.1:{prefill},8998", "--decode", f"http://127.0.0.1:{decode}"]
    return [
        *[sys.executable, "-m", "splitserve", "router", *words],
        *["--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware", "--log-level", "warning"],
    ]


def sglang(port: int, prefill: int, decode: int) -> list[str]:
    words = ["--prefill", f"http://127.0.0.1:{prefill}", "8998", "--decode", f"http://127.0.0.1:{decode}"]
    return [
        *[sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", *words],
        *["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_ports(1)[0])],
        *["--policy", "cache_aware", "--log-level", "warn"],
    ]


def vllm(port: int, prefill: int, decode: int) -> list[str]:
    words = ["--prefill", f"http://127.0.0.1:{prefill}", "--decode", f"http://127.0.0.1:{decode}"]
    return [
        *[sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation", *words],
        *["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_ports(1)[0])],
        *["--policy", "round_robin", "--log-level", "warning"],
    ]


COMMANDS: dict[str, Callable[[int, int, int], list[str]]] = {"ours": ours, "sglang": sglang, "vllm": vllm}


def wait_answer(port: int, name: str) -> None:
    """Until a completion comes through; RuntimeError after READY_S."""
    body = b'{"model":"mock-model","messages":[{"role":"user","content":"hi"}],"max_tokens":4}'
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{PATH}", body, {"content-type": "application/json"}
    )
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(request, timeout=2) as response:
                if response.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(
        f"{name} answered nothing within {READY_S:g} s; its log lies beside the compiled tools"
    )


def cpu_ns(pid: int) -> int:
    """Nanoseconds of CPU that all threads of a process and its children have had."""
    if not pid:
        return 0
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(
        int(task.read_text().split()[0])
        for p in processes
        for task in Path(f"/proc/{p.pid}/task").glob("*/schedstat")
    )


def read(peer: Peer, kind: str, *, home: Path, connections: int, seconds: float) -> Reading:
    """One run of the load generator."""
    before = cpu_ns(peer.pid)
    words = [home / "lg", str(peer.port), str(connections), f"{seconds:g}", PATH, STREAMS[kind]]
    done = subprocess.run(
        ["taskset", "-c", str(LOAD_CORE), *words],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "QA": "1"},  # quick ACKs: a router without TCP_NODELAY is not punished for it here
    )
    found = json.loads(done.stdout)
    times = found["total_us"] if kind == "json" else found["ttfb_us"]
    return Reading(
        rate=found["rps"],
        p50_ms=times["p50"] / 1000,
        p99_ms=times["p99"] / 1000,
        cpu_us=(cpu_ns(peer.pid) - before) / 1000 / max(1, found["all"]),
        errors=found["err"],
    )


def rounds(
    peers: list[Peer], kind: str, *, home: Path, connections: int, seconds: float, repeats: int
) -> list[dict[str, Reading]]:
    """`repeats` rounds of one cell, each beginning with another peer."""
    found = []
    for turn in range(repeats):
        order = peers[turn % len(peers) :] + peers[: turn % len(peers)]
        found.append(
            {p.name: read(p, kind, home=home, connections=connections, seconds=seconds) for p in order}
        )
    return found


def added_p50(found: dict[str, Reading], name: str) -> float:
    """Milliseconds more than the mock itself takes; at least the 0.1 us that the load generator resolves."""
    return max(1e-4, found[name].p50_ms - found["direct"].p50_ms)


def summary(found: list[dict[str, Reading]], name: str) -> dict[str, Any]:
    """Medians of one router in one cell, and our figures as multiples of its, taken within each round."""

    def median(value: Callable[[dict[str, Reading]], float]) -> dict[str, float]:
        return spread([value(r) for r in found])

    row: dict[str, Any] = {
        "rate": median(lambda r: r[name].rate),
        "p50_ms": median(lambda r: r[name].p50_ms),
        "p99_ms": median(lambda r: r[name].p99_ms),
        "errors": sum(r[name].errors for r in found),
    }
    if name != "direct":
        row["added_p50_ms"] = median(lambda r: added_p50(r, name))
        row["added_p99_ms"] = median(lambda r: r[name].p99_ms - r["direct"].p99_ms)
        row["cpu_us"] = median(lambda r: r[name].cpu_us)
    if name not in ("direct", "ours") and "ours" in found[0] and all(r[name].rate for r in found):
        row["our_rate_ratio"] = median(lambda r: r["ours"].rate / r[name].rate)
        row["our_cpu_ratio"] = median(lambda r: r["ours"].cpu_us / r[name].cpu_us)
        row["our_added_p50_ratio"] = median(lambda r: added_p50(r, "ours") / added_p50(r, name))
        row["our_p99_ratio"] = median(lambda r: r["ours"].p99_ms / r[name].p99_ms)
    return row


def measure(args: argparse.Namespace, home: Path) -> list[dict[str, Any]]:
    """Start everything, then cell by cell; one entry a cell."""
    compiled(args.tools, home)
    prefill, decode = free_ports(2)
    cells = []
    with ExitStack() as stack:
        mock = [str(home / "fmock"), "-n", "64", "-w", "1", f"prefill:{prefill}", f"decode:{decode}"]
        stack.enter_context(running(mock, LOAD_CORE, home / "mock.log"))
        peers = [Peer("direct", decode)]
        for name in args.routers.split(","):
            port = free_ports(1)[0]
            words = COMMANDS[name](port, prefill, decode)
            peers.append(
                Peer(name, port, stack.enter_context(running(words, ROUTER_CORE, home / f"{name}.log")))
            )
        for peer in peers:
            wait_answer(peer.port, peer.name)
        for kind in args.kinds.split(","):
            for connections in (int(c) for c in args.concurrency.split(",")):
                found = rounds(
                    peers,
                    kind,
                    home=home,
                    connections=connections,
                    seconds=args.seconds,
                    repeats=args.repeats,
                )
                rows = {p.name: summary(found, p.name) for p in peers}
                cells.append({"kind": kind, "concurrency": connections, "peers": rows})
    return cells


COLUMNS = {
    "req/s": ("rate", 0),
    "p50 ms": ("p50_ms", 3),
    "p99 ms": ("p99_ms", 3),
    "added p50": ("added_p50_ms", 3),
    "added p99": ("added_p99_ms", 3),
    "CPU us": ("cpu_us", 0),
    "x rate": ("our_rate_ratio", 2),
    "x CPU": ("our_cpu_ratio", 2),
    "x added p50": ("our_added_p50_ratio", 2),
}
"""Headings of the table: (name in a row, decimals)."""


def show(cells: list[dict[str, Any]]) -> None:
    table = Table(
        title="routers in front of mock engines: medians; TTFB for streams; x: ours as a multiple of it"
    )
    for heading in ("cell", "router", *COLUMNS):
        table.add_column(heading, justify="right")
    for cell in cells:
        for name, row in cell["peers"].items():
            shown = [
                f"{row[key]['median']:.{digits}f}" if key in row else "" for key, digits in COLUMNS.values()
            ]
            table.add_row(f"{cell['kind']} c={cell['concurrency']}", name, *shown)
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", type=Path, required=True, help="directory of fmock.c and lg.c")
    parser.add_argument("--routers", default="ours,sglang,vllm")
    parser.add_argument("--kinds", default="json,stream")
    parser.add_argument("--concurrency", default="1,32,128")
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", default="router", help="name of the result file; empty: keep nothing")
    args = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="router-bench-"))
    cells = measure(args, home)
    shutil.rmtree(home)
    show(cells)
    if args.keep:
        print(keep(args.keep, cells, places=("--tools",)))


if __name__ == "__main__":
    main()
