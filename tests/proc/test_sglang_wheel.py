"""Our command lines for SGLang before SGLang's own argument parser, taken from its wheel. Slow, and only where it is.

    python -m pip install --no-deps --target DIR sglang==0.5.23
    SPLITSERVE_TEST_SGLANG=DIR python -m pytest -m slow tests/proc/test_sglang_wheel.py

`make engines-sglang` does both. SGLang's other requirements are not installed: the parser's modules import a few of
them, which stand in as blanks here, as no word of a command line needs them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from splitserve.config import EngineConfig, ServerConfig, TransferConfig
from splitserve.launch.commands import fill
from splitserve.launch.engines import ADAPTERS
from splitserve.launch.engines.seat import Program, Seat
from splitserve.types import Role

WHEEL = os.environ.get("SPLITSERVE_TEST_SGLANG", "")

PARSE = """
import argparse, importlib.abc, importlib.machinery, json, os, sys, types
from unittest.mock import MagicMock

BLANK = {"PIL", "dill", "orjson", "pybase64", "pynvml", "python_multipart", "torchcodec", "triton", "aiohttp", "fastapi"}

class Blanks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        blank = name.split(".")[0] in BLANK
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if blank else None
    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__name__ = spec, [], spec.name
        return module
    def exec_module(self, module):
        pass

sys.meta_path.append(Blanks())
root = os.path.join(sys.argv[1], "sglang")
for name, path in (("sglang", root), ("sglang.srt", os.path.join(root, "srt"))):  # without their __init__
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
sys.modules["sglang"].srt = sys.modules["sglang.srt"]
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
found = [vars(parser.parse_args(words)) for words in json.loads(sys.argv[2])]
print("PARSED" + json.dumps(found, default=str))
"""

GIVEN: dict[str, Any] = {
    "served_name": "n",
    "max_len": 9000,
    "max_seqs": 8,
    "step_tokens": 512,
    "page_tokens": 32,
    "dtype": "bf16",
    "kv_dtype": "fp8",
    "prefix_cache": False,
    "dummy_weights": True,
}


def words(role: Role) -> list[str]:
    config = EngineConfig(model="m", tp=2, device="cuda", role=str(role), **GIVEN)
    seat = Seat(
        name="e",
        role=role,
        config=config,
        transfer=TransferConfig(),
        server=ServerConfig(),
        program=Program("sglang"),
        given=frozenset(GIVEN),
        gpus=(0, 1),
        node=1,
    )
    line = ADAPTERS["sglang"].argv(seat)[2:]  # after -m sglang.launch_server
    return list(fill(line, {"e.http": 9000, "e.bootstrap": 9001, "e.dist": 9002}))


@pytest.mark.slow
@pytest.mark.skipif(
    not Path(WHEEL, "sglang").is_dir() or not WHEEL, reason="SPLITSERVE_TEST_SGLANG names no wheel"
)
def test_sglangs_own_parser_takes_every_word() -> None:
    lines = [words(role) for role in (Role.PREFILL, Role.DECODE, Role.UNIFIED)]
    argv = [sys.executable, "-c", PARSE, WHEEL, json.dumps(lines)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    prefill, decode, unified = json.loads(done.stdout.rpartition("PARSED")[2])
    assert (prefill["disaggregation_mode"], decode["disaggregation_mode"]) == ("prefill", "decode")
    assert prefill["disaggregation_transfer_backend"] == decode["disaggregation_transfer_backend"] == "nixl"
    assert unified["disaggregation_mode"] == "null"
    assert (prefill["disaggregation_bootstrap_port"], prefill["dist_init_addr"]) == (9001, "127.0.0.1:9002")
    assert (prefill["numa_node"], prefill["tp_size"], prefill["port"]) == ([1, 1], 2, 9000)
    assert (decode["context_length"], decode["max_running_requests"], decode["page_size"]) == (9000, 8, 32)
    assert (decode["chunked_prefill_size"], decode["dtype"]) == (512, "bfloat16")
    assert (decode["kv_cache_dtype"], decode["load_format"]) == ("fp8_e4m3", "dummy")
    assert decode["disable_radix_cache"] is True
    assert decode["served_model_name"] == "n"
