"""`splitserve compare FILE`: tune each arm's chunk, measure all arms in random order, repeat, judge, report.

    for each arm: each chunk of the list, one short load ─▶ the best chunk
    repeat:       arms in random order ─▶ up ─ warm-up ─ every load ─ down      (one arm at a time: same devices)

Exit code 0 when everything was measured and answered, 1 when requests failed, 2 when it could not be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path

from rich.console import Console

from splitserve.bench.client import LoadClient
from splitserve.bench.main import find_target, warm_up
from splitserve.bench.metrics import Slo
from splitserve.bench.plan import Plan, numbers, rates, slo_of
from splitserve.bench.workload import random_asks
from splitserve.compare import report
from splitserve.compare.arms import NAMES, STEP_TOKENS, Arm, arms
from splitserve.compare.measure import Shape, Taken, Target
from splitserve.errors import ConfigError
from splitserve.launch import topology
from splitserve.launch.deployment import load
from splitserve.launch.stage import api_key, up
from splitserve.net.client import Client
from splitserve.transfer.faults import THROTTLES
from splitserve.words import Parser

CHUNKS = (128, 256, 512)


@dataclass(frozen=True)
class Study:
    """What is compared and how often."""

    file: str
    shapes: tuple[Shape, ...]
    arms: tuple[str, ...] = NAMES
    chunks: tuple[int, ...] = CHUNKS
    repeats: int = 3
    input_len: int = 256
    output_len: int = 256
    seed: int = 0
    slo: Slo | None = None
    throttles: dict[str, float] = field(default_factory=dict)


@dataclass
class Found:
    """All measurements: of each arm its tuned chunk and, for each shape in order, one Taken a repeat."""

    arms: list[Arm]
    chunks: dict[str, int] = field(default_factory=dict)
    tuning: dict[str, dict[int, float]] = field(
        default_factory=dict
    )  # arm -> chunk -> output tokens a second
    taken: dict[str, list[list[Taken]]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)


def run(words: Sequence[str]) -> int:
    """The command: `words` are those after `splitserve compare`."""
    args = _parser().parse_args(list(words))
    study = study_of(args)
    to_stdout = args.json_path == "-"
    console = Console(stderr=to_stdout)
    found = asyncio.run(
        Comparison(study, lambda text: console.print(f"[dim]{text}[/]", highlight=False)).run()
    )
    results = report.results(study, found)
    if to_stdout:
        print(report.to_json(results))
    else:
        report.print_report(console, results)
        if args.json_path:
            Path(args.json_path).write_text(report.to_json(results), encoding="utf-8")
    if args.html_path:
        Path(args.html_path).write_text(report.to_html(results), encoding="utf-8")
    return 1 if results["num_failed"] else 0


def study_of(args: argparse.Namespace) -> Study:
    """The study that the words ask for. ConfigError names the first that cannot be."""
    throttles = {}
    for text in args.throttle:
        name, eq, ms = text.partition("=")
        if name not in THROTTLES or not eq or not ms.replace(".", "", 1).isdigit():
            raise ConfigError(
                f"no throttle {text!r}", field="throttle", fix=f"{', '.join(THROTTLES)}, as NAME=MS"
            )
        throttles[name] = float(ms)
    if (
        args.repeats < 1
        or (args.num is not None and args.num < 1)
        or min(args.input_len, args.output_len) < 1
    ):
        raise ConfigError("repeats, num, input-len and output-len must be at least 1", field="repeats")
    for name in ("concurrency", "chunks"):
        if any(n < 1 for n in getattr(args, name)):
            raise ConfigError(f"{name} is {list(getattr(args, name))}, must be above 0", field=name)
    if not all(0 < rate < inf for rate in args.rates):
        raise ConfigError(f"rate is {list(args.rates)}, must be above 0 and finite", field="rate")
    if args.rates:
        shapes = tuple(Shape(args.num or max(8, int(20 * r)), rate=r) for r in args.rates)
    else:
        shapes = tuple(Shape(args.num or max(8, 3 * c), concurrency=c) for c in args.concurrency)
    return Study(
        file=args.file,
        shapes=shapes,
        arms=tuple(args.arms.split(",")),
        chunks=args.chunks,
        repeats=args.repeats,
        input_len=args.input_len,
        output_len=args.output_len,
        seed=args.seed if args.seed is not None else random.SystemRandom().getrandbits(32),
        slo=slo_of(args),
        throttles=throttles,
    )


def num_starts(study: Study, num_arms: int) -> tuple[int, int]:
    """How often an arm is brought up: (to tune, to measure)."""
    tries = len(study.chunks)
    return num_arms * tries if tries > 1 else 0, num_arms * study.repeats


class Comparison:
    """One run of `compare`."""

    def __init__(
        self, study: Study, say: Callable[[str], None], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._study = study
        self._say = say
        self._rng = random.Random(study.seed)
        self._now = now
        self._pace = _Pace(0)

    async def run(self) -> Found:
        study = self._study
        deployment = load(study.file)
        found = Found(arms(deployment, topology.read(), study.arms))
        self._announce(len(found.arms))
        for arm in found.arms:
            await self._tune(arm, found)
            found.taken[arm.name] = [[] for _ in study.shapes]
        for repeat in range(study.repeats):
            for arm in self._rng.sample(found.arms, len(found.arms)):
                chunk = found.chunks[arm.name]
                self._say(f"repeat {repeat + 1} of {study.repeats}: {arm.name} ({arm.shape}), chunk {chunk}")
                found.order.append(arm.name)
                taken = await self._paced(arm, chunk, study.shapes, seed=f"{study.seed}/{repeat}")
                for kept, one in zip(found.taken[arm.name], taken, strict=True):
                    kept.append(one)
        return found

    def _announce(self, num_arms: int) -> None:
        """How much there is to do, before anything is started."""
        study = self._study
        tuning, measuring = num_starts(study, num_arms)
        last = study.shapes[-1].num
        self._pace = _Pace(tuning * last + measuring * sum(s.num for s in study.shapes))
        parts = [f"{tuning} to tune, of {last} requests each"] if tuning else []
        loads = " + ".join(f"{s.num} ({s.label})" for s in study.shapes)
        parts.append(f"{measuring} to measure, of {loads} requests each")
        lengths = f"{study.input_len} tokens in, {study.output_len} out"
        self._say(
            f"{tuning + measuring} starts: {'; '.join(parts)}; {lengths}; about how long follows the first"
        )

    async def _paced(self, arm: Arm, chunk: int, shapes: Sequence[Shape], *, seed: str) -> list[Taken]:
        """`_take`, then how much time is left by what has been measured so far."""
        begun = self._now()
        taken = await self._take(arm, chunk, shapes, seed=seed)
        left = self._pace.left_s(sum(s.num for s in shapes), self._now() - begun)
        if left:
            self._say(f"about {_duration(left)} left")
        return taken

    async def _tune(self, arm: Arm, found: Found) -> None:
        """The chunk of the list with the most output under the heaviest load; one chunk needs no trial."""
        chunks = self._study.chunks or (STEP_TOKENS,)
        found.chunks[arm.name] = chunks[0]
        if len(chunks) == 1:
            return
        rates: dict[int, float] = {}
        shape = self._study.shapes[-1]
        for chunk in self._rng.sample(chunks, len(chunks)):
            self._say(f"tuning {arm.name}: chunk {chunk}")
            (taken,) = await self._paced(arm, chunk, (shape,), seed=f"{self._study.seed}/tune")
            rates[chunk] = taken.summary.output_rate
        found.tuning[arm.name] = dict(sorted(rates.items()))
        found.chunks[arm.name] = max(rates, key=lambda c: rates[c])

    async def _take(self, arm: Arm, chunk: int, shapes: Sequence[Shape], *, seed: str) -> list[Taken]:
        """Bring one arm up, load it with every shape, take it down. Prompts depend on the seed and shape alone."""
        study = self._study
        async with AsyncExitStack() as closing:
            where = closing.enter_context(tempfile.TemporaryDirectory(prefix="splitserve-compare-"))
            file = Path(where) / f"{arm.name}.toml"
            file.write_text(arm.text, encoding="utf-8")
            sets = [f"engine.step_tokens={chunk}"]
            sets += ["engine.allow_faults=true"] if study.throttles else []
            state = await up(str(file), f"compare-{os.getpid()}", closing, sets=sets)
            client = await closing.enter_async_context(Client())
            target = Target(client, state)
            key = api_key(state, "router")
            model, vocabulary = await find_target(client, target.router, Plan(target.router, api_key=key))
            sender = LoadClient(client, target.router, model=model, now=time.perf_counter, api_key=key)
            await target.throttle(study.throttles)
            taken = []
            for shape in shapes:
                rng = random.Random(f"{seed}/{shape.label}")
                draw = partial(random_asks, input_len=study.input_len, rng=rng, vocabulary=vocabulary)
                await warm_up(sender, draw(2 * arm.num_devices, output_len=2), self._say)
                asks = draw(shape.num, output_len=study.output_len, rate=shape.rate)
                taken.append(await target.measure(sender, asks, shape, slo=study.slo))
            return taken


class _Pace:
    """How long the rest takes: every request as long as those so far, their share of start and warm-up included."""

    def __init__(self, num_requests: int) -> None:
        self._total, self._done, self._spent_s = num_requests, 0, 0.0

    def left_s(self, num_requests: int, seconds: float) -> float:
        """After `num_requests` more that took so long."""
        self._done += num_requests
        self._spent_s += seconds
        return (self._total - self._done) * self._spent_s / self._done


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _parser() -> argparse.ArgumentParser:
    p = Parser(
        "splitserve compare",
        description="the same devices as a split pair, as unified replicas and as one engine: does the split pay?",
    )
    p.add_argument("file", metavar="FILE", help="deployment file with [prefill] and [decode]")
    p.add_argument("--concurrency", type=numbers, default=(8,), help="closed loops, as 1,8,16 (default 8)")
    p.add_argument(
        "--rate", type=rates, default=(), dest="rates", help="open loops instead: requests a second"
    )
    p.add_argument("--num", type=int, help="requests of each load (default 3 x concurrency, 20 s of a rate)")
    p.add_argument("--input-len", type=int, default=256, help="prompt tokens (default 256)")
    p.add_argument("--output-len", type=int, default=256, help="output tokens (default 256)")
    p.add_argument("--arms", default=",".join(NAMES), help=f"some of {','.join(NAMES)} (default: all)")
    p.add_argument("--chunks", type=numbers, default=CHUNKS, help="step_tokens to try for each arm")
    p.add_argument("--repeats", type=int, default=3, help="measurements of each arm (default 3)")
    p.add_argument("--seed", type=int, help="draw the same prompts and order again")
    p.add_argument("--slo-ttft-ms", type=float, help="with --slo-tpot-ms: count goodput under these limits")
    p.add_argument("--slo-tpot-ms", type=float)
    p.add_argument(
        "--throttle",
        action="append",
        default=[],
        metavar="NAME=MS",
        help=f"slow a part: {', '.join(THROTTLES)}",
    )
    p.add_argument(
        "--json", dest="json_path", nargs="?", const="-", help="write JSON to a file, or to stdout"
    )
    p.add_argument("--html", dest="html_path", metavar="FILE", help="write one page with plots")
    return p
