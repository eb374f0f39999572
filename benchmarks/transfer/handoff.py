"""GB/s of the bytes of one handoff, prefill process to decode process, against a plain memcpy of the same bytes.

    python -m benchmarks.transfer.handoff [--tokens 256,1024,4096] [--repeats 7] [--transport nixl]

Both are measured in one run, alternating, on slabs of SmolLM2-135M's state (f32, 2.9 MB a page of 64 tokens): the peer
process only receives. The write is timed from posting to its end, the way the engine sees it, note included.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.measure import keep, spread
from splitserve import wire
from splitserve.config import TransferConfig
from splitserve.kv.pool import Pool
from splitserve.models.read import read_config
from splitserve.models.registry import states
from splitserve.spec import Kind, Units, lay_out
from splitserve.transfer import transport as transports
from splitserve.transfer.layout import copies
from splitserve.transfer.port import make_card
from splitserve.transfer.transport import Transport, Written
from splitserve.weights.locate import locate

PAGE_TOKENS = 64


def open_rank(name: str, transport: str, num_pages: int) -> tuple[Transport, Pool, wire.Card]:
    specs = states(read_config(locate("smollm2-135m")), dtype="f32")
    layout = lay_out(specs, page_tokens=PAGE_TOKENS)
    made = transports.make(transport, agent_name=f"{name}.0", config=TransferConfig(transport=transport))
    pool = Pool(specs, layout=layout, num_pages=num_pages, num_slots=0, device="cpu", allocate=made.allocate)
    for memory in pool.memory.values():
        memory.fill_(1)  # touch every page of memory: faults are not what is measured
    card = make_card(
        made, agent=made.register(pool.slabs), engine=name, layout=layout, slabs=pool.slabs, rank=0, size=1
    )
    return made, pool, card


def receive(line: Connection, transport: str, num_pages: int) -> None:
    made, pool, card = open_rank("decode", transport, num_pages)
    line.send_bytes(wire.encode(card))
    while not line.poll(0):
        made.poll()
    line.recv_bytes()
    made.close()
    pool.close()


def timed_write(made: Transport, peer: str, what: Any) -> float:
    begun = time.perf_counter()
    number = made.write(peer, what, b"note")
    while Written(number) not in made.poll():
        pass
    return time.perf_counter() - begun


def measure(tokens: list[int], *, repeats: int, transport: str) -> list[dict[str, Any]]:
    num_pages = -(-max(tokens) // PAGE_TOKENS)
    ours, theirs = mp.get_context("spawn").Pipe()
    peer = mp.get_context("spawn").Process(target=receive, args=(theirs, transport, num_pages))
    peer.start()
    made, pool, mine = open_rank("prefill", transport, num_pages)
    card = wire.decoder(wire.Card).decode(ours.recv_bytes())
    handle = made.connect(card)
    rows = []
    for n in tokens:
        ids = tuple(range(-(-n // PAGE_TOKENS)))
        units = (Units(Kind.PAGE, ids, 0, 0, n),)
        what = copies(mine, card, units, units, start=0, stop=n, last=True)
        source = np.ones(what.num_bytes, dtype=np.uint8)
        target = np.zeros_like(source)
        timed_write(made, handle, what)
        writes, memcpys = [], []
        for _ in range(repeats):
            writes.append(timed_write(made, handle, what))
            begun = time.perf_counter()
            np.copyto(target, source)
            memcpys.append(time.perf_counter() - begun)
        gb_s, memcpy = ([what.num_bytes / s / 1e9 for s in x] for x in (writes, memcpys))
        ratios = [a / b for a, b in zip(gb_s, memcpy, strict=True)]
        rows.append(
            {
                "tokens": n,
                "bytes": what.num_bytes,
                "descriptors": len(what),
                "write_gb_s": spread(gb_s),
                "memcpy_gb_s": spread(memcpy),
                "ratio": spread(ratios),
                "lane": ", ".join(sorted(set(made.lanes().values()))),
            }
        )
    ours.send_bytes(b"end")
    peer.join(20)
    made.close()
    pool.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="37,256,1024,4096")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--transport", default="nixl")
    args = parser.parse_args()
    rows = measure([int(t) for t in args.tokens.split(",")], repeats=args.repeats, transport=args.transport)
    table = Table(title=f"one handoff over {args.transport} against memcpy, GB/s: median (min-max)")
    for heading in ("tokens", "MB", "descriptors", "write", "memcpy", "ratio", "lane"):
        table.add_column(heading, justify="right")
    for r in rows:
        w, m = r["write_gb_s"], r["memcpy_gb_s"]
        table.add_row(
            str(r["tokens"]),
            f"{r['bytes'] / 1e6:.1f}",
            str(r["descriptors"]),
            f"{w['median']:.2f} ({w['min']:.2f}-{w['max']:.2f})",
            f"{m['median']:.2f} ({m['min']:.2f}-{m['max']:.2f})",
            f"{r['ratio']['median']:.2f}",
            r["lane"],
        )
    Console().print(table)
    print(keep(f"handoff-{args.transport}", rows))


if __name__ == "__main__":
    main()
