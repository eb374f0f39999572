"""The router as a process: its ready line, its exit codes, and that it leaves with its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from splitserve.net.probe import bound_socket, is_listening

PROGRAM = """
import sys
from splitserve.config import RouterConfig
from splitserve.errors import ConfigError
from splitserve.router.main import run
from splitserve.router.fleet import Endpoint
from splitserve.types import Role
fd = int(sys.argv[2])
try:
    workers = [Endpoint.parse("http://127.0.0.1:1,2", Role.PREFILL)]
    sys.exit(run(RouterConfig(port=int(sys.argv[1])), workers=workers, alive_fd=fd if fd >= 0 else None, name="door"))
except ConfigError as e:
    print(e.message, file=sys.stderr)
    sys.exit(2)
"""


@contextmanager
def router(port: int = 0, alive_fd: int = -1) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(port), str(alive_fd)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=() if alive_fd < 0 else (alive_fd,),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ready_line(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ready_line_and_clean_stop(number: signal.Signals) -> None:
    with router() as process:
        line = ready_line(process)
        assert line["ready"] is True
        assert line["name"] == "door"
        port = int(str(line["port"]))
        assert line["url"] == f"http://127.0.0.1:{port}"
        assert is_listening("127.0.0.1", port)
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
        assert process.returncode == 0, err
        assert out == ""  # one line and no more
        assert "Traceback" not in err
        assert not is_listening("127.0.0.1", port)


def test_it_leaves_when_its_parent_does() -> None:
    reader, writer = os.pipe()
    try:
        with router(alive_fd=reader) as process:
            port = int(str(ready_line(process)["port"]))
            os.close(writer)
            assert process.wait(timeout=5) == 0
            assert not is_listening("127.0.0.1", port)
    finally:
        os.close(reader)


def test_taken_port_is_exit_2_and_names_it() -> None:
    with bound_socket("127.0.0.1") as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with router(port) as process:
            _, err = process.communicate(timeout=10)
            assert process.returncode == 2
            assert f"port {port}" in err
            assert f"pid {os.getpid()}" in err


def test_the_zone_without_torch_starts_fast() -> None:
    program = "import sys, splitserve.router.main, splitserve.bench.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
