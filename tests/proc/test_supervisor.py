"""The supervisor with real processes: stub engines and router, started, killed and stopped through the command line.

After every test nothing may be left: no process that mentions the test's directory, no run directory, no port.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stub_splitserve import PROGRAM

from splitserve.launch import control
from splitserve.launch.identity import Identity

WAIT_S = 20.0


def until(what: str, true: Callable[[], Any]) -> Any:
    """Poll until `true()` is; bounded, and says what was waited for."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if got := true():
            return got
        time.sleep(0.02)
    raise AssertionError(f"not within {WAIT_S} s: {what}")


class Shell:
    """Runs the stub `splitserve` with a runtime directory of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {**os.environ, "XDG_RUNTIME_DIR": str(home)}
        self.started: list[subprocess.Popen[str]] = []

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PROGRAM, *words], env=self.env, capture_output=True, text=True, timeout=60, check=False
        )

    def background(self, *words: str) -> subprocess.Popen[str]:
        """In a group of its own, as a shell starts it."""
        child = subprocess.Popen(
            [*PROGRAM, *words],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self.started.append(child)
        return child

    def file(self, prefill: str = "ok", decode: str = "ok", *, name: str = "d", **deployment: object) -> str:
        extra = "".join(f"{key} = {json.dumps(value)}\n" for key, value in deployment.items())
        path = self.home / f"{name}.toml"
        path.write_text(
            f'[deployment]\nname = "{name}"\n{extra}[prefill]\nmodel = "{prefill}"\n'
            f'[decode]\nmodel = "{decode}"\n[router]\nport = 0\n'
        )
        return str(path)

    def up(self, file: str) -> dict[str, Any]:
        done = self("up", file, "--detach")
        assert done.returncode == 0, done.stderr
        return self.state(Path(file).stem)

    def run_dir(self, name: str = "d") -> Path:
        return self.home / "splitserve" / name

    def state(self, name: str = "d") -> dict[str, Any]:
        state: dict[str, Any] = control.ask(self.run_dir(name) / "control.sock", {"op": "status"})["state"]
        return state

    def process(self, process: str, name: str = "d") -> dict[str, Any]:
        return next(p for p in self.state(name)["processes"] if p["name"] == process)

    def mentions(self) -> list[str]:
        """Processes whose command line or environment names this directory: ours, wherever they hang."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and int(entry.name) != os.getpid():
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z" and str(self.home).encode() in (entry / "environ").read_bytes():
                        found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
        return found


@pytest.fixture
def shell() -> Iterator[Shell]:
    home = Path(tempfile.mkdtemp(prefix="ss-"))
    s = Shell(home)
    try:
        yield s
        until("nothing of the test runs", lambda: not s.mentions())
        left = [
            p for p in s.run_dir().parent.glob("*") if (p / "lock").exists() or (p / "state.json").exists()
        ]
        assert left == []
    finally:
        for child in s.started:
            if child.poll() is None:
                child.kill()
            child.communicate()
        s("status")  # cleans up what a failed test left
        shutil.rmtree(home, ignore_errors=True)


def ports(state: dict[str, Any]) -> set[int]:
    return {port for p in state["processes"] for port in p["ports"].values()}


def is_free(port: int) -> bool:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", port))
        s.listen()
    return True


def test_up_status_down(shell: Shell):
    state = shell.up(shell.file())
    assert [(p["name"], p["phase"]) for p in state["processes"]] == [
        ("prefill-0", "ready"),
        ("decode-0", "ready"),
        ("router", "ready"),
    ]
    shown = shell("status")
    assert shown.returncode == 0
    assert state["url"] in shown.stdout
    assert json.loads(shell("status", "--json").stdout)["deployments"][0]["overall"] == "up"
    assert "to the log" in shell("logs", "d", "decode-0").stdout
    down = shell("down")
    assert (down.returncode, down.stdout) == (0, "stopped d: every process is gone\n")
    assert all(is_free(port) for port in ports(state))
    assert not shell.run_dir().exists()
    again = shell("down")
    assert (again.returncode, again.stdout) == (0, "nothing is up\n")
    assert shell("status").returncode == 1


def test_children_are_pinned_and_in_groups_of_their_own(shell: Shell):
    state = shell.up(shell.file())
    pids = [p["pid"] for p in state["processes"]]
    assert [os.getpgid(pid) for pid in pids] == pids
    assert os.getpgid(state["supervisor"]["pid"]) not in pids
    assert all(os.sched_getaffinity(pid) <= os.sched_getaffinity(0) for pid in pids)
    shell("down")


