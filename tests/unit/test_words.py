"""Words that make no command: the error has the likely right flag, and names the subcommand's own --help."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from splitserve import cli
from splitserve.errors import ConfigError
from splitserve.launch.deployment import parse


@pytest.mark.parametrize(
    ("words", "error", "fix"),
    [
        (["up", "x.toml", "--detahc"], "--detahc", "did you mean --detach? see `splitserve up --help`"),
        (["status", "--qqq"], "--qqq", "see `splitserve status --help`"),
        (["bench", "--concurrency", "a"], "--concurrency", "see `splitserve bench --help`"),
        (["bench", "--concurency", "1"], "--concurency", "did you mean --concurrency?"),
        (["bench", "--concurrency", "0"], "concurrency is [0]", "--concurrency 1,8,16"),
        (["bench", "status", "--jsn"], "--jsn", "did you mean --json?"),
        (["verify", "--quik"], "--quik", "did you mean --quick? see `splitserve verify --help`"),
        (["compare", "x.toml", "--concurency=1"], "--concurency", "did you mean --concurrency?"),
        (["doctor", "--set", "router.port=1"], "--set", "splitserve doctor FILE --set"),
    ],
)
def test_the_fix_names_the_flag_and_the_help(
    capsys: pytest.CaptureFixture[str], words: list[str], error: str, fix: str
) -> None:
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert error in err
    assert fix in err


def test_a_hidden_flag_is_not_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["up", "x.toml", "--detachd"])
    assert "did you mean --detach?" in capsys.readouterr().err


def test_a_section_of_set_is_suggested() -> None:
    with pytest.raises(ConfigError, match="not a setting") as e:
        parse({"prefill": {}, "decode": {}}, "file x.toml", overrides=["routr.port=0"], environ={})
    assert (e.value.fix or "").startswith("did you mean router.port=0?")


def test_asking_where_nothing_listens_names_the_address() -> None:
    ask = Path(__file__).parents[2] / "deploy" / "ask.py"
    words = [sys.executable, str(ask), "http://127.0.0.1:1/v1"]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "http://127.0.0.1:1/v1" in done.stderr
    assert "fix: " in done.stderr
