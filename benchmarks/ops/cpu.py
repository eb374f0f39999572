"""A decode step against the time to read the weights, a prefill chunk against the time to multiply them, on this CPU.

    python -m benchmarks.ops.cpu [--threads 1,2] [--tokens 256] [--rounds 15]

The yardsticks are measured between the steps of the same run: read bandwidth by summing an array larger than every
cache, the float32 product rate by torch's own matrix product. Engine code from plan to token runs in this process:
scheduler, runner, sampler and the model, without server or transfer.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import keep, spread
from splitserve.bench.plan import numbers
from splitserve.dist.group import SoloGroup
from splitserve.engine.constraint import Constraints
from splitserve.engine.limits import Limits
from splitserve.engine.request import Request
from splitserve.engine.runner import Runner
from splitserve.engine.scheduler import Scheduler
from splitserve.kv.cache import Cache
from splitserve.kv.pool import Pool
from splitserve.models import registry
from splitserve.models.read import read_config
from splitserve.spec import lay_out
from splitserve.types import SamplingParams
from splitserve.weights.locate import locate

PAGE = 64
NUM_PAGES = 64
READ_BYTES = 512 << 20
PRODUCT = 2048


class Engine:
    """The demo model, and as much of an engine as a step needs."""

    def __init__(self, chunk: int) -> None:
        source = locate("smollm2-135m")
        self.cfg = read_config(source)
        self.model: Any = registry.build(self.cfg, SoloGroup(), dtype="f32")
        self.model.load(source)
        specs = registry.states(self.cfg, dtype="f32")
        pool = Pool(
            specs,
            layout=lay_out(specs, page_tokens=PAGE),
            num_pages=NUM_PAGES,
            num_slots=0,
            device="cpu",
            allocate=lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8),
        )
        cache = Cache(num_pages=NUM_PAGES, page_tokens=PAGE, num_slots=0, prefix=False)
        limits = Limits(max_len=NUM_PAGES * PAGE, max_seqs=16, step_tokens=chunk)
        self.scheduler = Scheduler(cache, limits)
        self.runner = Runner(
            self.model,
            pool,
            page_tokens=PAGE,
            tp=SoloGroup(),
            device=torch.device("cpu"),
            between_layers=lambda: None,
            constraints=Constraints(_no_vocabulary),
        )
        self._count = 0

    def ask(self, num_prompt: int, num_output: int) -> None:
        rng = random.Random(self._count)
        self._count += 1
        tokens = [rng.randrange(100, self.cfg.vocab) for _ in range(num_prompt)]
        sampling = SamplingParams(temperature=0.0, max_tokens=num_output)
        self.scheduler.add(Request(f"r{self._count}", tokens, num_prompt, sampling), time.monotonic())

    def step(self) -> float | None:
        """Seconds of one step, or None when there is nothing to compute."""
        begun = time.perf_counter()
        step = self.scheduler.plan(time.monotonic())
        if step is None:
            return None
        self.scheduler.apply(self.runner.launch(step).result())
        self.scheduler.drain()
        return time.perf_counter() - begun

    def run(self, num_prompt: int, num_output: int) -> list[float]:
        """Seconds of each step of one request."""
        self.ask(num_prompt, num_output)
        return list(iter(self.step, None))


def _no_vocabulary() -> Any:
    raise AssertionError("no request here has a grammar")


def tensors(thing: Any) -> Iterator[torch.Tensor]:
    """All tensors inside an object of ours."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, list | tuple):
        for item in thing:
            yield from tensors(item)
    elif is_dataclass(thing) and not isinstance(thing, type):
        for f in fields(thing):
            yield from tensors(getattr(thing, f.name))
    elif type(thing).__module__.startswith("splitserve.") and hasattr(thing, "__dict__"):
        for item in vars(thing).values():
            yield from tensors(item)


def weight_bytes(model: Any) -> int:
    found = {t.data_ptr(): t.nbytes for t in tensors(model)}
    return sum(found.values())


def read_gb_s(block: torch.Tensor) -> float:
    begun = time.perf_counter()
    block.sum()
    return block.nbytes / (time.perf_counter() - begun) / 1e9


def product_gflop_s(a: torch.Tensor) -> float:
    begun = time.perf_counter()
    a @ a
    return 2 * len(a) ** 3 / (time.perf_counter() - begun) / 1e9


def prefill_flop(engine: Engine, num_tokens: int) -> float:
    """Of the matrices (two for each number a token), the head once, and attention's two products over the past."""
    cfg = engine.cfg
    heads = cfg.num_heads * cfg.head_dim
    layer = cfg.hidden * (2 * heads + 2 * cfg.num_kv_heads * cfg.head_dim + 3 * cfg.ffn)
    matrices = 2.0 * num_tokens * cfg.num_layers * layer + 2.0 * cfg.hidden * cfg.vocab
    return matrices + 2.0 * cfg.num_layers * heads * num_tokens * (num_tokens + 1)


def measure(threads: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    engine = Engine(num_tokens)
    block, square = torch.ones(READ_BYTES // 4), torch.randn(PRODUCT, PRODUCT)
    engine.run(num_tokens, 4)
    reads, products, prefills, decodes = [], [], [], []
    for _ in range(rounds):
        reads.append(read_gb_s(block))
        products.append(product_gflop_s(square))
        first, *rest = engine.run(num_tokens, 9)
        prefills.append(first)
        decodes += rest
    nbytes, flop = weight_bytes(engine.model), prefill_flop(engine, num_tokens)
    best_read, best_product = max(reads), max(products)
    return {
        "threads": threads,
        "read_gb_s": spread(reads),
        "product_gflop_s": spread(products),
        "weight_bytes": nbytes,
        "decode_ms": spread([s * 1e3 for s in decodes]),
        "decode_share_of_read_bound": nbytes / best_read / 1e9 / spread(decodes)["median"],
        "prefill_ms": spread([s * 1e3 for s in prefills]),
        "prefill_share_of_product_bound": flop / best_product / 1e9 / spread(prefills)["median"],
    }


def main() -> None:
    if "OMP_WAIT_POLICY" not in os.environ:  # torch's threads spin otherwise; an engine's rank sets the same
        again = [sys.executable, "-m", "benchmarks.ops.cpu", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=numbers, default=(1, 2))
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    rows = [measure(n, args.tokens, args.rounds) for n in args.threads]
    table = Table(title=f"SmolLM2-135M, {args.tokens} tokens of context: medians", title_justify="left")
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "threads": lambda r: str(r["threads"]),
        "read GB/s": lambda r: f"{r['read_gb_s']['max']:.1f}",
        "decode ms": lambda r: f"{r['decode_ms']['median']:.1f}",
        "of the read bound": lambda r: f"{r['decode_share_of_read_bound']:.0%}",
        "f32 GFLOP/s": lambda r: f"{r['product_gflop_s']['max']:.0f}",
        "prefill ms": lambda r: f"{r['prefill_ms']['median']:.0f}",
        "of the product bound": lambda r: f"{r['prefill_share_of_product_bound']:.0%}",
    }
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    Console().print(table)
    print(f"kept in {keep('cpu', rows)}")


if __name__ == "__main__":
    main()