def test_a_second_of_the_same_name_is_refused_and_another_name_is_not(shell: Shell):
    file = shell.file()
    first = shell.up(file)
    second = shell("up", file)
    assert second.returncode == 2
    assert "error: deployment 'd' is already up" in second.stderr
    assert "fix: stop it with `splitserve down d`" in second.stderr
    other = shell.up(shell.file(name="e"))
    assert not ports(first) & ports(other)
    several = shell("down")
    assert several.returncode == 2
    assert "2 deployments: d, e" in several.stderr
    assert shell("down", "e").returncode == 0
    assert shell("down").returncode == 0


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize(
    ("model", "code", "word"), [("die-loading", 1, "the reason is here"), ("bad-config", 2, "no such model")]
)
def test_a_start_that_fails_says_why_and_leaves_only_logs(
    shell: Shell, model: str, code: int, word: str, detach: bool
):
    done = shell("up", shell.file(decode=model), *(["--detach"] if detach else []))
    assert done.returncode == code
    assert f"error: decode-0 exited with code {code} before it was ready" in done.stderr
    assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert [p.name for p in shell.run_dir().iterdir()] == ["logs"]
    assert word in shell("logs", "d", "decode-0").stdout


def test_a_start_that_takes_too_long_names_the_late_one(shell: Shell):
    done = shell("up", shell.file(prefill="slow", ready_timeout_s=5.0))
    assert done.returncode == 1
    assert "not ready after 5 s: prefill-0 (weights)" in done.stderr


def test_a_killed_engine_is_started_again_on_the_same_ports(shell: Shell):
    before = shell.up(shell.file())
    os.kill(shell.process("decode-0")["pid"], signal.SIGKILL)
    until("it was started again", lambda: shell.process("decode-0")["restarts"] == 1)
    until("it is ready again", lambda: shell.process("decode-0")["phase"] == "ready")
    assert ports(shell.state()) == ports(before)
    assert shell.process("prefill-0")["restarts"] == 0
    shell("down")


def test_one_that_keeps_dying_is_given_up_with_its_last_words(shell: Shell):
    up = shell.background("up", shell.file(decode="die-always", max_restarts=1), "--json")
    assert up.stdout
    until("it is up", lambda: '"up"' in up.stdout.readline())
    (shell.run_dir() / "decode-0" / "die").touch()
    out, err = up.communicate(timeout=WAIT_S)
    assert up.returncode == 1
    events = [json.loads(line) for line in out.splitlines()]
    assert {"gave_up", "restarting", "stopped"} <= {e["event"] for e in events}
    assert "no decode is left: decode-0 exited with code 1" in err
    assert "to the log" in err


def test_one_that_dies_once_goes_on(shell: Shell):
    shell.up(shell.file(decode="die-once"))
    (shell.run_dir() / "decode-0" / "die").touch()
    until("it is ready again", lambda: shell.process("decode-0")["restarts"] == 1
          and shell.process("decode-0")["phase"] == "ready")  # fmt: skip
    assert shell.state()["overall"] == "up"
    shell("down")


def test_ranks_of_a_killed_server_are_gone_before_it_starts_again(shell: Shell):
    shell.up(shell.file(decode="rank"))
    (rank,) = shell.process("decode-0")["ranks"]
    who = Identity(rank["pid"], rank["start"])
    os.kill(who.pid, signal.SIGSTOP)  # it will see no pipe end and no SIGTERM
    os.kill(shell.process("decode-0")["pid"], signal.SIGKILL)
    until("it was started again", lambda: shell.process("decode-0")["restarts"] == 1)
    assert not who.exists
    until("it is ready again", lambda: shell.process("decode-0")["phase"] == "ready")
    shell("down")


def test_a_full_disk_costs_the_state_file_and_nothing_else(shell: Shell):
    shell.up(shell.file())
    (
        shell.run_dir() / "state.json.new"
    ).mkdir()  # from here on writing state.json fails, as it would for want of room
    os.kill(shell.process("decode-0")["pid"], signal.SIGKILL)
    until("it was started again", lambda: shell.process("decode-0")["restarts"] == 1)
    until("it is ready again", lambda: shell.process("decode-0")["phase"] == "ready")
    assert shell("down").returncode == 0
    assert not shell.run_dir().exists()


