"""Where the engine that a proof compares with takes its GPUs: those of the engines it is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from splitserve.cli import flags
from splitserve.cli.parser import parse
from splitserve.config import ServerConfig
from splitserve.launch import stage
from splitserve.proof.stage import SAME_FIELDS, _gpus, _words


@pytest.mark.parametrize(
    ("facts", "tp", "flags", "visible"),
    [
        ({}, 1, [], None),  # a CPU
        ({"visible_gpus": "4,5", "gpus": []}, 2, [], "4,5"),
        ({"visible_gpus": "3", "gpus": [0, 0]}, 2, ["--gpus", "0,0"], "3"),  # ranks that share one
        ({"visible_gpus": "4,5", "gpus": []}, 4, [], None),  # more than these: any others
    ],
)
def test_gpus(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], tp: int, flags: list[str], visible: str | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found, env = _gpus(facts, tp)
    assert found == flags
    assert env.get("CUDA_VISIBLE_DEVICES") == visible


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("http://localhost:8000/v1", "for-all"),
        ("127.0.0.1:8000", "for-all"),
        ("http://127.0.0.1:9001", "inner"),
        ("http://127.0.0.1:8001", ""),  # not ours
        ("http://another-host:8000", ""),
    ],
)
def test_a_key_is_found_for_what_is_up_and_for_nobody_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str, key: str
) -> None:
    (tmp_path / "keys").write_text("for-all\n")
    (tmp_path / "inner").write_text("inner\n")
    processes = [
        {"role": "decode", "url": "http://127.0.0.1:9001"},
        {"role": "prefill", "url": ""},  # not up yet
        {"role": "router", "url": "http://127.0.0.1:8000"},
    ]
    found = {"processes": processes, "api_key_file": str(tmp_path / "keys")}
    found["engine_key_file"] = str(tmp_path / "inner")
    monkeypatch.setattr(stage.rundir, "names", lambda: ["starting", "d"])
    monkeypatch.setattr(stage, "state", {"starting": None, "d": found}.get)
    assert stage.running_key(url) == key


@pytest.mark.parametrize("keys", ["", "/d/keys"])
def test_the_engine_to_compare_with_has_the_keys_of_the_others_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, keys: str
) -> None:
    """Its host and port are this proof's own too: those of the environment are the deployment's."""
    for name, value in (("API_KEY_FILE", "/e/keys"), ("PORT", "8001"), ("HOST", "0.0.0.0")):
        monkeypatch.setenv(f"SPLITSERVE_SERVER_{name}", value)
    facts: dict[str, Any] = dict.fromkeys(SAME_FIELDS, 1)
    facts |= {"device": "cpu", "dtype": "f32", "kv_dtype": "auto", "speculative": "none"}
    facts |= {"model_path": "m", "num_pages": 64, "threads": 1, "cpus": [0]}
    args = parse(_words(facts, 1, keys))
    config = flags.read(args, ServerConfig, "server")
    assert (config.api_key_file, config.host, config.port) == (keys, "127.0.0.1", 0)
