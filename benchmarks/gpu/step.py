"""A model's steps on one GPU or on a tensor parallel group: decoding replayed from CUDA graphs, prompts in pieces.

    python -m benchmarks.gpu.step [--model deepseek|llama] [--layers N] [--tp N] [--batches 1,8,16,64] [--context N]
                                  [--prefill 2048,8192] [--profile 1,64] [--check] [--keep NAME]

Weights are random at full shapes. One prompt of `--context` tokens is computed and its state copied to every sequence;
each step then gets random tokens, so that experts are drawn independently. The bound of a decode step is the bytes that
it must touch (weights of the experts that were really chosen, counted; keys and values) over what this device copies.
`--check` compares T1, a small model of the real head sizes, with the reference on the CPU first. `--alone` runs rank 0
of the group by itself: what its kernels take, without sums.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import socket
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import keep, spread
from splitserve.dist import peers
from splitserve.dist.group import SoloGroup, TorchGroup, make_group
from splitserve.engine import batch
from splitserve.engine.pieces import Pieces
from splitserve.engine.replay import Replay, Replayed
from splitserve.engine.step import Chunk, Step
from splitserve.engine.warm import plans, warm_up
from splitserve.kv.pool import Pool
from splitserve.layers.v4 import kernels as plain_kernels
from splitserve.layers.v4.gpu import GpuKernels
from splitserve.models import deepseek_v4, registry
from splitserve.models.config import ModelConfig, Rope
from splitserve.models.deepseek_v4_config import CSA, HCA, from_json
from splitserve.models.deepseek_v4_kernels import kernels_for
from splitserve.models.make_checkpoint import T1, flash, write_checkpoint
from splitserve.models.read import read_config
from splitserve.ops.kernels.launch import on_compile
from splitserve.spec import Kind, lay_out
from splitserve.types import SamplingParams
from splitserve.weights.locate import Source, locate

GREEDY = SamplingParams(temperature=0.0)
PAGE = 256
BYTES_PER_S = 4.2e12  # of an H200, reads and writes together, as measured
LLAMA = ModelConfig("llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072, 1e-5, Rope(500000.0))


class Alone(SoloGroup):
    """Rank 0 of a group whose others are not there: a sum is its own part."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([x] * self.size, dim)