def test_a_program_that_cannot_be_started_is_an_error_and_no_hang(shell: Shell):
    code = "import sys; from splitserve.cli import main; sys.exit(main(sys.argv[1:], program=('/nowhere/splitserve',)))"
    done = subprocess.run(
        [sys.executable, "-c", code, "up", shell.file()],
        env=shell.env, capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "cannot be started: [Errno 2] No such file or directory: '/nowhere/splitserve'" in done.stderr
    assert "Traceback" not in done.stderr


def test_restart_by_an_operator(shell: Shell):
    shell.up(shell.file())
    pid = shell.process("prefill-0")["pid"]
    assert shell("restart", "prefill-0").returncode == 0
    until("it is ready again", lambda: shell.process("prefill-0")["phase"] == "ready"
          and shell.process("prefill-0")["pid"] != pid)  # fmt: skip
    wrong = shell("restart", "prefil-0")
    assert wrong.returncode == 2
    assert "one of prefill-0, decode-0, router" in wrong.stderr
    shell("down")


def test_ctrl_c_stops_everything(shell: Shell):
    up = shell.background("up", shell.file())
    assert up.stdout
    until("it is up", lambda: "OpenAI API" in up.stdout.readline())
    os.killpg(up.pid, signal.SIGINT)
    _, err = up.communicate(timeout=WAIT_S)
    assert up.returncode == 130
    assert "Traceback" not in err


def test_ctrl_c_while_loading(shell: Shell):
    up = shell.background("up", shell.file(prefill="slow"))
    until("it is loading", (shell.run_dir() / "state.json").exists)
    os.killpg(up.pid, signal.SIGINT)
    assert up.wait(WAIT_S) == 130


def test_a_second_ctrl_c_waits_for_nobody(shell: Shell):
    up = shell.background("up", shell.file(decode="deaf", kill_after_s=1000.0), "--json")
    assert up.stdout
    until("it is up", lambda: '"up"' in up.stdout.readline())
    os.kill(up.pid, signal.SIGINT)
    until("it is stopping", lambda: '"stopping"' in up.stdout.readline())
    os.kill(up.pid, signal.SIGINT)
    up.communicate(timeout=WAIT_S)
    assert up.returncode == 130


def test_a_deaf_process_is_killed_in_bounded_time(shell: Shell):
    shell.up(shell.file(decode="deaf", kill_after_s=0.3))
    begun = time.monotonic()
    assert shell("down").returncode == 0
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_supervisor_leaves_nothing_for_long(shell: Shell, stopped: bool):
    """Children see their pipe end. One that is stopped cannot, and is ended by the next command."""
    state = shell.up(shell.file(decode="rank"))
    decode = next(p for p in state["processes"] if p["name"] == "decode-0")
    if stopped:
        for pid in (decode["pid"], decode["ranks"][0]["pid"]):
            os.kill(pid, signal.SIGSTOP)
    os.kill(state["supervisor"]["pid"], signal.SIGKILL)
    others = [p["pid"] for p in state["processes"] if p["name"] != "decode-0" or not stopped]
    until(
        "the others left by themselves", lambda: not any(Path(f"/proc/{pid}/fd").exists() for pid in others)
    )
    status = shell("status")
    assert status.returncode == 1
    assert "nothing is up" in status.stdout
    if stopped:
        # The server itself may be gone: the kernel wakes stopped members of a group whose session has lost its head.
        assert f"ended rank of decode-0 (pid {decode['ranks'][0]['pid']})" in status.stdout
    until("the ports are free", lambda: all(is_free(port) for port in ports(state)))
    assert [p.name for p in shell.run_dir().iterdir()] == ["logs"]


def test_fencing_kills_exactly_what_was_named(shell: Shell):
    state = shell.up(shell.file(decode="rank"))
    sock = shell.run_dir() / "control.sock"
    (rank,) = next(p["ranks"] for p in state["processes"] if p["name"] == "decode-0")
    os.kill(rank["pid"], signal.SIGSTOP)
    me = Identity.of(os.getpid())
    assert me
    strange = control.ask(sock, {"op": "fence", "pid": me.pid, "start": me.start})
    assert strange["ok"] is False
    assert "no process of this deployment" in strange["error"]
    reused = control.ask(sock, {"op": "fence", "pid": rank["pid"], "start": rank["start"] - 1})
    assert reused == {"ok": True, "dead": True, "name": ""}
    assert Identity(rank["pid"], rank["start"]).alive
    answer = control.ask(sock, {"op": "fence", **rank})
    assert answer["dead"]
    assert not Identity(rank["pid"], rank["start"]).alive
    until("the engine was started again", lambda: shell.process("decode-0")["restarts"] == 1)
    until("it is ready again", lambda: shell.process("decode-0")["phase"] == "ready")
    assert shell.process("prefill-0")["restarts"] == 0
    shell("down")


def test_the_control_socket_is_private_and_answers_nonsense(shell: Shell):
    shell.up(shell.file())
    path = shell.run_dir() / "control.sock"
    assert path.stat().st_mode & 0o777 == 0o600
    for line in (
        b"{",
        b"[]",
        b'{"op": "dance"}',
        b'{"op": "fence", "pid": "x"}',
        b'{"op": "fence", "pid": -1, "start": 1}',
        b'{"op": "fence", "pid": 99999999999999999999, "start": 1}',
        b'{"op": "restart"}',
        b"\xff",
    ):
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(os.fspath(path))
            s.sendall(line + b"\n")
            assert json.loads(s.makefile().readline())["ok"] is False
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(os.fspath(path))
        s.sendall(b'{"op": ')  # and leaves in mid-line
    assert shell.state()["overall"] == "up"
    shell("down", "--kill")
