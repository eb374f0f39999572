"""What every benchmark here shares: the machine, the commit, medians with their spread, and where results are kept."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """The processor, its cores in use, memory and load: results of two machines are not comparable."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def commit() -> str:
    """The commit of the working tree, with + where it has changes; "unknown" outside a repository."""
    root = Path(__file__).parent.parent
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    if head.returncode:
        return os.environ.get("SPLITSERVE_COMMIT", "unknown")
    dirty = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=root, check=False).returncode
    return head.stdout.strip() + ("+" if dirty else "")


def spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "min": ordered[0], "max": ordered[-1], "n": len(ordered)}


def keep(name: str, result: Any, *, places: Sequence[str] = ()) -> Path:
    """Write results/NAME.json with command, commit and machine.

    The command shows DIR for the values of the options in `places`: where something lies here is nobody else's affair.
    """
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {
        "command": "python -m " + " ".join([_module(), *_shown(sys.argv[1:], places)]),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "result": result,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def _shown(words: Sequence[str], places: Sequence[str]) -> list[str]:
    before = ["", *words]
    return ["DIR" if last in places else word for last, word in zip(before, words, strict=False)]


def _module() -> str:
    path = Path(sys.argv[0]).resolve()
    return ".".join(path.relative_to(Path(__file__).resolve().parent.parent).with_suffix("").parts)
