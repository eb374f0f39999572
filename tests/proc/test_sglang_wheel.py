"""Our command lines before SGLang's own argument parser, and what our router sends before its own bootstrap server.

Both are taken from SGLang's wheel. Slow, and only where it is.

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
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from splitserve.config import EngineConfig, ServerConfig, TransferConfig
from splitserve.launch.commands import fill
from splitserve.launch.engines import ADAPTERS
from splitserve.launch.engines.seat import Program, Seat
from splitserve.router.dialects.sglang import Sglang
from splitserve.router.fleet import Endpoint, Fleet, Route
from splitserve.router.rewrite import prepare
from splitserve.types import Role
from tests.proc.real import until
from tests.ranks import free_port

WHEEL = os.environ.get("SPLITSERVE_TEST_SGLANG", "")

BLANKS = """
import importlib.abc, importlib.machinery, os, sys, types
from unittest.mock import MagicMock

class Blanks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, is_blank):
        self.is_blank = is_blank
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if self.is_blank(name) else None
    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__name__ = spec, [], spec.name
        return module
    def exec_module(self, module):
        pass

def without_init(*names):
    for name in names:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [os.path.join(sys.argv[1], *name.split("."))]
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, sys.modules[name])
"""
"""What both scripts begin with: modules that stand in as blanks, and packages of the wheel without their __init__."""

PARSE = (
    BLANKS
    + """
import argparse, json

ABSENT = {"PIL", "dill", "orjson", "pybase64", "pynvml", "python_multipart", "torchcodec", "triton", "aiohttp", "fastapi"}
sys.meta_path.append(Blanks(lambda name: name.split(".")[0] in ABSENT))
without_init("sglang", "sglang.srt")
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
found = [vars(parser.parse_args(words)) for words in json.loads(sys.argv[2])]
print("PARSED" + json.dumps(found, default=str))
"""
)

BOOTSTRAP = (
    BLANKS
    + """
PACKAGES = ("sglang", "sglang.srt", "sglang.srt.disaggregation", "sglang.srt.disaggregation.common",
            "sglang.srt.disaggregation.base")
REAL = {*PACKAGES, "sglang.srt.disaggregation.common.conn", "sglang.srt.disaggregation.base.conn", "sglang.srt.environ"}
sys.meta_path.insert(0, Blanks(lambda name: name.split(".")[0] in ("sglang", "requests") and name not in REAL))
without_init(*PACKAGES)
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer
CommonKVBootstrapServer(sys.argv[2], int(sys.argv[3])).thread.join()
"""
)

RANK: dict[str, Any] = {
    **dict.fromkeys(("attn_tp_size", "attn_cp_size", "attn_dp_size", "pp_size", "system_dp_size"), 1),
    **dict.fromkeys(("attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "pp_rank", "system_dp_rank"), 0),
    **dict.fromkeys(("enable_dsa_cache_layer_split", "enable_kv_cache_sharding"), False),
    **dict.fromkeys(("kv_layout", "dsv41_spec_layout")),
    "rank_ip": "127.0.0.1",
    "rank_port": 4321,
    "page_size": 64,
    "kv_cache_dtype": "auto",
    "load_balance_method": "round_robin",
    "prefill_http_port": 30000,
    "decode_allocation_policy": "early",
}
"""What a prefill rank of SGLang's registers."""

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


def words(role: Role, bootstrap: int = 9001) -> list[str]:
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
    return list(fill(line, {"e.http": 9000, "e.bootstrap": bootstrap, "e.dist": 9002}))


needs_wheel = pytest.mark.skipif(
    not Path(WHEEL, "sglang").is_dir() or not WHEEL, reason="SPLITSERVE_TEST_SGLANG names no wheel"
)


@pytest.mark.slow
@needs_wheel
def test_decode_finds_prefill_at_sglangs_own_bootstrap_server_where_our_router_says() -> None:
    """The server as our words start it; asked, as decode asks, at what our router puts into the body."""
    pytest.importorskip("aiohttp")
    given = words(Role.PREFILL, bootstrap=free_port())
    host, port = (given[given.index(flag) + 1] for flag in ("--host", "--disaggregation-bootstrap-port"))
    server = subprocess.Popen([sys.executable, "-c", BOOTSTRAP, WHEEL, host, port])
    try:
        fleet = Fleet()
        prefill = fleet.add(Endpoint.parse(f"http://{host}:9000,{port}", Role.PREFILL))
        route = Route(prefill, fleet.add(Endpoint.parse(f"http://{host}:9001", Role.DECODE)))
        body = Sglang().opening(prepare(b'{"text":"x"}', seed=None), route, lambda: 42, b"").to_answer
        told = json.loads(body)
        url = f"http://{told['bootstrap_host']}:{told['bootstrap_port']}"
        until("it listens", lambda: asked(f"{url}/health")[0] == 200, within_s=90.0)
        every, first = (
            f"{url}/route?prefill_dp_rank={n}&prefill_cp_rank={n}&target_tp_rank={n}&target_pp_rank={n}"
            for n in (-1, 0)
        )
        assert asked(every)[0] == 503  # nobody has registered
        assert asked(f"{url}/route", RANK)[0] == 200
        assert json.loads(asked(every)[1])["attn_tp_size"] == 1
        assert json.loads(asked(first)[1]) == {"rank_ip": "127.0.0.1", "rank_port": 4321}
    finally:
        server.kill()
        server.wait()


def asked(url: str, put: dict[str, Any] | None = None) -> tuple[int, str]:
    """(status, text); 0 where nobody answers."""
    raw = None if put is None else json.dumps(put).encode()
    request = urllib.request.Request(
        url, raw, {"content-type": "application/json"}, method="PUT" if raw else "GET"
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()
    except OSError as e:
        return 0, str(e)


@pytest.mark.slow
@needs_wheel
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
