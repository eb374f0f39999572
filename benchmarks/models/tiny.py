"""Tokens per second of the TINY DeepSeek-V4 on a CPU, against transformers: same weights, same cores, one run.

    python -m benchmarks.models.tiny [--threads 1,2] [--rounds 5]

Both run in this process in float32, in turn (A B, B A, ...), so that whatever else the machine does meets both. Work is
`num` tokens after a prompt of 128, for one, four and eight requests at a time; time is from the prompt to the last
token. Ours is scheduler, runner and sampler as in an engine, its weights quantised as in the file; transformers has
them dequantised beforehand, a cache, and `generate`. Ratios are taken within a round, of wall time and of CPU time: on
a machine that others use too, the second says more.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import keep, spread
from splitserve.dist.group import SoloGroup
from splitserve.engine.constraint import Constraints
from splitserve.engine.limits import Limits
from splitserve.engine.request import Request
from splitserve.engine.runner import Runner
from splitserve.engine.scheduler import Scheduler
from splitserve.kv.cache import Cache
from splitserve.kv.pool import Pool
from splitserve.models import registry
from splitserve.models.make_checkpoint import TINY, write_checkpoint
from splitserve.models.read import read_config
from splitserve.spec import lay_out
from splitserve.text.grammar import Vocabulary
from splitserve.types import SamplingParams
from splitserve.weights.locate import locate
from tests.models.v4_oracle import transformers_model

PAGE, PROMPT = 128, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory), TINY)
        peers = {"splitserve": ours(Path(directory)), "transformers": theirs(Path(directory))}
        cells = [
            measure(peers, threads=threads, batch=batch, num=args.tokens, rounds=args.rounds)
            for threads in map(int, args.threads.split(","))
            for batch in (1, 4, 8)
        ]
    for cell in cells:
        rates = ", ".join(
            f"{name} {cell[name]['tokens_per_s']['median']:.1f} tok/s "
            f"({cell[name]['tokens_per_cpu_s']['median']:.1f} a CPU second)"
            for name in peers
        )
        ratios = f"{cell['ratio_wall']['median']:.2f}, {cell['ratio_cpu']['median']:.2f} by CPU"
        print(f"{cell['threads']} threads, batch {cell['batch']}: {rates}; ratio {ratios}")
    print(keep("v4_tiny", cells))


Generate = Callable[[Sequence[list[int]], int], list[list[int]]]


def measure(peers: dict[str, Generate], *, threads: int, batch: int, num: int, rounds: int) -> dict[str, Any]:
    """Rates of both in turn, after one round that does not count; both must say the same."""
    torch.set_num_threads(threads)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}  # of wall, of CPU
    for turn in range(rounds + 1):
        prompts = [text(1000 * turn + i) for i in range(batch)]
        order = list(peers) if turn % 2 else list(peers)[::-1]
        said = {}
        for name in order:
            wall, cpu = time.perf_counter(), time.process_time()
            said[name] = peers[name](prompts, num)
            if turn:
                seconds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        first, *others = said.values()
        if any(other != first for other in others):
            raise SystemExit(f"the answers differ in round {turn}, so their speeds do not compare")
    return {
        "threads": threads,
        "batch": batch,
        "prompt": PROMPT,
        "tokens": num,
        **{name: _rates(spent, batch * num) for name, spent in seconds.items()},
        **{
            f"ratio_{kind}": spread(
                [b[i] / a[i] for a, b in zip(seconds["splitserve"], seconds["transformers"], strict=True)]
            )
            for i, kind in enumerate(("wall", "cpu"))
        },
    }


def _rates(spent: Sequence[tuple[float, float]], tokens: int) -> dict[str, Any]:
    return {
        "tokens_per_s": spread([tokens / wall for wall, _ in spent]),
        "tokens_per_cpu_s": spread([tokens / cpu for _, cpu in spent]),
    }


def text(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, 512) for _ in range(PROMPT)]


def ours(path: Path) -> Generate:
    source = locate(path)
    cfg = read_config(source)
    model = registry.build(cfg, SoloGroup(), dtype="f32")
    model.load(source)
    specs = registry.states(cfg, dtype="f32")
    pool = Pool(
        specs,
        layout=lay_out(specs, page_tokens=PAGE),
        num_pages=64,
        num_slots=8,
        device="cpu",
        allocate=lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8),
    )
    runner = Runner(
        model,
        pool,
        page_tokens=PAGE,
        tp=SoloGroup(),
        device=torch.device("cpu"),
        between_layers=lambda: None,
        constraints=Constraints(_no_grammar),
    )

    def generate(prompts: Sequence[list[int]], num: int) -> list[list[int]]:
        cache = Cache(num_pages=64, page_tokens=PAGE, num_slots=8, prefix=False)
        scheduler = Scheduler(cache, Limits(max_len=4096, max_seqs=8, step_tokens=2048))
        for i, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0.0, max_tokens=num)
            scheduler.add(Request(str(i), list(prompt), len(prompt), params), 0.0)
        said: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
        while step := scheduler.plan(0.0):
            scheduler.apply(runner.launch(step).result())
            for event in scheduler.drain()[0]:
                said[event.rid] += event.tokens
        return list(said.values())

    return generate


def _no_grammar() -> Vocabulary:
    raise AssertionError("no request here has a grammar")


def theirs(path: Path) -> Generate:
    model = transformers_model(path)

    def generate(prompts: Sequence[list[int]], num: int) -> list[list[int]]:
        with torch.inference_mode():
            out = model.generate(
                torch.tensor(prompts),
                attention_mask=torch.ones(len(prompts), PROMPT, dtype=torch.int64),
                do_sample=False,
                min_new_tokens=num,
                max_new_tokens=num,
                eos_token_id=None,
                pad_token_id=0,
            )
        return [row[PROMPT:].tolist() for row in out]

    return generate


if __name__ == "__main__":
    main()
