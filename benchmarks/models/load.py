"""How long a rank takes to load a DeepSeek-V4 checkpoint, and how much memory at most: its share of it and little more.

    python -m benchmarks.models.load [--experts 16] [--layers 4] [--scratch DIR]

Writes a random checkpoint of Flash's real widths, with fewer layers, experts and words, into a temporary directory (in
DIR), and loads it in a process of its own for each rank of each TP size. Memory is the process's anonymous memory
(weights and buffers, not the page cache), sampled every 5 ms while it loads, less what it was before; the share is the
bytes of the parameters that the rank holds in the end. The file has just been written, so it is read from the page
cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import keep

SIZES = ((0, 1), (0, 2), (1, 2))
"""(rank, of)"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=65_536)
    parser.add_argument("--scratch", metavar="DIR", help="where the temporary directory is made")
    parser.add_argument("--child", nargs=3, metavar=("DIR", "RANK", "SIZE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(Path(args.child[0]), int(args.child[1]), int(args.child[2]))))
        return
    with tempfile.TemporaryDirectory(dir=args.scratch) as directory:
        begin = time.monotonic()
        num_bytes = write(Path(directory), args)
        print(f"{num_bytes / 1e9:.2f} GB written in {time.monotonic() - begin:.0f} s", flush=True)
        ranks = [in_process(directory, rank, size) for rank, size in SIZES]
    result = {"checkpoint_bytes": num_bytes, "ranks": ranks}
    for r in ranks:
        print(
            f"rank {r['rank']} of {r['size']}: {r['seconds']:.1f} s, {r['share_bytes'] / 1e9:.2f} GB held, "
            f"{r['peak_bytes'] / 1e9:.2f} GB at most"
        )
    print(keep("v4_load", result))


def write(directory: Path, args: argparse.Namespace) -> int:
    """A checkpoint of the released widths; returns its bytes."""
    from splitserve.models.make_checkpoint import flash, write_checkpoint

    config = flash(args.layers) | {"n_routed_experts": args.experts, "vocab_size": args.vocab}
    return write_checkpoint(directory, config, shard_bytes=1 << 30)


def in_process(directory: str, rank: int, size: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.models.load", "--child", directory, str(rank), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@dataclass(frozen=True)
class Rank:
    """A rank's place in a group that is not there: loading asks nobody."""

    rank: int
    size: int


def measure(directory: Path, rank: int, size: int) -> dict[str, Any]:
    import torch

    from splitserve.models import deepseek_v4, registry
    from splitserve.models.read import read_config
    from splitserve.weights.locate import locate

    source = locate(directory)
    held: list[torch.Tensor] = []
    real = deepseek_v4.read_parameters

    def read_parameters(*args: Any, **kw: Any) -> dict[str, torch.Tensor]:
        found = real(*args, **kw)
        held.extend(found.values())
        return found

    deepseek_v4.read_parameters = read_parameters  # to count what the rank keeps, as the loader made it
    model = registry.build(read_config(source), Rank(rank, size), dtype="bf16")
    before, begin = anonymous_bytes(), time.monotonic()
    with Peak() as peak:
        model.load(source)
    return {
        "rank": rank,
        "size": size,
        "seconds": time.monotonic() - begin,
        "share_bytes": sum(t.numel() * t.element_size() for t in held),
        "peak_bytes": peak.bytes - before,
        "after_bytes": anonymous_bytes() - before,
    }


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


class Peak:
    """The most anonymous memory of this process inside the `with`."""

    def __init__(self) -> None:
        self.bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.bytes = max(self.bytes, anonymous_bytes())


if __name__ == "__main__":
    main()
