"""The command line: exit codes, the form of errors, and flags that are the config's fields there and back."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import json
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve import __version__, cli
from splitserve.cli import deploy, flags, parser
from splitserve.config import EngineConfig, RouterConfig, ServerConfig, TransferConfig
from splitserve.errors import ConfigError, InvariantError, Overloaded
from splitserve.launch.commands import fill, to_flags
from splitserve.launch.rundir import RunDir

BUG = "this is a bug; SPLITSERVE_DEBUG=1 shows where"


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("SPLITSERVE_DEBUG", raising=False)


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make `splitserve version` raise."""

    def run(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr("splitserve.cli.machine.version", run)


@pytest.mark.parametrize(
    ("error", "code", "stderr"),
    [
        (ConfigError("tp is 0", fix="set tp"), 2, "error: tp is 0\nfix: set tp\n"),
        (Overloaded("no room"), 1, "error: no room\n"),
        (KeyboardInterrupt(), 130, ""),
        (
            ZeroDivisionError("x"),
            1,
            "error: ZeroDivisionError: x\nfix: this is a bug; SPLITSERVE_DEBUG=1 shows where\n",
        ),
    ],
)
def test_errors_are_lines_with_honest_codes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    stderr: str,
):
    failing(monkeypatch, error)
    assert cli.main(["version"]) == code
    assert capsys.readouterr() == ("", stderr)


def test_debug_shows_the_traceback_instead(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPLITSERVE_DEBUG", "1")
    for error in (ConfigError("x"), ZeroDivisionError("x")):
        failing(monkeypatch, error)
        with pytest.raises(type(error)):
            cli.main(["version"])


@pytest.mark.parametrize(
    ("words", "error", "fix"),
    [
        (["sevre"], "no command 'sevre'", "did you mean `splitserve serve`?"),
        (["qqq"], "no command 'qqq'", "commands are: up, down"),
        ([], "required", "splitserve --help"),
        (["up"], "required: FILE", "splitserve up --help"),
        (["up", "x.toml", "--detahc"], "unrecognized arguments: --detahc", "--help"),
        (["up", "no.toml"], "no deployment file no.toml", None),
        (["serve", "m", "--tp", "two"], "flag --tp: [engine] tp must be int, not 'two'", None),
        (["serve", "m", "--tp", "0"], "flag --tp: [engine] tp is 0, must be at least 1", None),
        (["serve", "m", "--dtype", "f61"], "flag --dtype: [engine] dtype is 'f61'", "did you mean 'f16'?"),
        (["router", "--policy", "robin"], "flag --policy: [router] policy is 'robin'", "round_robin"),
        (
            ["router", "--prefill", "http://h:1,x", "--decode", "http://h:2"],
            "'x' in 'http://h:1,x' is no",
            None,
        ),
        (["logs", "--lines", "many"], "--lines many: not a whole number", None),
    ],
)
def test_wrong_words_exit_with_2_and_a_fix(
    capsys: pytest.CaptureFixture[str], words: list[str], error: str, fix: str | None
):
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert error in err
    assert "Traceback" not in err
    if fix:
        assert fix in err


@pytest.mark.parametrize("words", [["--help"], ["--version"], *([c, "--help"] for c in parser._COMMANDS)])
def test_help_and_version_exit_with_0(capsys: pytest.CaptureFixture[str], words: list[str]):
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    assert left.value.code == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "key", "code"),
    [
        (["topology", "--json"], "cores", 0),
        (["version", "--json"], "splitserve", 0),
        (["status", "--json"], "deployments", 1),
        (["down", "--json"], "stopped", 0),
    ],
)
def test_json_is_one_object(capsys: pytest.CaptureFixture[str], words: list[str], key: str, code: int):
    assert cli.main(words) == code
    assert key in json.loads(capsys.readouterr().out)


def test_doctor_says_what_is_there(capsys: pytest.CaptureFixture[str]):
    code = cli.main(["doctor", "--quick", "--json"])
    body = json.loads(capsys.readouterr().out)
    assert code == (0 if body["ok"] else 1)
    by = {f["subject"]: f for f in body["findings"]}
    assert by["python"]["ok"]
    assert sys.executable in by["python"]["text"]
    assert all(f["fix"] for f in body["findings"] if not f["ok"])


def test_dry_run_prints_placement_and_commands(capsys: pytest.CaptureFixture[str]):
    file = Path(__file__).parents[2] / "deploy" / "demo.toml"
    assert cli.main(["up", str(file), "--dry-run", "--set", "decode.max_seqs=7"]) == 0
    out = capsys.readouterr().out
    assert "flag --set decode.max_seqs=7" in out
    assert "splitserve serve smollm2-135m --role prefill" in out
    assert "--max-seqs 7" in out
    assert cli.main(["up", str(file), "--dry-run", "--json"]) == 0
    assert [p["name"] for p in json.loads(capsys.readouterr().out)["processes"]] == [
        "prefill-0",
        "decode-0",
        "router",
    ]


def test_version():
    assert __version__.count(".") == 2


def configs(cls: type) -> st.SearchStrategy[Any]:
    """Any valid config of a class, each field by its type and range."""
    hints = typing.get_type_hints(cls)
    word = st.text("abcxyz/._-=:0123456789", min_size=1, max_size=12).filter(lambda w: not w.startswith("-"))

    def values(f: dataclasses.Field[Any]) -> st.SearchStrategy[Any]:
        low, high, one_of = f.metadata["low"], f.metadata["high"], f.metadata["one_of"]
        if one_of:
            return st.sampled_from(one_of)
        match hints[f.name]:
            case t if t is bool:
                return st.booleans()
            case t if t is int:
                return st.integers(int(low or 0), int(high or 10**6))
            case t if t is float:
                return st.floats(low or 0, high or 1e6, allow_nan=False)
            case t if t == tuple[int, ...]:
                return st.lists(st.integers(0, 500), max_size=5).map(tuple)
            case t if t == tuple[str, ...]:
                return st.lists(word, min_size=1, max_size=3).map(tuple)
            case _:
                return word

    return st.builds(cls, **{f.name: values(f) for f in dataclasses.fields(cls)})


