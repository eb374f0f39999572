"""The server as a process: its start, its end, and what becomes of it and its engine when either is killed."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from splitserve.net.probe import free_ports
from splitserve.server.ranks import Ranks
from tests.fake_engine import save_tokenizer, until

SERVE = Path(__file__).with_name("serve_fake.py")
ROOT = SERVE.parent.parent.parent


class Server:
    """A started server; `alive` is our end of its parent's pipe."""

    def __init__(self, model: Path, run_dir: Path, *, role="prefill", server=None, env=None) -> None:
        theirs, self.alive = os.pipe()
        given = {
            "engine": {"model": str(model), "role": role},
            "server": server or {},
            "run_dir": str(run_dir),
        }
        self.run_dir = run_dir
        self.process = subprocess.Popen(
            [sys.executable, str(SERVE), json.dumps({**given, "alive_fd": theirs})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=(theirs,),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        )
        os.close(theirs)
        self.lines: list[dict] = []

    def ready(self) -> dict:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))
            if self.lines[-1].get("ready"):
                return self.lines[-1]
        raise AssertionError(f"never ready: {self.lines} {self.process.stderr.read()}")

    def engine(self) -> psutil.Process:
        return psutil.Process(self.ask("GET", "/server_info")["pid"]).children()[0]

    def open(self) -> http.client.HTTPConnection:
        at = urlsplit(self.lines[-1]["url"])
        return http.client.HTTPConnection(at.hostname, at.port, timeout=20)

    def ask(self, method: str, path: str, body=None, *, status: int = 200):
        connection = self.open()
        connection.request(method, path, json.dumps(body) if body is not None else None)
        response = connection.getresponse()
        raw = response.read()
        assert response.status == status, raw
        return json.loads(raw)

    def wait(self) -> int:
        return self.process.wait(15)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(model, tmp_path):
    started: list[Server] = []

    @contextmanager
    def begin(role="prefill", **options) -> Iterator[Server]:
        run_dir = tmp_path / f"{role}-0"
        run_dir.mkdir(exist_ok=True)
        server = Server(model, run_dir, role=role, **options)
        started.append(server)
        yield server

    yield begin
    for server in started:
        with suppress(OSError):
            os.close(server.alive)
        server.process.kill()
        server.process.wait()
        server.process.stdout.close()
        server.process.stderr.close()


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_start_serve_stop(start):
    with start() as s:
        ready = s.ready()
        assert [x["loading"] for x in s.lines[:-1]] == ["engine", "weights", "first token"]
        assert ready["bootstrap_port"] == 4567
        assert ready["max_len"] == 512
        assert s.ask("GET", "/ready") == {"status": "ready"}
        got = s.ask("POST", "/v1/completions", {"prompt": "Hi", "max_tokens": 5})
        assert got["choices"][0]["text"] == "Hello"
        facts = s.ask("GET", "/server_info")
        given = facts["config"]
        assert (given["rank"], given["tp"], given["name"]) == (0, 1, "prefill-0")
        assert given["engine"]["role"] == "prefill"
        config = s.run_dir / "prefill-0-rank0.json"
        assert stat.S_IMODE(config.stat().st_mode) == 0o600
        engine = s.engine()
        assert "server_endpoint" not in " ".join(engine.cmdline())  # settings are not for everybody to see
        s.process.send_signal(signal.SIGTERM)
        assert s.wait() == 0
        assert gone(engine)
        assert list(s.run_dir.iterdir()) == []


def test_a_stop_lets_running_answers_end_but_not_for_ever(start):
    with start() as s:
        s.ready()
        slow, hanging = s.open(), s.open()
        slow.request("POST", "/v1/completions", json.dumps({"prompt": "SLOW"}))
        hanging.request("POST", "/generate", json.dumps({"text": "HANG", "stream": True}))
        stuck = hanging.getresponse()
        s.process.send_signal(signal.SIGTERM)
        assert json.loads(slow.getresponse().read())["choices"][0]["text"] == "late"
        assert s.wait() == 0  # although one request never ends
        with suppress(http.client.IncompleteRead, ConnectionError):
            stuck.read()


def test_ctrl_c(start):
    with start() as s:
        s.ready()
        engine = s.engine()
        s.process.send_signal(signal.SIGINT)
        assert s.wait() == 130
        assert gone(engine)


def test_engine_killed_in_mid_answer(start):
    with start() as s:
        s.ready()
        connection = s.open()
        connection.request(
            "POST", "/v1/completions", json.dumps({"prompt": "DIE", "stream": True, "max_tokens": 99})
        )
        response = connection.getresponse()
        whole = s.open()
        whole.request("POST", "/v1/completions", json.dumps({"prompt": "HANG"}))
        events = [x for x in response.read().decode().split("\n\n") if x]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "engine_lost"
        assert '"text":"d"' in events[0]
        answer = whole.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (502, "engine_lost")
        assert s.wait() == 1
        assert "killed by signal 9" in s.process.stderr.read()
        assert list(s.run_dir.iterdir()) == []


