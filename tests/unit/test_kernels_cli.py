"""`splitserve kernels build`, `splitserve bench ops`, and the line that says which kernels run: without a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from splitserve import cli
from splitserve.errors import ConfigError
from splitserve.ops.bench.words import from_words
from splitserve.ops.kernels import archs
from splitserve.ops.kernels.archs import kernel_path


@pytest.mark.parametrize(
    ("words", "error", "fix"),
    [
        (["bench", "ops"], "torch sees none here", "topology"),
        (["bench", "ops", "--models", "gpt"], "--models gpt", "deepseek, llama"),
        (["bench", "ops", "--tokens", "1,x"], "--tokens 1,x", "for example --tokens 1,8"),
        (["bench", "ops", "--tokens", "0"], "--tokens 0", "for example"),
        (["bench", "ops", "--json", "/nowhere/at/all.json"], "does not exist", "mkdir -p /nowhere/at"),
        (["kernels", "build", "--arch", "70"], "--arch 70: not a list", "--arch 80,89,90,100,120"),
        (["kernels", "build", "--jobs", "-1"], "--jobs -1", "0 takes all cores"),
        (["kernels", "build", "--cache", "/proc/none"], "--cache /proc/none", "a directory of yours"),
        (["kernels", "bild"], "invalid choice", "--help"),
    ],
)
def test_wrong_words_exit_with_2_and_a_fix(
    capsys: pytest.CaptureFixture[str], words: list[str], error: str, fix: str
) -> None:
    if words == ["bench", "ops"]:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
    assert cli.main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: ")
    assert error in lines[0]
    assert lines[1].startswith("fix: ")
    assert fix in lines[1]


@pytest.mark.parametrize("words", [["bench", "ops"], ["kernels", "build"]])
def test_without_triton_both_say_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "triton" else find(n, *a))
    assert cli.main(words) == 2
    assert capsys.readouterr().err == (
        "error: the package triton is not installed here\nfix: pip install triton\n"
    )


def test_words_of_bench_ops() -> None:
    plan = from_words(["--models", "llama", "--tokens", "1,16", "--json", "x.json", "--one-by-one"])
    assert (plan.models, plan.tokens, plan.json_path, plan.one_by_one) == (
        ("llama",),
        (1, 16),
        Path("x.json"),
        True,
    )
    assert from_words([]).tokens == (1, 8, 16, 64, 2048, 8192)
    with pytest.raises(ConfigError, match="--bandwidth"):
        from_words(["--bandwidth", "-1"])


def test_the_path_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archs, "triton_version", lambda: "3.6.0")
    assert kernel_path([]).startswith("on the CPU")
    two = kernel_path([("NVIDIA H200", 90), ("NVIDIA H200", 90)])
    assert two.count("Triton 3.6.0 on NVIDIA H200 (sm_90, own tiles, e4m3 products)") == 1
    assert "default tiles" in kernel_path([("NVIDIA B300", 103)])
    assert "bf16 products" in kernel_path([("NVIDIA A100", 80)])
    assert kernel_path([("Tesla T4", 75)]).startswith("plain torch on Tesla T4")
    assert "not known" in kernel_path([("GPU", 0)])
    monkeypatch.setattr(archs, "triton_version", lambda: "")
    assert kernel_path([("NVIDIA H200", 90)]) == "plain torch on NVIDIA H200: Triton is not installed"


def test_up_says_it_before_it_starts(capsys: pytest.CaptureFixture[str]) -> None:
    demo = Path(__file__).parents[2] / "deploy" / "demo.toml"
    assert cli.main(["up", str(demo), "--dry-run"]) == 0
    assert "\nkernels: on the CPU" in capsys.readouterr().out
