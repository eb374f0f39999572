"""Wrong values of settings: each has a fix, and strings are no numbers in a file."""

from __future__ import annotations

from typing import Any

import pytest

from splitserve.config import EngineConfig, RouterConfig, resolve
from splitserve.errors import ConfigError


@pytest.mark.parametrize(
    ("cls", "section", "key", "value", "fix"),
    [
        (RouterConfig, "router", "port", "abc", "[router] port is: port; 0: any free one (default: 8000)"),
        (RouterConfig, "router", "port", 70000, "default: 8000"),
        (EngineConfig, "engine", "memory_mb", -5, "state memory of one rank"),
        (EngineConfig, "engine", "max_seqs", "x", "most requests running at once (default: 64)"),
        (RouterConfig, "router", "idle_timeout_s", float("nan"), "default: 75"),
        (EngineConfig, "engine", "prefix_cache", "maybe", "default: True"),
        (EngineConfig, "engine", "max_seqs", "32", "write it without quotes: max_seqs = 32"),
        (EngineConfig, "engine", "prefix_cache", "true", "write it without quotes"),
    ],
)
def test_a_wrong_value_has_a_fix(cls: type, section: str, key: str, value: Any, fix: str) -> None:
    with pytest.raises(ConfigError) as e:
        resolve(cls, section, ("file x.toml", {key: value}), environ={})
    assert fix in (e.value.fix or "")


def test_flags_and_the_environment_are_strings_and_lists_of_cpus_may_be() -> None:
    environ = {"SPLITSERVE_ENGINE_MAX_SEQS": "32"}
    layers = ("file x.toml", {"cpus": "0-3"}), ("flag --tp", {"tp": "2"})
    config, _ = resolve(EngineConfig, "engine", *layers, environ=environ)
    assert (config.max_seqs, config.tp, config.cpus) == (32, 2, (0, 1, 2, 3))
