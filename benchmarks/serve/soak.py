"""A split pair under mixed load for a long time, one request in five abandoned: memory and descriptors stay flat.

    python -m benchmarks.serve.soak [--minutes 30] [--fill 9000] [--concurrency 8] [--keep soak]

Brings up a deployment of its own over a tiny random model (prefill, decode, router, supervisor, NIXL). Requests are
drawn from all three endpoints, whole and streamed, one or two choices, prompts of 1 to 400 tokens of which half share a
beginning, outputs of 1 to 64. Every process's resident memory and open descriptors are read once in `--every` seconds;
the slope is that of a straight line through the readings of the second half of the time. At the end each engine checks
its own books, and all pages must be free.

Some memories are bounded and fill slowly: prefill remembers the last 10,000 rooms that are over, each engine the marks
of its last 4,096 requests. `--fill` short requests fill them before the first reading, so that a slope is a leak.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.measure import keep
from splitserve.errors import SplitserveError
from splitserve.net.client import Client
from tests.proc.real import Deployment, until
from tests.tiny_chat import write_chat_checkpoint

ABANDONED = 0.2
SHARED = [7 + i % 200 for i in range(200)]
WORDS = ("the quick brown fox jumps over a lazy dog while rain falls on old stones").split()  # noqa: SIM905
"""Few: a tokenizer remembers the last 10,000 words, and new ones for ever would look like a leak for hours."""


class Load:
    """Requests of all kinds, drawn from one seed."""

    def __init__(self, url: str, client: Client, seed: int) -> None:
        self._url = url
        self._client = client
        self._rng = random.Random(seed)
        self.counts: Counter[str] = Counter()

    async def run(self, until_s: float, concurrency: int) -> None:
        async def work() -> None:
            while time.monotonic() < until_s:
                await self.one(*self._draw())

        await asyncio.gather(*(work() for _ in range(concurrency)))

    async def fill(self, num: int, concurrency: int) -> None:
        """`num` requests of one prompt token and one output token."""
        left = iter(range(num))

        async def work() -> None:
            for i in left:
                await self.one(
                    "/v1/completions", {"prompt": [6 + i % 250], "max_tokens": 1, "stream": i % 2 == 0}
                )

        await asyncio.gather(*(work() for _ in range(concurrency)))

    async def one(self, path: str, body: dict[str, Any]) -> None:
        patience = self._rng.random() * 0.5 if self._rng.random() < ABANDONED else 60.0
        try:
            async with asyncio.timeout(patience):
                told = await self._client.request(
                    "POST", self._url + path, body=msgspec.json.encode(body), timeout_s=120.0
                )
            good = told.status == 200 and b'"error"' not in told.body
            self.counts["answered" if good else f"status {told.status}"] += 1
        except TimeoutError:
            self.counts["abandoned" if patience < 60.0 else "hung"] += 1
        except SplitserveError as e:
            self.counts[e.code] += 1

    def _draw(self) -> tuple[str, dict[str, Any]]:
        rng = self._rng
        own = [rng.randrange(6, 262) for _ in range(rng.randrange(1, 200))]
        tokens = [*SHARED[: rng.randrange(200)], *own] if rng.random() < 0.5 else own
        stream, num, n = rng.random() < 0.5, rng.randrange(1, 65), rng.choice((1, 1, 1, 2))
        if rng.random() < 0.4:
            sampling = {"max_new_tokens": num, "ignore_eos": True, "n": n}
            return "/generate", {"input_ids": tokens, "sampling_params": sampling, "stream": stream}
        shared = {"max_tokens": num, "ignore_eos": True, "n": n, "stream": stream}
        if rng.random() < 0.5:
            return "/v1/completions", {"prompt": tokens, **shared}
        text = " ".join(WORDS[t % len(WORDS)] for t in tokens[: rng.randrange(1, 60)])
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **shared}


class Readings:
    """Resident memory (MB) and descriptors of every process of a deployment, over time."""

    def __init__(self, deployment: Deployment) -> None:
        state = deployment.state()
        self._processes = {"supervisor": psutil.Process(state["supervisor"]["pid"])}
        for p in state["processes"]:
            self._processes[p["name"]] = psutil.Process(p["pid"])
            for i, rank in enumerate(p.get("ranks", [])):
                self._processes[f"{p['name']} rank {i}"] = psutil.Process(rank["pid"])
        self._begun = time.monotonic()
        self.at_s: list[float] = []
        self.rss_mb: dict[str, list[float]] = {name: [] for name in self._processes}
        self.fds: dict[str, list[int]] = {name: [] for name in self._processes}

    def take(self) -> None:
        self.at_s.append(time.monotonic() - self._begun)
        for name, process in self._processes.items():
            self.rss_mb[name].append(process.memory_info().rss / 1e6)
            self.fds[name].append(process.num_fds())

    async def forever(self, every_s: float) -> None:
        while True:
            self.take()
            await asyncio.sleep(every_s)

    def summary(self) -> dict[str, Any]:
        half = len(self.at_s) // 2
        hours = [s / 3600 for s in self.at_s[half:]]
        return {
            name: {
                "rss_mb": {"first": round(rss[0], 1), "half": round(rss[half], 1), "last": round(rss[-1], 1)},
                "slope_mb_per_hour": round(slope(hours, rss[half:]), 1),
                "fds": {"first": self.fds[name][0], "most": max(self.fds[name]), "last": self.fds[name][-1]},
            }
            for name, rss in self.rss_mb.items()
        }


def slope(x: list[float], y: list[float]) -> float:
    """Of the straight line with the least squares."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0


async def run(deployment: Deployment, args: argparse.Namespace) -> dict[str, Any]:
    async with Client() as client:
        load = Load(deployment.url("router"), client, args.seed)
        await load.fill(args.fill, args.concurrency)
        await load.run(time.monotonic() + 20, args.concurrency)  # connections and allocators grow once
        load.counts.clear()
        readings = Readings(deployment)
        reading = asyncio.create_task(readings.forever(args.every))
        begun = time.monotonic()
        await load.run(begun + args.minutes * 60, args.concurrency)
        seconds = time.monotonic() - begun
        reading.cancel()
    until("all pages are free", deployment.all_pages_free)
    deployment.check()
    readings.take()
    return {
        "minutes": round(seconds / 60, 2),
        "concurrency": args.concurrency,
        "filled_with": args.fill,
        "requests": sum(load.counts.values()),
        "ended": dict(load.counts),
        "processes": readings.summary(),
        "readings": len(readings.at_s),
        "books": "in order, all pages free",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--fill", type=int, default=9000, help="short requests before the first reading")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between readings")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="soak", help="of the deployment")
    parser.add_argument("--keep", default="soak", help="name of the result file; empty: keep nothing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        deployment = Deployment(write_chat_checkpoint(Path(home) / "tiny"), name=args.name)
        deployment.up()
        try:
            result = asyncio.run(run(deployment, args))
        finally:
            deployment.close()
    print(json.dumps(result, indent=1))
    if args.keep:
        print(keep(args.keep, result))


if __name__ == "__main__":
    main()
