"""Deployment files: what they may say, where each value comes from, and what every mistake is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from splitserve.errors import ConfigError
from splitserve.launch.deployment import load, parse
from splitserve.types import Role

PAIR: dict[str, Any] = {"deployment": {"model": "m"}, "prefill": {}, "decode": {}}


def make(tables: dict[str, Any], **kw: Any) -> Any:
    return parse(tables, "file x.toml", environ=kw.pop("environ", {}), **kw)


def test_a_pair_gets_defaults_and_roles():
    d = make(PAIR)
    assert [(g.role, g.replicas, g.engine.role, g.engine.model) for g in d.groups] == [
        (Role.PREFILL, 1, "prefill", "m"),
        (Role.DECODE, 1, "decode", "m"),
    ]
    assert d.split
    assert d.router.port == 8000


def test_the_files_name_is_the_deployments_name(tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text('[deployment]\nmodel = "m"\n[unified]\n')
    d = load(file, environ={})
    assert d.name == "mine"
    assert not d.split


def test_every_file_in_deploy_is_valid():
    files = sorted((Path(__file__).parents[2] / "deploy").glob("*.toml"))
    assert files
    for file in files:
        load(file, environ={})


def test_an_engines_value_comes_from_the_strongest_place():
    """Each step adds one stronger place; the value must follow it, and its source must name it."""
    tables: dict[str, Any] = {"deployment": {"model": "m"}, "prefill": {}, "decode": {}}
    env: dict[str, str] = {}
    flags: list[str] = []

    def tp() -> tuple[int, str]:
        d = make(tables, environ=env, overrides=flags)
        source = next(s.source for s in d.settings if s.name == "prefill.tp")
        return d.groups[0].engine.tp, source

    assert tp() == (1, "default")
    tables["engine"] = {"tp": 2}
    assert tp() == (2, "file x.toml [engine]")
    tables["prefill"] = {"tp": 3}
    assert tp() == (3, "file x.toml")
    env["SPLITSERVE_ENGINE_TP"] = "4"
    assert tp() == (4, "environment SPLITSERVE_ENGINE_TP")
    env["SPLITSERVE_PREFILL_TP"] = "5"
    assert tp() == (5, "environment SPLITSERVE_PREFILL_TP")
    flags.append("engine.tp=6")
    assert tp() == (6, "flag --set engine.tp=6")
    flags.append("prefill.tp=7")
    assert tp() == (7, "flag --set prefill.tp=7")
    assert make(tables, environ=env, overrides=flags).groups[1].engine.tp == 6


@pytest.mark.parametrize(
    ("tables", "message", "fix"),
    [
        ({}, "no engines", "add [prefill] and [decode]"),
        ({"prefil": {}}, "[prefil]", "did you mean [prefill]?"),
        ({"zzz": {}}, "[zzz]", "sections are"),
        ({"prefill": 3}, "prefill must be a section", "[prefill]"),
        ({**PAIR, "decode": {"tpp": 2}}, "[decode] has no key 'tpp'", "did you mean 'tp'?"),
        ({**PAIR, "engine": {"tpp": 2}}, "[engine] has no key 'tpp'", "did you mean 'tp'?"),
        ({**PAIR, "decode": {"replica": 2}}, "no key 'replica'", "did you mean 'replicas'?"),
        ({**PAIR, "decode": {"tp": "two"}}, "[decode] tp must be int, not 'two'", None),
        ({**PAIR, "decode": {"tp": 0}}, "[decode] tp is 0, must be at least 1", None),
        ({**PAIR, "decode": {"dtype": "bf61"}}, "[decode] dtype is 'bf61'", "did you mean 'bf16'?"),
        ({**PAIR, "router": {"policy": "robin"}}, "[router] policy is 'robin'", "round_robin"),
        ({"deployment": {"model": "m"}, "prefill": {}}, "[prefill] but no [decode]", "add [decode]"),
        ({"deployment": {"model": "m"}, "decode": {}}, "[decode] but no [prefill]", "add [prefill]"),
        ({**PAIR, "unified": {}}, "[unified] beside [prefill]", "not both"),
        ({"prefill": {}, "decode": {}}, "no model for [prefill]", "[deployment] model"),
        ({**PAIR, "prefill": {"role": "decode"}}, "[prefill] says role = 'decode'", "remove role"),
        ({**PAIR, "prefill": {"cpus": [0, 1]}, "decode": {"cpus": "1-2"}}, "cpu 1 is given", "each cpu once"),
        ({**PAIR, "prefill": {"cpus": [0, 0]}}, "cpu 0 is given", "each cpu once"),
        ({**PAIR, "prefill": {"cpus": [0], "replicas": 2}}, "2 x 1 ranks but names 1", "at least 2 cpus"),
        ({**PAIR, "deployment": {"model": "m", "name": "a/b"}}, "'a/b' cannot name", "[deployment] name"),
        ({**PAIR, "deployment": {"model": "m", "engine": "vlm"}}, "engine is 'vlm'", "one of splitserve"),
    ],
)
def test_every_mistake_is_named_with_its_fix(tables: dict[str, Any], message: str, fix: str | None):
    with pytest.raises(ConfigError) as caught:
        make(tables)
    assert message in caught.value.message
    assert "x.toml" in caught.value.message or "cannot name" in caught.value.message
    if fix:
        assert fix in (caught.value.fix or "")


@pytest.mark.parametrize("text", ["router.port", "port=1", "=", "rooter.port=1"])
def test_set_wants_a_section_a_key_and_a_value(text: str):
    with pytest.raises(ConfigError, match="not a setting") as caught:
        make(PAIR, overrides=[text])
    assert "--set SECTION.KEY=VALUE" in (caught.value.fix or "")


def test_a_missing_file_names_the_ready_made_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(ConfigError, match="no deployment file deploy/dmo") as caught:
        load("deploy/dmo.toml")
    assert "deploy/demo.toml" in (caught.value.fix or "")


def test_broken_toml_says_where(tmp_path: Path):
    file = tmp_path / "x.toml"
    file.write_text("[deployment\n")
    with pytest.raises(ConfigError, match="line 1"):
        load(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not TOML"):
        load(file)


@pytest.mark.parametrize(
    ("key", "prefill", "decode"),
    [("page_tokens", 16, 32), ("dtype", "f32", "bf16"), ("kv_dtype", "fp8", "auto")],
)
def test_halves_whose_rows_would_differ_are_refused_before_anything_loads(
    key: str, prefill: Any, decode: Any
):
    with pytest.raises(
        ConfigError, match=rf"{key} differs: \[prefill\] has {prefill}, \[decode\] has {decode}"
    ):
        make({**PAIR, "prefill": {key: prefill}, "decode": {key: decode}})
    make({**PAIR, "engine": {key: prefill}})


def test_a_dtype_that_may_come_out_equal_is_not_refused():
    make({**PAIR, "prefill": {"dtype": "f32"}})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_is_refused(value: Any):
    with pytest.raises(ConfigError, match=r"deadline_s is -?(nan|inf), must be"):
        make({**PAIR, "transfer": {"deadline_s": value}})
