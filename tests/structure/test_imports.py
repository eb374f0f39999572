"""Every module can be imported first and alone; the torch-free zone without torch; `--help` answers at once."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from package import ROOT, module_name, sources, zone

MOST_IMPORT_S = 0.3
"""Processor time, so that a busy machine does not count."""

TRIES = 3

OTHERS = (
    "asyncio",
    "msgspec",
    "numpy",
    "uvloop",
    "httptools",
    "zmq",
    "multiprocessing",
    "concurrent.futures",
)
"""Imported once before the modules that need them; none of them is torch."""


def import_each(modules: list[str], *before: str) -> dict[str, dict[str, Any]]:
    script = Path(__file__).with_name("import_each.py")
    done = subprocess.run(
        [sys.executable, str(script), *before],
        input="\n".join(modules),
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    results = {r["module"]: r for r in map(json.loads, done.stdout.splitlines())}
    assert set(results) == set(modules), done.stderr[-2000:]
    return results


def test_the_zone_imports_alone_and_without_torch():
    alone = import_each(zone(), *OTHERS)
    assert {m: r["error"] for m, r in alone.items() if r["error"]} == {}
    assert {m: r["loaded"] for m, r in alone.items() if {"torch", "nixl"} & set(r["loaded"])} == {}


@pytest.mark.slow
def test_everything_else_imports_alone():
    rest = sorted({module_name(p) for p in sources()} - set(zone()))
    results = import_each(rest, "torch")
    assert {m: r["error"] for m, r in results.items() if r["error"]} == {}


def test_importing_the_package_imports_nothing_else():
    code = "import sys, splitserve; print([m for m in sys.modules if m.startswith('splitserve.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_help_is_there_at_once():
    taken = []
    for _ in range(TRIES):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "splitserve", "--help"], capture_output=True, check=True, cwd=ROOT
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(taken) < MOST_IMPORT_S, taken