def test_parent_gone(start):
    with start() as s:
        s.ready()
        engine = s.engine()
        os.close(s.alive)
        assert s.wait() == 0
        assert gone(engine)
        s.alive = os.open(os.devnull, os.O_RDONLY)


def test_server_killed_takes_its_engine_along(start):
    with start() as s:
        s.ready()
        engine = s.engine()
        s.process.kill()
        s.wait()
        until(lambda: gone(engine))


def test_engine_that_cannot_start(start):
    with start(env={"FAKE_ENGINE_REFUSES": "1"}) as s:
        assert s.wait() == 2
        assert "error: 1 page needs 9 MB, 3 are free" in s.process.stderr.read()
        assert list(s.run_dir.iterdir()) == []


def test_port_taken(start):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with start(server={"port": other.getsockname()[1]}) as s:
            assert s.wait() == 2
            assert f"port {other.getsockname()[1]}" in s.process.stderr.read()
            assert s.process.stdout.read() == ""  # no engine was begun


def test_behind_sglang_router(start):
    """The real router, in PD mode, in front of a prefill and a decode server: what it sends, we accept."""
    pytest.importorskip("sglang_router")
    port, figures_port = free_ports(2)
    with start("prefill") as prefill, start("decode") as decode:
        urls = prefill.ready()["url"], decode.ready()["url"]
        words = [
            "--pd-disaggregation",
            "--prefill",
            urls[0],
            "4567",
            "--decode",
            urls[1],
            "--port",
            str(port),
        ]
        words += ["--host", "127.0.0.1", "--policy", "round_robin", "--log-level", "error"]
        words += ["--prometheus-port", str(figures_port)]
        router = subprocess.Popen(
            [sys.executable, "-m", "sglang_router.launch_router", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _ask_through(port)
        finally:
            router.kill()
            router.wait()
        for server, half in ((prefill, "prefill"), (decode, "decode")):
            counts = _figures(server)
            assert counts['splitserve_requests_total{endpoint="chat",status="200"}'] == 3, half
            assert counts['splitserve_requests_total{endpoint="completions",status="200"}'] == 1, half


def _ask_through(port: int) -> None:
    def ask(path: str, body=None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        with suppress(ConnectionError):
            raw = json.dumps(body) if body else None
            connection.request("POST" if body else "GET", path, raw, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        return 0, ""

    until(lambda: ask("/readiness")[0] == 200, within_s=20)
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
    status, raw = ask("/v1/chat/completions", chat)
    assert status == 200, raw
    assert json.loads(raw)["choices"][0]["message"]["content"] == "Hello"
    status, raw = ask("/v1/chat/completions", {**chat, "stream": True})
    assert raw.endswith("data: [DONE]\n\n"), raw
    assert status == 200
    status, raw = ask("/v1/chat/completions", {**chat, "n": 2})
    assert (status, len(json.loads(raw)["choices"])) == (200, 2)
    status, raw = ask("/v1/completions", {"model": "x", "prompt": ["a", "b"], "max_tokens": 2})
    assert status == 404  # a model that we do not have
    assert "is not served here" in raw
    status, raw = ask("/v1/completions", {"model": "unknown", "prompt": ["a", "b"], "max_tokens": 2})
    assert [c["text"] for c in json.loads(raw)["choices"]] == ["He", "He"], raw
    status, raw = ask("/generate", {"text": "Hi", "sampling_params": {"max_new_tokens": 3}})
    assert (status, json.loads(raw)["text"]) == (200, "Hel")
    status, raw = ask("/generate", {"text": "Hi", "sampling_params": {"temperature": -1}})
    assert status == 400
    assert "temperature" in raw


def _figures(server: Server) -> dict[str, float]:
    connection = server.open()
    connection.request("GET", "/metrics")
    lines = [x for x in connection.getresponse().read().decode().splitlines() if x and not x.startswith("#")]
    return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines)}


def test_a_rank_that_is_still_loading_leaves_at_once(tmp_path):
    """It watches no pipe yet, so it must be told by a signal; else every stop while loading takes all the patience."""

    async def run() -> None:
        code = "import signal, sys; print('on', file=sys.stderr, flush=True); signal.pause()"
        ranks = Ranks(tmp_path, "r", argv=lambda _config, _fd: [sys.executable, "-c", code])
        await ranks.start([{}], threads=0)
        await asyncio.wait_for(ranks.stop(within_s=60.0), 20.0)

    asyncio.run(run())
