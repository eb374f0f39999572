"""The tool that measures us beside other servers: its places, and what it cures vLLM's pair of."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.serve import peers, vllm_pair
from splitserve.errors import ConfigError

CHECK = """
import os
from nixl_cu12 import _bindings
config = _bindings.nixlAgentConfig()
for delay in (0, 5000):
    config.pthrDelay = config.lthrDelay = delay
    print(config.pthrDelay, config.lthrDelay)
all_cores = os.sched_getaffinity(0)
for name in ("vllm.distributed.kv_transfer.worker", "anybody"):
    exec("import os; os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])", {"__name__": name})
    print(os.sched_getaffinity(0) == all_cores)
"""


def test_a_repaired_python_pauses_and_stays_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "nixl_cu12").mkdir()
    (tmp_path / "nixl_cu12" / "__init__.py").touch()
    (tmp_path / "nixl_cu12" / "_bindings.py").write_text("class nixlAgentConfig: pass\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(vllm_pair.REPAIRED), str(tmp_path)))}
    done = subprocess.run([sys.executable, "-c", CHECK], env=env, capture_output=True, text=True, check=True)
    stays = len(os.sched_getaffinity(0)) == 1
    assert done.stdout.split() == ["100", "0", "5000", "5000", "True", str(stays)]
    assert "pauses 100 us" in done.stderr
    assert "not moved" in done.stderr


def test_places_of_a_command() -> None:
    args = argparse.Namespace(model="/m", concurrency=(1, 8), place=["venv=/v"])
    words = peers.filled("{venv}/bin/serve '{model}' --at {port} --batch {concurrency}", args, {"port": "7"})
    assert words == ["/v/bin/serve", "/m", "--at", "7", "--batch", "1,8"]
    with pytest.raises(ConfigError, match="nowhere"):
        peers.filled("{nowhere}/bin/serve", args, {})


def test_a_program_tells_its_figures_in_its_last_line() -> None:
    args = argparse.Namespace(model="", concurrency=(1,), place=[])
    found = peers.Found(["p"], [1])
    said = """print("loading"); print('{"start_s": 2.5, "1": {"ttft_ms": 4.0}}')"""
    words = shlex.join([sys.executable, "-c", said]).replace("{", "{{").replace("}", "}}")
    peers.run_program("p", words, args, found)
    assert found.arms == {"p": {"start_s": [2.5], "1": {"ttft_ms": [4.0]}}}
    with pytest.raises(ConfigError, match="ended with 3"):
        peers.run_program("p", f"{sys.executable} -c 'import sys; sys.exit(3)'", args, found)
