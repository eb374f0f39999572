"""2,000 requests to a split pair, one in five abandoned at a random moment: no page may be lost, memory stays flat.

    splitserve up deploy/demo.toml --detach
    python -m benchmarks.serve.abandon [--num 2000] [--concurrency 16] [--name demo]

Reads every engine's own `check`, its free pages and its resident memory, before and after each fifth of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from typing import Any

import msgspec
import psutil

from benchmarks.measure import keep
from splitserve.errors import SplitserveError
from splitserve.launch.rundir import RunDir
from splitserve.net.client import Client

ABANDONED = 0.2
ROUNDS = 5


class Run:
    def __init__(self, state: dict[str, Any], client: Client, seed: int) -> None:
        self._state = state
        self._client = client
        self._rng = random.Random(seed)
        self.counts = {"answered": 0, "abandoned": 0, "refused": 0, "failed": 0}

    async def one(self) -> None:
        body = msgspec.json.encode(
            {
                "input_ids": [self._rng.randrange(100, 40000) for _ in range(self._rng.randrange(1, 64))],
                "sampling_params": {"max_new_tokens": self._rng.randrange(1, 9), "ignore_eos": True},
                "stream": True,
            }
        )
        patience = self._rng.random() * 2.0 if self._rng.random() < ABANDONED else None
        try:
            async with asyncio.timeout(patience):
                await self._ask(body)
        except TimeoutError:
            self.counts["abandoned"] += 1
        except SplitserveError as e:
            self._failed(e.message)

    async def _ask(self, body: bytes) -> None:
        headers = (("content-type", "application/json"),)
        async with self._client.stream(
            "POST", self._state["url"] + "/generate", body=body, headers=headers
        ) as s:
            text = await s.read()
            if s.status == 200 and b"[DONE]" in text and b'data: {"error"' not in text:
                self.counts["answered"] += 1
            elif s.status == 503:
                self.counts["refused"] += 1
            else:
                self._failed(f"{s.status}: ...{text[-300:].decode(errors='replace')}")

    def _failed(self, why: str) -> None:
        self.counts["failed"] += 1
        print(f"failed: {why}", flush=True)

    async def round(self, num: int, concurrency: int) -> None:
        left = num

        async def serve() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await self.one()

        await asyncio.gather(*(serve() for _ in range(concurrency)))

    async def books(self) -> dict[str, Any]:
        """Once all is quiet: each engine's check, free pages and memory."""
        out: dict[str, Any] = {}
        for p in self._state["processes"]:
            if p["role"] == "router":
                continue
            stats = await self._settled(p["url"])
            check = await self._client.request("POST", p["url"] + "/debug/check", body=b"{}")
            rss = sum(psutil.Process(r["pid"]).memory_info().rss for r in p["ranks"])
            out[p["name"]] = {
                "check": check.status,
                "leaked_pages": stats["total_pages"] - stats["free_pages"],
                "quarantined_pages": stats["quarantined_pages"],
                "rss_mb": round(rss / 1e6, 1),
            }
        return out

    async def _settled(self, url: str, within_s: float = 30.0) -> dict[str, Any]:
        end = time.monotonic() + within_s
        while True:
            stats = json.loads((await self._client.request("GET", url + "/debug/stats")).body)
            quiet = not stats["num_running"] and stats["free_pages"] == stats["total_pages"]
            if quiet or time.monotonic() > end:
                return dict(stats)
            await asyncio.sleep(0.1)


async def run(name: str, num: int, concurrency: int, seed: int) -> dict[str, Any]:
    state = RunDir(name).read_state()
    if state is None:
        raise SystemExit(f"{name} is not running: splitserve up deploy/demo.toml --detach")
    async with Client() as client:
        job = Run(state, client, seed)
        await job.round(concurrency, concurrency)  # warm up: allocators and connections grow once
        books = [await job.books()]
        begun = time.monotonic()
        for i in range(ROUNDS):
            await job.round(num // ROUNDS, concurrency)
            books.append(await job.books())
            print(f"{(i + 1) * num // ROUNDS} requests: {job.counts} {books[-1]}", flush=True)
        return {"seconds": time.monotonic() - begun, "counts": job.counts, "books": books}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="demo")
    parser.add_argument("--num", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(keep("abandon", asyncio.run(run(args.name, args.num, args.concurrency, args.seed))))


if __name__ == "__main__":
    main()