class Bench:
    """One rank."""

    def __init__(self, args: argparse.Namespace, rank: int, port: int) -> None:
        self.args = args
        self.device = torch.device("cuda", rank if torch.cuda.device_count() > rank else 0)
        torch.cuda.set_device(self.device)
        self.tp: Any = Alone(args.tp) if args.alone else make_group(rank, args.tp, port=port, device="cuda")
        if args.sums == "auto" and isinstance(self.tp, TorchGroup):
            self.tp = peers.join(self.tp, self.device, shared=False)
        self.lead = rank == 0
        if args.exact:
            deepseek_v4.kernels_for = lambda *_, **__: GpuKernels(exact=True)
        begun = time.monotonic()
        self.cfg: Any = LLAMA if args.model == "llama" else from_json(flash(args.layers), Path("config.json"))
        self.model: Any = registry.build(self.cfg, self.tp, dtype="bf16", device=str(self.device))
        registry.load(
            self.model, self.cfg, Source(Path(), "safetensors"), dummy=True, progress=lambda _: None
        )
        torch.cuda.synchronize()
        self.loaded_s = time.monotonic() - begun
        self.most = max(args.batches)
        per_seq = -(-(args.context + 512) // PAGE)
        self.pages = [list(range(1 + i * per_seq, 1 + (i + 1) * per_seq)) for i in range(self.most)]
        more = max([0, *args.prefill]) // PAGE
        kv = {} if args.model == "llama" else {"kv": "fp8"}
        specs = registry.states(self.cfg, dtype="bf16", **kv)
        self.layout = lay_out(specs, page_tokens=PAGE, rank=rank, size=args.tp)
        self.num_pages = 1 + self.most * per_seq + more
        self.pool = Pool(
            specs,
            layout=self.layout,
            num_pages=self.num_pages,
            num_slots=self.most + 1,
            device=self.device,
            allocate=lambda n: torch.zeros(n, dtype=torch.uint8, device=self.device),
        )
        self.spare = list(range(1 + self.most * per_seq, 1 + self.most * per_seq + more))
        self.draw = random.Random(7)
        self.pieces: Pieces | None = None

    def record_prompts(self, most: int, sizes: Sequence[int] = ()) -> float:
        """From now on passes of up to `most` tokens are taken apart."""
        self.pieces = Pieces(self.model, tp=self.tp, device=self.device, most=most)
        if sizes:
            self.pieces._sizes = tuple(sorted(sizes))
        return self.pieces.prepare()

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.draw.randrange(self.cfg.vocab) for _ in range(count))

    def chunk(self, rid: str, start: int, stop: int, pages: list[int], slot: int) -> Chunk:
        used = tuple(pages[: -(-stop // PAGE)])
        return Chunk(
            rid,
            start,
            stop,
            self.tokens(stop - start),
            used,
            slot,
            sample=True,
            sampling=GREEDY,
            num_prompt=1,
        )

    @torch.inference_mode()
    def forward(self, chunks: list[Chunk]) -> torch.Tensor:
        fwd = batch.build(
            batch.in_forward_order(Step(0, tuple(chunks))),
            {},
            page_tokens=PAGE,
            states=self.pool,
            tp=self.tp,
            device=self.device,
            between_layers=lambda: None,
        )
        served = self.pieces is not None and len(fwd.tokens) <= self.pieces.most
        return (self.pieces if served else self.model).forward(fwd)

    def prefill(self, length: int) -> dict[str, float]:
        """Milliseconds, each a whole prompt in one chunk; the first may also compile."""
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            begun = time.monotonic()
            logits = self.forward([self.chunk("p", 0, length, self.spare, self.most)])
            torch.cuda.synchronize()
            times.append((time.monotonic() - begun) * 1e3)
        assert logits.isfinite().all()
        return {"first_ms": times[0], **spread(times[1:])}

    def unseen(self, count: int) -> dict[str, Any]:
        """After a start's warm-up: passes of random shapes, milliseconds of each at its first and at its second use."""
        steps = plans(
            page_tokens=PAGE,
            num_pages=self.num_pages,
            max_len=self.args.max_len,
            has_slots=True,
            step_tokens=2048,
        )
        recording = self.record_prompts(2048)
        seconds = warm_up(
            self.pieces.forward, self.pool, list(steps), tp=self.tp, device=self.device, page_tokens=PAGE
        )
        found: list[float] = []
        again: list[float] = []
        compiled: list[str] = []
        seen: list[str] = []
        on_compile(compiled.append)
        for _ in range(count):
            chunks = []
            for i in range(self.draw.randint(1, min(4, self.most))):
                start = self.draw.choice((0, self.draw.randrange(1, 4000)))
                length = self.draw.choice((1, self.draw.randrange(2, 500)))
                chunks.append(self.chunk(str(i), start, start + length, self.pages[i], i))
            times = []
            for _ in range(3):
                torch.cuda.synchronize()
                begun = time.monotonic()
                self.forward(chunks)
                torch.cuda.synchronize()
                times.append((time.monotonic() - begun) * 1e3)
            found.append(times[0] / times[1])
            again.append(times[1] / times[2])  # how much two equal passes differ anyway
            seen += compiled
            compiled.clear()
        on_compile(None)
        found.sort()
        return {
            "recording_s": recording,
            "warm_up_s": seconds,
            "first_over_second": spread(found),
            "p99": found[int(0.99 * count)],
            "beyond_1.2": sum(r > 1.2 for r in found),
            "second_over_third": spread(again) | {"beyond_1.2": sum(r > 1.2 for r in again)},
            "compiled": dict(Counter(seen)),
        }

    def fill(self) -> None:
        """One prompt of the context's length, in chunks; its state copied to every sequence."""
        for start in range(0, self.args.context, 2048):
            self.forward([self.chunk("0", start, min(start + 2048, self.args.context), self.pages[0], 0)])
        memory = self.pool.memory
        for i in range(1, self.most):
            memory[Kind.PAGE][self.pages[i]] = memory[Kind.PAGE][self.pages[0]]
            if Kind.SLOT in memory:
                memory[Kind.SLOT][i] = memory[Kind.SLOT][0]
        torch.cuda.synchronize()

    def replay(self) -> tuple[Replay, float]:
        found = Replay(
            self.model,
            self.pool,
            page_tokens=PAGE,
            tp=self.tp,
            device=self.device,
            max_seqs=self.most,
            max_len=self.args.max_len,
        )
        found._sizes = tuple(self.args.batches)
        return found, found.prepare()

    def step_chunks(self, size: int, at: int) -> list[Chunk]:
        return [self.chunk(str(i), at, at + 1, self.pages[i], i) for i in range(size)]

    def decode(self, replay: Replay, size: int) -> dict[str, Any]:
        """Steps one behind the other, each launched before the one before is awaited."""
        steps = [self.step_chunks(size, self.args.context + i) for i in range(self.args.steps)]
        before, times = None, []
        torch.cuda.synchronize()
        for i, chunks in enumerate(steps):
            begun = time.monotonic()
            started = replay.start(chunks, [-1] * size, {})
            now = Replayed(i, chunks, started.told, meanwhile=lambda: None, settled=lambda _: None)
            if before is not None:
                before.result()
            before = now
            times.append((time.monotonic() - begun) * 1e3)
        assert before is not None
        assert all(s.finite for s in before.result().sampled.values())
        touched = self.bytes_touched(replay, steps[-1])
        return {"ms": spread(times[5:]), **touched}

    def bytes_touched(self, replay: Replay, chunks: list[Chunk]) -> dict[str, float]:
        """Of a step, at least: weights, of experts only those that are chosen; and keys and values."""
        size, context, cfg = len(chunks), self.args.context, self.cfg
        weights = sum(t.nbytes for t in tensors([self.model._layers, self.model._head]))
        if self.args.model == "llama":
            kv = size * context * 2 * cfg.num_kv_heads // self.args.tp * cfg.head_dim * 2 * cfg.num_layers
            return {"bound_ms": (weights + kv) / BYTES_PER_S * 1e3}
        chosen: list[int] = []
        ops = self.model.ops
        route, by_token = ops.route, ops.route_by_token

        def counting(op: Any) -> Any:
            def counted(*a: Any, **kw: Any) -> Any:
                found = op(*a, **kw)
                chosen.append(len(found[1].unique()))
                return found

            return counted

        ops.route, ops.route_by_token = counting(route), counting(by_token)
        with torch.inference_mode():
            replay._step(size)
        del ops.route, ops.route_by_token
        expert = sum(
            t.nbytes for layer in self.model._layers for t in tensors([layer.ffn.gate_up, layer.ffn.down])
        )
        table = sum(
            layer.ffn.experts_of_token.nbytes
            for layer in self.model._layers
            if layer.ffn.experts_of_token is not None
        )
        ratios = cfg.ratios[: cfg.num_layers]
        csa, hca = (sum(r == ratio for r in ratios) for ratio in (CSA, HCA))
        seen = min(cfg.index_topk, context // 4)
        kv = (
            584 * (cfg.num_layers * cfg.window_len + csa * seen + hca * context // 128)
            + csa * context // 4 * 132
        )
        touched = weights - expert - table + expert * sum(chosen) / len(chosen) / cfg.num_experts + kv * size
        return {
            "distinct_experts": sum(chosen) / len(chosen),
            "gigabytes": touched / 1e9,
            "bound_ms": touched / BYTES_PER_S * 1e3,
        }

    def profile(self, replay: Replay, size: int) -> list[tuple[str, float, float]]:
        """(kernel, microseconds a step, calls a step), the longest first."""
        from torch.profiler import ProfilerActivity, profile

        count = 5
        steps = [self.step_chunks(size, self.args.context + i) for i in range(count)]
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for chunks in steps:
                replay.start(chunks, [-1] * size, {})
            torch.cuda.synchronize()
        total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for event in found.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                total[event.name.split("(")[0][:60]][0] += event.device_time_total / count
                total[event.name.split("(")[0][:60]][1] += 1 / count
        return sorted(((n, us, c) for n, (us, c) in total.items()), key=lambda x: -x[1])


def tensors(thing: Any) -> Iterator[torch.Tensor]:
    """All tensors inside dataclasses and lists."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, list | tuple):
        for part in thing:
            yield from tensors(part)
    elif dataclasses.is_dataclass(thing):
        for f in dataclasses.fields(thing):
            yield from tensors(getattr(thing, f.name))


def check(console: Console, *, exact: bool) -> None:
    """T1 on the GPU, in bf16, against float32 on the CPU, which never rounds rows to e4m3."""
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory), T1)
        source = locate(Path(directory))
        cfg = read_config(source)
        found = []
        for device, dtype in (("cpu", "f32"), ("cuda", "bf16")):
            model: Any = registry.build(cfg, SoloGroup(), dtype=dtype, device=device)
            model.load(source)
            found.append(_run_t1(model, cfg, device, dtype))
    want, got = found
    for name in want:
        difference = (got[name] - want[name]).abs().mean() / want[name].std()
        same = (got[name].argmax(-1) == want[name].argmax(-1)).float().mean()
        console.print(
            f"T1, {'exact' if exact else 'rounded'} rows, {name}: mean difference {difference:.4f} of the logits' "
            f"spread; best token alike in {same:.0%}"
        )
        if exact:
            assert difference < 0.05, "more than bf16 and packed rows explain"


@torch.inference_mode()
def _run_t1(model: Any, cfg: Any, device: str, dtype: str) -> dict[str, torch.Tensor]:
    specs = registry.states(cfg, dtype=dtype)
    pool = Pool(
        specs,
        layout=lay_out(specs, page_tokens=PAGE),
        num_pages=8,
        num_slots=3,
        device=device,
        allocate=lambda n: torch.empty(n, dtype=torch.uint8, device=device),
    )
    pool.poison(range(8), range(3))
    draw = random.Random(3)
    texts = [[draw.randrange(cfg.vocab) for _ in range(700)] for _ in range(2)]
    pages, done, out = [[1, 2, 3], [4, 5, 6]], [0, 0], {}

    def chunks(counts: Sequence[int]) -> list[Chunk]:
        made = []
        for i, n in enumerate(counts):
            tokens = tuple(texts[i][done[i] : done[i] + n])
            stop = done[i] + n
            used = tuple(pages[i][: -(-stop // PAGE)])
            made.append(Chunk(str(i), done[i], stop, tokens, used, i, sample=True, sampling=GREEDY))
            done[i] = stop
        return made

    def forward(counts: Sequence[int]) -> torch.Tensor:
        fwd = batch.build(
            batch.in_forward_order(Step(0, tuple(chunks(counts)))), {}, page_tokens=PAGE, states=pool, tp=SoloGroup(),
            device=torch.device(device), between_layers=lambda: None,
        )  # fmt: skip
        return apart(fwd).float().cpu()

    apart = model.forward
    if device == "cuda":
        pieces = Pieces(model, tp=SoloGroup(), device=torch.device(device), most=1024)
        pieces.prepare()
        apart = pieces.forward
    out["two prompts"] = forward((600, 130))
    out["chunks that go on"] = forward((7, 21))
    out["single tokens"] = forward((1, 1))
    if device == "cpu":
        out["replayed"] = torch.cat([forward((1, 1)) for _ in range(8)])
        return out
    replay = Replay(
        model, pool, page_tokens=PAGE, tp=SoloGroup(), device=torch.device("cuda"), max_seqs=4, max_len=1024
    )
    replay.prepare()
    out["replayed"] = torch.cat(
        [replay.start(chunks((1, 1)), [-1, -1], {}).logits.float().cpu() for _ in range(8)]
    )
    return out


def run(rank: int, args: argparse.Namespace, port: int) -> None:
    console = Console(width=150)
    if args.check and rank == 0:
        for exact in (True, False):
            deepseek_v4.kernels_for = lambda _, device, *__, **___: (
                GpuKernels(exact=exact) if device == "cuda" else plain_kernels
            )
            check(console, exact=exact)
        deepseek_v4.kernels_for = kernels_for
    if not args.batches:
        return
    bench = Bench(args, rank, port)
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "loaded_s": bench.loaded_s,
        "sums": getattr(bench.tp, "how", "NCCL"),
    }
    say = console.print if bench.lead else (lambda *_: None)
    say(f"{args.model}, {bench.cfg.num_layers} layers, TP{args.tp}, sums by {result['sums']}: "
        f"weights in {bench.loaded_s:.1f} s, {torch.cuda.memory_allocated() / 1e9:.1f} GB")  # fmt: skip
    if args.unseen:
        result["unseen"] = bench.unseen(args.unseen)
        say(f"{args.unseen} unseen shapes: {result['unseen']}")
    for way in ("one by one", "in pieces") if args.prefill else ():
        if way == "in pieces":
            say(f"prompts recorded in {bench.record_prompts(max(args.prefill), args.prefill):.1f} s")
        for length in args.prefill:
            found = result[f"prefill {length} {way}"] = bench.prefill(length)
            say(f"prefill {length} {way}: {found}")
    bench.fill()
    replay, seconds = bench.replay()
    result["prepare_s"] = seconds
    say(f"graphs for {args.batches}: {seconds:.1f} s, {torch.cuda.memory_allocated() / 1e9:.1f} GB")
    table = Table(title=f"decode at {args.context} tokens", title_justify="left")
    for name in ("batch", "ms", "min", "bound ms", "of the bound", "distinct experts"):
        table.add_column(name, justify="right")
    for size in args.batches:
        found = result[f"decode {size}"] = bench.decode(replay, size)
        ms, bound = found["ms"]["median"], found["bound_ms"]
        table.add_row(
            str(size), f"{ms:.3f}", f"{found['ms']['min']:.3f}", f"{bound:.3f}", f"{bound / ms:.2f}",
            f"{found.get('distinct_experts', 0):.1f}",
        )  # fmt: skip
    say(table)
    for size in args.profile:
        kernels = bench.profile(replay, size)
        result[f"profile {size}"] = kernels
        say(
            f"batch {size}: kernels {sum(us for _, us, _ in kernels):.0f} us in {sum(c for *_, c in kernels):.0f} calls"
        )
        for name, us, calls in kernels[: args.top]:
            say(f"  {us:9.1f} us {calls:7.1f} calls {us / calls:7.2f} us  {name}")
    if bench.lead and args.keep:
        say(f"kept in {keep(args.keep, result)}")
    replay.close()
    if bench.pieces:
        bench.pieces.close()
    bench.tp.close()


def main() -> int:
    args = parser().parse_args()
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    if args.tp == 1 or args.alone:
        run(0, args, port)
    else:
        torch.multiprocessing.spawn(run, (args, port), nprocs=args.tp)
    return 0


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", choices=("deepseek", "llama"), default="deepseek")
    p.add_argument("--layers", type=int, default=36, help="of DeepSeek-V4-Flash")
    p.add_argument("--tp", type=int, default=1)
    p.add_argument(
        "--alone", action="store_true", help="rank 0 of the group without the others, nothing is summed"
    )
    p.add_argument("--batches", type=numbers, default=(1, 8, 16, 64))
    p.add_argument("--context", type=int, default=4096)
    p.add_argument("--max-len", type=int, default=8192)
    p.add_argument("--prefill", type=numbers, default=())
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--unseen", type=int, default=0, help="so many passes of random shapes after a warm-up")
    p.add_argument("--profile", type=numbers, default=())
    p.add_argument("--top", type=int, default=30)
    p.add_argument(
        "--exact", action="store_true", help="rows are not rounded to e4m3 before products with codes"
    )
    p.add_argument(
        "--sums", choices=("auto", "nccl"), default="auto", help="between ranks, as in a deployment"
    )
    p.add_argument("--check", action="store_true")
    p.add_argument("--keep", default="", metavar="NAME")
    return p


if __name__ == "__main__":
    sys.exit(main())
