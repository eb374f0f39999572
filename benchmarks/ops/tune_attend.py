"""Tries tile sizes of attention, index scores and hyper-connections; data/*.json is written from it by hand.

Candidates are started once by a pool of processes, which compiles them, and timed one after another afterwards.

    TRITON_CACHE_DIR=DIR python benchmarks/ops/tune_attend.py [sparse,decode,prefill,index,hyper]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from splitserve.ops.bench import deepseek, llama
from splitserve.ops.bench.timing import time_calls
from splitserve.ops.triton import attention
from splitserve.ops.triton.v4 import hyper, indexer, sparse, sparse_few

Config = dict[str, Any]
JOBS = 12


def sparse_configs(tokens: int) -> Iterator[Config]:
    """One pass with few heads, one pass with all heads, two passes."""
    few = [(16, 32, False, 8, 2), (16, 32, True, 8, 2), (16, 32, True, 4, 2), (32, 32, False, 8, 2)]
    many = [(64, 32, True, 8, stages) for stages in (1, 2, 3)] + [(64, 64, True, 8, 1)]
    for bh, bk, keep, warps, stages in few + many if tokens <= 64 else many:
        for fill in (1, 2, 4) if tokens <= 64 and bh < 64 else (1,):
            one = {"ONE_PASS": True, "BH": bh, "BK": bk, "FILL": fill, "KEEP": keep}
            yield one | {"num_warps": warps, "num_stages": stages}
    if tokens > 8:
        yield {"ONE_PASS": False, "BK": 64, "FILL": 2, "RATE_BH": 64, "RATE_WARPS": 4, "RATE_STAGES": 1, "MIX_BH": 64,
               "MIX_WARPS": 4, "MIX_STAGES": 3}  # fmt: skip


def prefill_configs(_: int) -> Iterator[Config]:
    tiles = [(128, 64, 8), (128, 64, 4), (128, 128, 8), (64, 64, 4), (128, 32, 4), (64, 128, 4)]
    for bm, bn, warps in tiles:
        for stages in (2, 3, 4) if bn < 128 else (2, 3):
            yield {"BM": bm, "BN": bn, "num_warps": warps, "num_stages": stages}


def decode_configs(_: int) -> Iterator[Config]:
    for span, bn in ((512, 64), (512, 128), (256, 64), (256, 128), (128, 64), (1024, 64)):
        for warps in (2, 4, 8):
            for stages in (2, 3, 4):
                yield {"SPAN": span, "BN": bn, "num_warps": warps, "num_stages": stages}


def index_configs(tokens: int) -> Iterator[Config]:
    for bn, warps in ((64, 4), (128, 4), (128, 8), (256, 8)):
        for tiles in (1, 2) if tokens <= 64 else (2, 4, 8):
            for stages in (1, 2, 3) if tiles > 1 else (1,):
                yield {"BN": bn, "TILES": tiles, "num_warps": warps, "num_stages": stages}


def hyper_configs(tokens: int) -> Iterator[Config]:
    for bt, bk in ((16, 64), (16, 128), (16, 256)) if tokens <= 64 else ((64, 64), (64, 128), (32, 128)):
        for fill in (1, 2, 4):
            for warps in (4, 8):
                yield {"BT": bt, "BK": bk, "FILL": fill, "num_warps": warps, "num_stages": 3}


Pick = tuple[
    Callable[[int], Iterator[Config]], tuple[Any, ...], Callable[[int], Iterator[Any]], str, tuple[int, ...]
]
WHAT: dict[str, Pick] = {
    "sparse": (sparse_configs, (sparse, sparse_few), deepseek.attention, "attend", (1, 16, 64, 2048)),
    "decode": (decode_configs, (attention,), llama._attention, "decode", (1, 16, 64)),
    "prefill": (prefill_configs, (attention,), llama._attention, "prefill", (8192,)),
    "index": (index_configs, (indexer,), deepseek.attention, "index", (1, 16, 64, 2048)),
    "hyper": (hyper_configs, (hyper,), deepseek.streams, "hc_pre", (1, 64, 2048)),
}


def use(modules: tuple[Any, ...], config: Config) -> None:
    how = {k: v for k, v in config.items() if k != "ONE_PASS"}
    for module in modules:
        module.tuned = lambda *_: dict(how)
    if "ONE_PASS" in config:  # one table tells which way, the other how
        ways = {"attend_one_pass": config, "attend_scratch": {"SCRATCH": False}}
        sparse.tuned = lambda kernel, *_: dict(ways.get(kernel, how))


def start_once(job: tuple[str, int, Config]) -> str:
    name, tokens, config = job
    _, modules, cases, prefix, _ = WHAT[name]
    use(modules, config)
    try:
        for case in cases(tokens):
            if case.kernel.startswith(prefix):
                case.calls[0]()
        torch.cuda.synchronize()
    except Exception as e:
        return repr(e)[-100:]
    return ""


def main() -> None:
    names = (sys.argv[1] if len(sys.argv) > 1 else ",".join(WHAT)).split(",")
    jobs = [(n, t, c) for n in names for t in WHAT[n][4] for c in WHAT[n][0](t)]
    with ProcessPoolExecutor(JOBS, mp_context=get_context("spawn")) as pool:
        refused = list(pool.map(start_once, jobs))
    print(f"{len(jobs)} candidates, {sum(map(bool, refused))} refused: {set(refused) - {''}}", flush=True)
    for name in names:
        _, modules, cases, prefix, counts = WHAT[name]
        for tokens in counts:
            for case in (c for c in cases(tokens) if c.kernel.startswith(prefix)):
                found = []
                for (n, t, config), problem in zip(jobs, refused, strict=True):
                    if (n, t) == (name, tokens) and not problem:
                        use(modules, config)
                        found.append((time_calls(case.calls, replays=7).us, config))
                for us, config in sorted(found, key=lambda f: f[0])[:5]:
                    print(f"{case.kernel} {tokens} {us:.2f} us {config}", flush=True)


if __name__ == "__main__":
    main()