@pytest.mark.parametrize("cls", [EngineConfig, TransferConfig, ServerConfig, RouterConfig])
def test_every_setting_survives_the_way_through_flags(cls: type):
    @settings(max_examples=60)
    @given(configs(cls))
    def there_and_back(config: Any) -> None:
        p = argparse.ArgumentParser()
        flags.add(p, cls, "x")
        assert flags.read(p.parse_args(to_flags(config)), cls, "test") == config

    there_and_back()


def test_a_mark_without_a_port_is_a_bug():
    assert fill(("a", "{router.http}"), {"router.http": 1}) == ("a", "1")
    with pytest.raises(InvariantError, match="no port chosen"):
        fill(("{router.http}",), {})


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("engine.memory_mb=1", "memory_mb=1"),
        ("decode.max_len=9000", "longer than the model's 8192"),
        ("decode.num_pages=1000000", "1000000 pages"),
        ("prefill.tp=7", "tp=7 does not divide 9 heads"),
        ("decode.model=/nowhere", "[decode] model '/nowhere'"),
    ],
)
def test_up_knows_before_it_starts_anything(
    setting: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = Path(__file__).parents[2] / "deploy" / "demo.toml"
    assert cli.main(["up", str(file), "--set", setting]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert says in told
    assert not list(tmp_path.rglob("*.log")), "a process was started"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> typing.Iterator[RunDir]:
    """A deployment that is up, as far as its directory says, with 60 lines of log of one process."""
    run_dir = RunDir("demo")
    run_dir.acquire()
    lines = [f"10:00:{i:02} INFO request r{i}.\n" for i in range(60)]
    run_dir.log("decode-0").write_text("".join(lines))
    refused = {"ok": False, "error": "demo has no process 'nosuch'", "fix": "one of router, decode-0"}
    monkeypatch.setattr("splitserve.launch.control.ask", lambda *_: refused)
    yield run_dir
    run_dir.release()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["restart", "nosuch"], "demo has no process 'nosuch'"),
        (["restart", "decode-0", "other"], "no deployment 'other' is up"),
        (["logs", "nosuch"], "demo has no process 'nosuch'"),
        (["logs", "demo", "nosuch"], "demo has no process 'nosuch'"),
        (["logs", "other", "decode-0"], "no deployment 'other' is up"),
        (["logs", "-n", "many"], "--lines many"),
        (["logs", "-n", "-1"], "--lines"),
        (["logs", "-n", "inf"], "--lines inf"),
    ],
)
@pytest.mark.usefixtures("demo")
def test_a_name_that_is_none_is_a_wrong_word(
    capsys: pytest.CaptureFixture[str], words: list[str], error: str
) -> None:
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert error in err
    assert "fix: " in err


def test_what_is_not_up_is_down_already(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["down", "nosuch"]) == 0
    assert "nothing is up under the name nosuch" in capsys.readouterr().out
    assert cli.main(["restart", "decode-0"]) == 1
    assert cli.main(["status", "nosuch"]) == 1


@pytest.mark.parametrize(
    ("words", "num"),
    [([], 50), (["-n", "0"], 0), (["-n", "3"], 3), (["--request", "r1."], 1), (["--request", "request"], 60)],
)
@pytest.mark.usefixtures("demo")
def test_as_many_lines_of_a_log_as_asked_for(
    capsys: pytest.CaptureFixture[str], words: list[str], num: int
) -> None:
    assert cli.main(["logs", *words]) == 0
    assert len(capsys.readouterr().out.splitlines()) == num


@pytest.mark.parametrize(
    ("words", "where"), [([], "no line kept"), (["-n", "5"], "no line among the last 5 of each log")]
)
@pytest.mark.usefixtures("demo")
def test_a_request_that_no_line_names_is_said(
    capsys: pytest.CaptureFixture[str], words: list[str], where: str
) -> None:
    assert cli.main(["logs", "--request", "r1.nosuch", *words]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert f"{where} names 'r1.nosuch'" in said.err
    assert "log_level" in said.err


@pytest.mark.parametrize(
    ("error", "told", "fix"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/run/x.json"),
            "No space left on device: /run/x.json",
            "XDG_RUNTIME_DIR",
        ),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files", "ulimit -n"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/a"),
            "Permission denied: /a",
            "splitserve doctor",
        ),
    ],
)
def test_what_the_machine_lacks_is_told_with_what_helps(
    error: OSError, told: str, fix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, error)
    assert cli.main(["version"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"error: {told}"
    assert fix in second


def test_a_start_that_was_stopped_before_it_was_ready_has_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`up --detach && use it`: nothing is up."""
    outcome = {
        "event": "outcome",
        "name": "",
        "text": "",
        "code": 0,
        "why": "splitserve down",
        "log": "",
        "tail": [],
    }
    script = f"print({json.dumps(json.dumps(outcome))})"
    args = argparse.Namespace(program=(sys.executable, "-c", script), file="x.toml", set=[], json=False)
    deployment = argparse.Namespace(name="x", config=None)
    assert deploy.detach(args, deployment) == 1  # type: ignore[arg-type]
    assert "stopped before it was ready" in capsys.readouterr().err
