"""Time to first token, split minus unified, on the same cores: what the handoff costs a request that is alone.

    python -m benchmarks.serve.first_token [--tokens 64,256,1024] [--repeats 9]

The pair and the unified engine run at the same time and are asked in turn, so that the machine's drift hits both. Each
prompt is new, so that no prefix cache answers. The unified engine has prefill's core and threads.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.measure import keep, spread
from splitserve.net.client import Client
from splitserve.net.keys import bearer
from splitserve.proof.sides import Side
from splitserve.proof.stage import Door, stage, unified_engine


async def first_token(client: Client, door: Door, tokens: list[int]) -> float:
    body = msgspec.json.encode(
        {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True},
            "stream": True,
        }
    )
    begun = time.perf_counter()
    headers = [("content-type", "application/json"), *bearer(door.key)]
    async with client.stream("POST", door.url + "/generate", body=body, headers=headers) as s:
        assert s.status == 200, await s.read()
        first = 0.0
        async for _ in s.events():
            first = first or time.perf_counter() - begun
        return first


async def measure(file: str, lengths: list[int], repeats: int) -> list[dict[str, Any]]:
    async with AsyncExitStack() as closing:
        client = await closing.enter_async_context(Client())
        doors = await stage(file, print, closing)
        facts = await Side(client, doors.prefill.url, "prefill", api_key=doors.prefill.key).facts()
        keys = doors.engine_key_file
        unified = Door(await unified_engine(facts, print, closing, key_file=keys), doors.prefill.key)
        rng = random.Random(1)
        rows = []
        for n in lengths:
            split_s, unified_s = [], []
            for i in range(repeats + 1):
                prompts = [[rng.randrange(100, facts["vocab_size"]) for _ in range(n)] for _ in range(2)]
                a = await first_token(client, doors.router, prompts[0])
                b = await first_token(client, unified, prompts[1])
                if i:  # the first of each shape warms up
                    split_s.append(a)
                    unified_s.append(b)
            gaps = [a - b for a, b in zip(split_s, unified_s, strict=True)]
            rows.append(
                {
                    "tokens": n,
                    "split_s": spread(split_s),
                    "unified_s": spread(unified_s),
                    "gap_s": spread(gaps),
                }
            )
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", default="deploy/demo.toml")
    parser.add_argument("--tokens", default="64,256,1024")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    rows = asyncio.run(measure(args.file, [int(t) for t in args.tokens.split(",")], args.repeats))
    table = Table(title="time to first token, ms: median (min-max)")
    for heading in ("tokens", "split", "unified", "split - unified", "share"):
        table.add_column(heading, justify="right")
    for r in rows:
        cells = [
            "{:.0f} ({:.0f}-{:.0f})".format(*(1000 * r[k][m] for m in ("median", "min", "max")))
            for k in ("split_s", "unified_s", "gap_s")
        ]
        share = r["gap_s"]["median"] / r["unified_s"]["median"]
        table.add_row(str(r["tokens"]), *cells, f"{100 * share:.1f} %")
    Console().print(table)
    print(keep("first-token", rows))


if __name__ == "__main__":
    main()
