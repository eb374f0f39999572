"""GB/s of one prompt's state from GPU 0 to GPU 1, process to process, against a plain peer copy of the same bytes.

    python -m benchmarks.transfer.gpus [--tokens 8192] [--repeats 9] [--see own|all] [--ucx TLS=...]

Layouts of DeepSeek-V4-Flash (36 layers, packed rows, pages of 256) and Llama-3.1-8B (bf16, pages of 64), no weights.
Each is written twice: into pages that lie side by side, as an idle engine gives them out, and between pages in random
order, as after long service. Writes and peer copies alternate in one run. A write is timed from posting to its end as
the engine sees it, with its note; the copy by events on the device. `--see own`: each process sees its own GPU only, as
`up` starts engines; `all`: both see both.

Without two GPUs it measures nothing; `--device cpu` runs every line of it in host memory, with memcpy as the copy.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import random
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import keep, spread
from splitserve import wire
from splitserve.config import TransferConfig
from splitserve.spec import Kind, Units, lay_out
from splitserve.transfer.layout import Copies, copies

LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
"""Shapes of Llama-3.1-8B, from its public config.json."""

SHAPES = {"deepseek-v4-flash, 36 layers": ("fp8", 256), "llama-3.1-8b": ("auto", 64)}  # rows, page_tokens


class Rank:
    """One process's end: slabs on its device, registered."""

    def __init__(
        self, name: str, shape: str, tokens: int, *, device: str, transport: str, ucx: tuple[str, ...]
    ) -> None:
        import torch

        from splitserve.engine.device import allocator
        from splitserve.kv.pool import Pool
        from splitserve.models.read import read_config
        from splitserve.models.registry import states
        from splitserve.transfer import transport as transports
        from splitserve.transfer.port import make_card
        from splitserve.weights.locate import locate

        kv, page_tokens = SHAPES[shape]
        with tempfile.TemporaryDirectory() as at:
            write_config(shape, Path(at))
            specs = states(read_config(locate(at)), dtype="bf16", kv=kv)
        self.layout = lay_out(specs, page_tokens=page_tokens)
        if device != "cpu":
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)  # NIXL looks for a context
        config = TransferConfig(transport=transport, ucx=ucx)
        self.transport = transports.make(transport, agent_name=f"{name}.0", config=config)
        self.num_pages = -(-tokens // page_tokens)
        self.pool = Pool(
            specs,
            layout=self.layout,
            num_pages=self.num_pages,
            num_slots=1 if self.layout.slot_bytes else 0,
            device=device,
            allocate=self.transport.allocate if device == "cpu" else allocator(torch.device(device)),
        )
        for memory in self.pool.memory.values():
            memory.random_(0, 256)  # not zeros, and touched
        agent = self.transport.register(self.pool.slabs)
        self.card = make_card(
            self.transport,
            agent=agent,
            engine=name,
            layout=self.layout,
            slabs=self.pool.slabs,
            rank=0,
            size=1,
        )

    def units(self, tokens: int, *, shuffled: bool, side: str) -> tuple[Units, ...]:
        """The request's units on one side; in random order they are another order on each."""
        ids = list(range(self.num_pages))
        if shuffled:
            random.Random(side).shuffle(ids)
        found = [Units(Kind.PAGE, tuple(ids), 0, 0, tokens)]
        if self.layout.slot_bytes:
            found.append(Units(Kind.SLOT, (0,), 0, 0, tokens))
        return tuple(found)

    def close(self) -> None:
        self.transport.close()
        self.pool.close()


def write_config(shape: str, at: Path) -> None:
    if shape.startswith("llama"):
        (at / "config.json").write_text(json.dumps(LLAMA_8B))
        return
    from splitserve.models.make_checkpoint import FLASH

    (at / "config.json").write_text(
        json.dumps(FLASH | {"num_hidden_layers": 36, "num_nextn_predict_layers": 0})
    )


def end_of(args: argparse.Namespace, number: int) -> str:
    """The device of process `number`, as it sees it; makes its choice of GPUs before torch is imported."""
    if args.device == "cpu":
        return "cpu"
    if args.see == "own":
        os.environ["CUDA_VISIBLE_DEVICES"] = str(number)
        return "cuda:0"
    return f"cuda:{number}"


def receive(line: Connection, args: argparse.Namespace, shape: str) -> None:
    """The peer: its slabs' sum of bytes is asked for at the end; until then it only polls."""
    from splitserve.transfer.digest import HostDigests

    device = end_of(args, 1)
    rank = Rank("decode", shape, args.tokens, device=device, transport=args.transport, ucx=args.ucx)
    line.send_bytes(wire.encode(rank.card))
    while True:
        rank.transport.poll()
        if not line.poll(0):
            continue
        asked = line.recv()
        if asked is None:
            break
        digests: Any = HostDigests(rank.pool.slabs) if device == "cpu" else _on_device(rank)
        units = rank.units(args.tokens, shuffled=asked, side="decode")
        fields = (*rank.layout.page_fields, *rank.layout.slot_fields)
        line.send(digests.of_all(fields, units, start=0, stop=args.tokens, last=True))
    rank.close()


def _on_device(rank: Rank) -> Any:
    from splitserve.engine.digests import DeviceDigests

    return DeviceDigests(rank.pool.memory)


def send(line: Connection, args: argparse.Namespace, shape: str, result: Connection) -> None:
    """The prefill end: writes, timed, and what both sides' digests say."""
    device = end_of(args, 0)
    rank = Rank("prefill", shape, args.tokens, device=device, transport=args.transport, ucx=args.ucx)
    card = wire.decoder(wire.Card).decode(line.recv_bytes())
    peer = rank.transport.connect(card)
    rows = []
    for shuffled in (False, True):
        units, theirs = (rank.units(args.tokens, shuffled=shuffled, side=s) for s in ("prefill", "decode"))
        begun = time.perf_counter()
        what = copies(rank.card, card, units, theirs, start=0, stop=args.tokens, last=True)
        worked_out = time.perf_counter() - begun
        first = timed_write(rank.transport, peer, what)
        times = []
        for _ in range(args.repeats):
            times.append(timed_write(rank.transport, peer, what))
            # The parent copies as much between two writes of ours, so that both meet the same machine.
            result.send(what.num_bytes)
            result.recv()
        line.send(shuffled)
        there = line.recv()
        fields = (*rank.layout.page_fields, *rank.layout.slot_fields)
        digests: Any = _host(rank) if device == "cpu" else _on_device(rank)
        ours = digests.of_all(fields, units, start=0, stop=args.tokens, last=True)
        rows.append(
            {
                "layout": shape,
                "tokens": args.tokens,
                "pages": "in random order" if shuffled else "side by side",
                "bytes": what.num_bytes,
                "descriptors": len(what),
                "copies_ms": worked_out * 1e3,
                "first_gb_s": what.num_bytes / first / 1e9,
                "write_gb_s": spread([what.num_bytes / t / 1e9 for t in times]),
                "write_ms": spread([t * 1e3 for t in times]),
                "digests_agree": ours == there,
                "lane": ", ".join(sorted(set(rank.transport.lanes().values()))),
            }
        )
    line.send(None)
    rank.close()
    result.send(rows)


def _host(rank: Rank) -> Any:
    from splitserve.transfer.digest import HostDigests

    return HostDigests(rank.pool.slabs)


def timed_write(transport: Any, peer: str, what: Copies) -> float:
    from splitserve.transfer.transport import Broken, Written

    begun = time.perf_counter()
    number = transport.write(peer, what, b"note")
    while True:
        for event in transport.poll():
            if isinstance(event, Broken):
                raise SystemExit(f"the write broke: {event.error}")
            if event == Written(number):
                return time.perf_counter() - begun


def peer_copy(device: str, nbytes: int) -> Callable[[], float]:
    """A copy of as many bytes in one piece, GPU 0 to GPU 1 (or memcpy); the function returns its GB/s."""
    import torch

    on_gpu = device != "cpu"
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda:0" if on_gpu else "cpu")
    target = torch.zeros(nbytes, dtype=torch.uint8, device="cuda:1" if on_gpu else "cpu")

    def copy() -> float:
        if not on_gpu:
            begun = time.perf_counter()
            target.copy_(source)
            return nbytes / (time.perf_counter() - begun) / 1e9
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(0):
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
        return nbytes / start.elapsed_time(end) / 1e6

    copy()
    return copy


def measure(args: argparse.Namespace, shape: str) -> list[dict[str, Any]]:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    here, there = context.Pipe()
    ends = [
        context.Process(target=receive, args=(theirs, args, shape)),
        context.Process(target=send, args=(ours, args, shape, there)),
    ]
    for end in ends:
        end.start()
    copied: list[float] = []
    copy: Callable[[], float] | None = None
    try:
        while True:
            if not here.poll(120.0):
                raise SystemExit("an end says nothing for two minutes")
            said = here.recv()
            if not isinstance(said, int):
                break
            copy = copy or peer_copy(args.device, said)
            copied.append(copy())
            here.send("done")
    finally:
        for end in ends:
            end.join(10.0)
            if end.is_alive():
                end.kill()
    peer = spread(copied)
    for row in said:
        row["peer_copy_gb_s"] = peer
        row["ratio"] = row["write_gb_s"]["median"] / peer["median"]
    return said


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="one prompt's state, GPU 0 to GPU 1, GB/s: median (min-max)")
    for heading in (
        "layout",
        "pages",
        "MB",
        "descr.",
        "first",
        "write",
        "ms",
        "peer copy",
        "ratio",
        "digests",
        "lane",
    ):
        table.add_column(heading, justify="right")
    for r in rows:
        w, c = r["write_gb_s"], r["peer_copy_gb_s"]
        table.add_row(
            r["layout"],
            r["pages"],
            f"{r['bytes'] / 1e6:.1f}",
            str(r["descriptors"]),
            f"{r['first_gb_s']:.1f}",
            f"{w['median']:.1f} ({w['min']:.1f}-{w['max']:.1f})",
            f"{r['write_ms']['median']:.2f}",
            f"{c['median']:.1f} ({c['min']:.1f}-{c['max']:.1f})",
            f"{r['ratio']:.2f}",
            "agree" if r["digests_agree"] else "DIFFER",
            r["lane"],
        )
    Console(width=180).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--see", choices=("own", "all"), default="own")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--ucx", type=lambda text: tuple(text.split(";")), default=())
    parser.add_argument("--out", default="handoff-gpus", help="name under benchmarks/results/")
    args = parser.parse_args()
    rows = [row for shape in SHAPES for row in measure(args, shape)]
    show(rows)
    gpu = ""
    if args.device == "cuda":
        import torch

        gpu = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    print(keep(args.out, {"gpu": gpu, "see": args.see, "ucx": args.ucx, "rows": rows}))


if __name__ == "__main__":
    main()
