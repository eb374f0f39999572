"""Every kind of process of a pair dies three times under a load of eight streams: benchmarks/serve/drill.py, in short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WELL_AGAIN_S = 45.0
"""From a death until a token comes through the pair again: an engine's start on a busy machine of two cores, and back-off."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_hangs_is_wrong_or_is_lost_while_every_process_dies_three_times() -> None:
    words = [
        "--num",
        "450",
        "--turns",
        "3",
        "--decodes",
        "1",
        "--concurrency",
        "8",
        "--until-well",
        "--keep",
        "",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.serve.drill", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(done.stdout[done.stdout.index("\n{") :])
    assert result["requests"] > 450
    assert result["ended"]["answered"] > 150
    assert (result["hung"], result["wrong"], result["unanswered"], result["lost_pages"]) == (0, 0, 0, 0)
    assert len(result["kills"]) == 15
    assert result["slowest_recovery_s"] < WELL_AGAIN_S
