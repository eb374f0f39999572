"""How long each part of the torch-free zone takes to import alone: processor time of a fresh interpreter.

    python -m benchmarks.imports

The aim is 0.3 s. It is a benchmark and not a test: the same import costs twice as much on a busy machine.
"""

from __future__ import annotations

import subprocess
import sys

from rich.console import Console
from rich.table import Table

from benchmarks.measure import keep, spread

AIM_S = 0.3
DOORS = (
    "splitserve.cli",
    "splitserve.server.main",
    "splitserve.router.main",
    "splitserve.engine.scheduler",
    "splitserve.transfer.sender",
    "splitserve.transfer.receiver",
    "splitserve.launch.supervisor",
    "splitserve.bench.main",
    "splitserve.proof.main",
)
"""The modules that a process starts with; what they import is in their time."""

SCRIPT = "import time; t = time.process_time(); import {}; print(time.process_time() - t)"


def seconds(module: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(module)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    rows = {module: spread([seconds(module) for _ in range(7)]) for module in DOORS}
    table = Table(title=f"import alone, processor seconds (aim: under {AIM_S})")
    for heading in ("module", "median", "min", "max"):
        table.add_column(heading, justify="left" if heading == "module" else "right")
    for module, found in rows.items():
        table.add_row(module, *(f"{found[k]:.2f}" for k in ("median", "min", "max")))
    Console().print(table)
    print(keep("imports", rows))


if __name__ == "__main__":
    main()
