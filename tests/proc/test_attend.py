"""`splitserve attend`: another program's server under the supervisor's rules. The program here is a few lines of Python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from splitserve.launch.ports import Claims

SERVER = """
import http.server, os, signal, sys, threading
port, delay = int(sys.argv[1]), float(sys.argv[2])
print("a line for the log", flush=True)
begun = __import__("time").monotonic()
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = __import__("time").monotonic() - begun > delay
        self.send_response(200 if ready else 503)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *args):
        pass
server = http.server.HTTPServer(("127.0.0.1", port), Answers)
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
server.serve_forever()
"""


@pytest.fixture
def port() -> Iterator[int]:
    """Held as the supervisor holds it: the server listens beside that."""
    with Claims() as claims:
        yield claims.claim("it", "127.0.0.1")


def attend(words: list[str], *flags: str, **more: Any) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "splitserve", "attend", *flags, "--", *words]
    return subprocess.Popen(line, stdout=subprocess.PIPE, text=True, process_group=0, **more)


@contextmanager
def serving(
    port: int, log: Path, *flags: str, delay_s: float = 0.0, **more: Any
) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", SERVER, str(port), str(delay_s)]
    with log.open("wb") as err:
        child = attend(
            words, "--engine", "vllm", "--url", f"http://127.0.0.1:{port}", *flags, stderr=err, **more
        )
        try:
            yield child
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait(10)


def next_message(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdout is not None
    return dict(json.loads(child.stdout.readline()))


def ready(child: subprocess.Popen[str]) -> dict[str, Any]:
    while not (message := next_message(child)).get("ready"):
        assert message["loading"].startswith("vllm is starting")
    return message


def server_pid(child: subprocess.Popen[str]) -> int:
    return int(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()[0])


def gone(pid: int) -> bool:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_it_is_ready_when_the_server_answers_and_ends_it_on_sigterm(port: int, tmp_path: Path) -> None:
    cpu = sorted(os.sched_getaffinity(0))[-1]
    with serving(port, tmp_path / "log", "--cpus", str(cpu), delay_s=0.4) as child:
        assert ready(child) == {"ready": True, "url": f"http://127.0.0.1:{port}"}
        server = server_pid(child)
        assert os.sched_getaffinity(server) == {cpu}
        child.terminate()
        assert child.wait(10) == 0
        assert gone(server)
    assert b"a line for the log" in (tmp_path / "log").read_bytes()


def test_the_server_goes_with_its_supervisor(port: int, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    flags = ("--alive-fd", str(reader), "--run-dir", "x", "--control", "y")
    with serving(port, tmp_path / "log", *flags, pass_fds=(reader,)) as child:
        ready(child)
        server = server_pid(child)
        os.close(writer)
        child.wait(10)
        assert gone(server)
    os.close(reader)


def test_the_server_goes_when_it_is_killed_itself(port: int, tmp_path: Path) -> None:
    with serving(port, tmp_path / "log") as child:
        ready(child)
        server = server_pid(child)
        child.kill()
        child.wait(10)
        assert gone(server)


@pytest.mark.parametrize(("code", "want"), [(2, 2), (1, 1), (0, 1)])
def test_a_server_that_ends_by_itself_is_a_failure_with_its_own_code(code: int, want: int) -> None:
    child = attend([sys.executable, "-c", f"raise SystemExit({code})"], "--url", "http://127.0.0.1:9")
    assert child.wait(20) == want


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["--url", "http://127.0.0.1:9", "--", "/nowhere/python"], "cannot run /nowhere/python"),
        (["--url", "http://127.0.0.1:9"], "nothing to run"),
        (["--url", "http://127.0.0.1:9", "--cpus", "x", "--", "true"], "no list of numbers"),
        (["--url", "http://127.0.0.1:9", "--cpus", "9999", "--", "true"], "--cpus 9999"),
        (["--", "true"], "--url"),
    ],
)
def test_wrong_words_are_exit_code_2(line: list[str], says: str) -> None:
    words = [sys.executable, "-m", "splitserve", "attend", *line]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
