"""Tries tile sizes of the matrix kernels and prints the best of each shape; data/*.json is written from it by hand.

Candidates are compiled by a pool of processes first, without the GPU, and taken from the cache afterwards.

    TRITON_CACHE_DIR=DIR python benchmarks/ops/tune.py FORMAT[,FORMAT] TOKENS[,TOKENS] [compile]

FORMAT is e4m3 (dense), bf16 (dense) or e2m1 (routed experts).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch

from splitserve.ops.bench.timing import time_calls
from splitserve.ops.kernels.launch import compiling
from splitserve.ops.triton import multiply as starting
from splitserve.ops.triton.grouping import group_pairs
from splitserve.ops.triton.multiply import Codes, Words, multiply
from splitserve.ops.triton.rounding import quantise_rows

ARCH = 90
COPIES = 200_000_000  # bytes of weights to go through before the same ones come again
COUNT = 6


@dataclass(frozen=True)
class Shape:
    name: str
    form: str
    out: int
    size: int
    tokens: int
    experts: int = 0
    glu: bool = False

    @property
    def rows(self) -> int:
        """Rows that share weights, on average."""
        return -(-self.tokens * COUNT // self.experts) if self.experts else self.tokens


DENSE = [("qkv_a", 1536, 4096), ("q_b", 32768, 1024), ("out_b", 4096, 8192),
         ("shared_gate_up", 4096, 4096), ("shared_down", 4096, 2048)]  # fmt: skip


def shapes(forms: list[str], tokens: list[int]) -> Iterator[Shape]:
    for t in tokens:
        if "e4m3" in forms:
            for name, out, size in DENSE:
                yield Shape(name, "e4m3", out, size, t, glu=name == "shared_gate_up")
        if "bf16" in forms:
            yield Shape("compressors", "bf16", 2624, 4096, t)
        if "e2m1" in forms:
            yield Shape("gate_up", "e2m1", 4096, 4096, t, experts=256, glu=True)
            yield Shape("down", "e2m1", 4096, 2048, t, experts=256)


def candidates(shape: Shape) -> Iterator[dict[str, Any]]:
    """Constants; `eight` says which kernel."""
    few = shape.rows <= 16
    stages, fills = (3,), (1,)
    if few and shape.experts:
        tiles = {False: [(64, 16, 4)], True: [(128, 16, 4), (128, 16, 8), (256, 16, 8)]}
        stages, fills = (3, 4, 5), (1, 3)
    elif few:
        tiles = {False: [(32, 16, 2), (64, 16, 4)], True: [(64, 16, 4), (128, 16, 4)]}
        stages, fills = (4, 6), (1, 2, 4)
    elif shape.rows <= 64 and not shape.experts:
        tiles = {False: [(64, 64, 4), (64, 32, 4)], True: [(64, 64, 4), (128, 64, 4), (128, 32, 4)]}
        stages, fills = (3, 4), (1, 2)
    else:
        many = [
            (64, 64, 4),
            (128, 64, 4),
            (128, 64, 8),
            (256, 64, 8),
            (128, 128, 8),
            (128, 128, 4),
            (256, 128, 8),
        ]
        tiles, stages = {False: many, True: [*many, (64, 128, 4), (128, 256, 8)]}, (2, 3, 4)
    for eight in (False, True) if shape.form != "bf16" else (False,):
        for bn, bm, warps in tiles[eight]:
            for ns, fill in product(stages, fills):
                config = {
                    "BN": bn,
                    "BM": bm,
                    "FILL": fill,
                    "num_warps": warps,
                    "num_stages": ns,
                }
                yield {"eight": eight} | config | ({} if eight else {"BK": 128})


def weights(shape: Shape, device: str, eight: bool = True) -> list[Codes | Words | torch.Tensor]:
    stack = (shape.experts,) if shape.experts else ()
    number = {"e2m1": 0.5, "e4m3": 1, "bf16": 2}[shape.form]
    total = int(max(shape.experts, 1) * shape.out * shape.size * number)
    result: list[Codes | Words | torch.Tensor] = []
    for _ in range(1 if device == "meta" else max(1, -(-COPIES // total))):
        if shape.form == "bf16":
            result.append(torch.randn(shape.out, shape.size, device=device, dtype=torch.bfloat16))
        elif shape.form == "e2m1":
            codes = torch.empty(*stack, shape.out, shape.size // 4, dtype=torch.int16, device=device)
            scales = torch.full(
                (*stack, shape.size // 128, shape.out), 0x77767778, dtype=torch.int32, device=device
            )
            codes = codes if device == "meta" else codes.random_(-32768, 32767)
            result.append(Words(codes, scales, eight))
        else:
            codes = torch.empty(*stack, shape.out, shape.size, dtype=torch.uint8, device=device)
            codes = codes.random_(0, 120) if device != "meta" else codes
            scales = torch.full((*stack, -(-shape.out // 128), shape.size // 128), 0.01, device=device)
            result.append(Codes(codes.view(torch.float8_e4m3fn), scales, (128, 128), True))
    return result


def calls(
    shape: Shape, config: dict[str, Any], all_weights: list[Any], device: str
) -> list[Callable[[], Any]]:
    """What to time; grouping and rounding are done beforehand."""
    config = dict(config)
    pairs = bool(shape.experts) and shape.name == "down"
    x: Any = torch.randn(shape.tokens * (COUNT if pairs else 1), shape.size, device=device).bfloat16()
    if eight := config.pop("eight"):
        x = quantise_rows(x)
    all_weights = [replace(w, eight=eight) if isinstance(w, Words) else w for w in all_weights]
    starting.tuned = lambda *_: dict(config)
    limit = 10.0 if shape.glu else None
    if not shape.experts:
        return [lambda w=w: multiply(x, w, limit=limit) for w in all_weights]
    share = 1 if pairs else COUNT
    chosen = [
        torch.rand(shape.tokens, 256, device=device).argsort(-1)[:, :COUNT].contiguous() for _ in range(3)
    ]
    groups = [group_pairs(c, local=range(shape.experts), block=config["BM"]) for c in chosen]
    return [lambda g=g: multiply(x, all_weights[0], groups=g, share=share, limit=limit) for g in groups] * (
        4 if shape.tokens < 100 else 1
    )


def compile_one(job: tuple[Shape, dict[str, Any]]) -> str:
    shape, config = job
    with compiling(ARCH) as tape:
        try:
            calls(shape, config, weights(shape, "meta"), "meta")[0]()
        except Exception as e:
            return repr(e)[-200:]
    most = max(c.shared for c in tape.compiled)
    return "" if most <= 227 * 1024 else "shared memory"


def main() -> None:
    forms = sys.argv[1].split(",")
    tokens = [int(t) for t in sys.argv[2].split(",")]
    jobs = [(s, c) for s in shapes(forms, tokens) for c in candidates(s)]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        refused = list(pool.map(compile_one, jobs, chunksize=4))
    print(f"{len(jobs)} candidates, {sum(map(bool, refused))} refused: {set(refused) - {''}}", flush=True)
    if "compile" in sys.argv:
        return
    last: tuple[Any, ...] = ()
    ready: list[Any] = []
    for shape in shapes(forms, tokens):
        if (shape.form, shape.name) != last:
            ready.clear()
            torch.cuda.empty_cache()
            last, ready = (shape.form, shape.name), weights(shape, "cuda")
        distinct = 256 * (1 - (1 - COUNT / 256) ** shape.tokens) if shape.experts else 1
        size = distinct * shape.out * shape.size * {"e2m1": 17 / 32, "e4m3": 1, "bf16": 2}[shape.form]
        work = 2 * shape.tokens * (COUNT if shape.experts else 1) * shape.out * shape.size
        results: dict[bool, list[tuple[float, dict[str, Any]]]] = {False: [], True: []}
        for (s, config), problem in zip(jobs, refused, strict=True):
            if s != shape or problem:
                continue
            try:
                t = time_calls(calls(shape, config, ready, "cuda"), replays=7)
            except Exception as e:
                print(shape.name, config, repr(e)[-100:])
                continue
            results[config["eight"]].append((t.us, config))
        for eight, found in results.items():
            bound = max(size / 4.2e6, work / (1450e6 if eight else 790e6), 0.7)
            for us, config in sorted(found, key=lambda r: r[0])[:3]:
                print(f"{shape.form} {shape.name} {shape.tokens} {us:8.2f} us, bound {bound:.2f}, {bound / us:.2f}"
                      f" {size / us / 1e6:.2f} TB/s {config}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
