"""How long does `splitserve doctor --fabric` take for a whole box, and what does it find on host memory?

    python -m benchmarks.transfer.fabric [--ranks 4] [--transport nixl] [--repeats 3] [--keep fabric]

Runs the command a person would, on a deployment of RANKS prefill and RANKS decode ranks: RANKS x RANKS pairs, each way,
four sizes. With fewer cores than ranks they share cores, and all-at-once figures say what the cores carry.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import keep, spread

FILE = """
[deployment]
name = "fabric"
model = "none"
[engine]
tp = {ranks}
[prefill]
[decode]
[transfer]
transport = "{transport}"
"""


def measure(ranks: int, transport: str) -> dict[str, Any]:
    """One run of the command: its seconds and what it printed."""
    with tempfile.TemporaryDirectory() as home:
        file = Path(home) / "fabric.toml"
        file.write_text(FILE.format(ranks=ranks, transport=transport))
        begun = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "splitserve", "doctor", "--fabric", str(file), "--json"],
            env={**os.environ, "XDG_STATE_HOME": home},
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - begun
        if done.returncode not in (0, 1):
            raise SystemExit(done.stderr)
        return {"seconds": seconds, **json.loads(done.stdout)}


def summary(run: dict[str, Any]) -> dict[str, Any]:
    """Medians over the pairs of one run."""
    links = run["fabric"]["links"]
    sizes = sorted(links[0]["alone"], key=int)
    return {
        "seconds": round(run["seconds"], 1),
        "put_gb_s": {n: spread([link["alone"][n] for link in links]) for n in sizes},
        "get_gb_s": {n: spread([link["get"][n] for link in links]) for n in sizes},
        "put_all_at_once_gb_s": sum(link["together"] for link in links),
        "get_all_at_once_gb_s": sum(link["get_together"] for link in links),
        "tcp_gb_s": run["fabric"]["tcp"],
        "copy_gb_s": run["fabric"]["memcpy"],
        "lane": links[0]["lane"],
        "direction": run["verdict"]["direction"],
        "why": run["verdict"]["why"],
        "findings": [f["kind"] for f in run["verdict"]["findings"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", default="fabric")
    args = parser.parse_args()
    runs = [summary(measure(args.ranks, args.transport)) for _ in range(args.repeats)]
    for run in runs:
        print(json.dumps(run))
    result = {"pairs": args.ranks**2, "seconds": spread([r["seconds"] for r in runs]), "runs": runs}
    print(keep(args.keep, result))


if __name__ == "__main__":
    main()
