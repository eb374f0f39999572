"""`render systemd`: a unit that runs `up` in the foreground, with a stop as long as the deployment's drain."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from splitserve.cli.parser import parse as parse_words
from splitserve.cli.render import render as command
from splitserve.errors import ConfigError
from splitserve.launch.deployment import load
from splitserve.launch.systemd import render

BOX = Path(__file__).parents[2] / "deploy/rtx-pro-6000-x8.toml"


def unit(**more: object) -> str:
    given = {"python": "/v/bin/python", "file": "/d/x.toml", "directory": "/d"} | more
    return render(
        load(BOX, overrides=["deployment.drain_s=120", "deployment.kill_after_s=7"], environ={}), **given
    )  # type: ignore[arg-type]


def settings(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line and line[0] not in "#["]
    return dict(line.split("=", 1) for line in lines)


def test_it_runs_up_in_the_foreground_and_stops_it_by_a_drain() -> None:
    found = settings(unit())
    assert found["ExecStart"] == "/v/bin/python -m splitserve up /d/x.toml"
    assert (found["Type"], found["KillMode"], found["KillSignal"]) == ("exec", "mixed", "SIGTERM")
    assert found["TimeoutStopSec"] == "139"  # 120 to drain, 7 for the engines, 7 for their ranks, 5 to spare
    assert (found["Restart"], found["RestartPreventExitStatus"]) == ("on-failure", "2")
    assert (found["LimitNOFILE"], found["LimitMEMLOCK"]) == ("1048576", "infinity")
    assert "User" not in found
    assert settings(unit(user="serving"))["User"] == "serving"


def test_what_systemd_would_read_otherwise_is_quoted() -> None:
    found = settings(unit(file='/d/a "b" 5%.toml', sets=["engine.served_name=a$b c"], directory="/d/5% x"))
    assert found["ExecStart"].endswith(r'up "/d/a \"b\" 5%%.toml" --set "engine.served_name=a$$b c"')
    assert found["WorkingDirectory"] == "/d/5%% x"
    with pytest.raises(ConfigError, match="no unit can hold"):
        unit(file="/d/x\nExecStartPre=/bin/evil")


def test_the_command_prints_absolute_paths_that_our_own_parser_reads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(BOX.parents[1])
    words = ["render", "systemd", "deploy/rtx-pro-6000-x8.toml", "--set", "engine.max_seqs=8"]
    assert command(parse_words(words)) == 0
    found = settings(capsys.readouterr().out)
    python, _, module, *rest = shlex.split(found["ExecStart"])
    assert (python, module) == (os.path.abspath(sys.executable), "splitserve")
    args = parse_words(rest)
    assert (rest[0], args.file, args.set) == ("up", str(BOX), ["engine.max_seqs=8"])
    assert found["WorkingDirectory"] == str(BOX.parents[1])


def test_systemd_itself_accepts_it(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze here")
    path = tmp_path / "splitserve-box.service"
    path.write_text(unit(python=sys.executable, directory="/"))
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(path)], check=False, capture_output=True, text=True, timeout=30
    )
    assert str(path) not in done.stderr, done.stderr
