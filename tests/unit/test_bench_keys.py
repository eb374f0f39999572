"""API keys of a benchmark: found or given, sent to the server, and kept nowhere."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from splitserve.bench import runs
from splitserve.bench.main import run
from splitserve.bench.plan import from_words, undetached
from splitserve.errors import ConfigError
from splitserve.net.keys import ENVIRONMENT
from splitserve.words import command_line

KEY = "very-secret"
SHORT = ["--concurrency", "1", "--num", "1", "--input-len", "4", "--output-len", "1"]
MODELS = json.dumps({"data": [{"id": "fake"}], "vocab_size": 100}).encode()
EVENTS = (
    b'data: {"choices": [{"text": "x"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 1}}\n\ndata: [DONE]\n\n'
)


class Guarded(BaseHTTPRequestHandler):
    """Answers those who send KEY."""

    def do_GET(self) -> None:
        self._answer("application/json", MODELS)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._answer("text/event-stream", EVENTS)

    def _answer(self, kind: str, body: bytes) -> None:
        known = self.headers["authorization"] == f"Bearer {KEY}"
        self.send_response(200 if known else 401)
        body = body if known else b'{"error": {"message": "an API key is needed"}}'
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_key_is_given_in_a_file_in_the_environment_or_found(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text(f"# ours\n{KEY}\nanother\n")
    words = [target, *SHORT, "--json", str(tmp_path / "out.json")]
    with pytest.raises(ConfigError, match="needs an API key") as caught:
        run(words, runs_dir=tmp_path)
    assert ENVIRONMENT in str(caught.value.fix)
    assert run([*words, "--api-key-file", str(tmp_path / "keys")], runs_dir=tmp_path) == 0
    assert run(words, key_of={target: KEY}.__getitem__, runs_dir=tmp_path) == 0
    monkeypatch.setenv(ENVIRONMENT, KEY)
    assert run(words, runs_dir=tmp_path) == 0
    with pytest.raises(ConfigError, match="does not know this API key"):
        run([*words, "--api-key", "wrong"], runs_dir=tmp_path)
    with pytest.raises(ConfigError, match="missing"):
        run([*words, "--api-key-file", str(tmp_path / "missing")], runs_dir=tmp_path)


def test_no_key_is_in_results_or_pages(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = ["--json", str(tmp_path / "out.json"), "--html", str(tmp_path / "out.html")]
    words = [target, *SHORT, "--api-key", KEY, *outputs]
    monkeypatch.setattr(sys, "argv", ["/somewhere/splitserve/__main__.py", "bench", *words])
    assert run(words, runs_dir=tmp_path) == 0
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["command"].startswith(f"splitserve bench {target} --concurrency 1")
    assert "--api-key KEY --json" in told["command"]
    assert told["started"] <= told["finished"]
    assert KEY not in (tmp_path / "out.json").read_text() + (tmp_path / "out.html").read_text()


def test_no_key_is_in_anything_that_a_detached_run_leaves(target: str, tmp_path: Path) -> None:
    program = (sys.executable, "-m", "splitserve")
    words = [target, *SHORT, "--detach", f"--api-key={KEY}"]
    assert run(words, program=program, runs_dir=tmp_path) == 0
    (one,) = runs.newest_first(tmp_path)
    end = time.monotonic() + 30
    while one.read().state == "running":
        assert time.monotonic() < end
        time.sleep(0.05)
    assert one.read().state == "done", one.last_words
    assert (one.path / "state.json").stat().st_mode & 0o777 == 0o600
    kept = {p.name: p.read_text() for p in one.path.iterdir()}
    assert "result.json" in kept
    assert [name for name, text in kept.items() if KEY in text] == []
    command = json.loads(kept["result.json"])["command"]
    assert command == " ".join(["splitserve", "bench", *undetached(words, url=target)])


def test_a_plan_shows_no_key() -> None:
    assert KEY not in repr(from_words(["--api-key", KEY])[0])


@pytest.mark.parametrize(
    ("argv", "kept"),
    [
        (["/a/bin/splitserve", "bench", "--api-key", KEY], "splitserve bench --api-key KEY"),
        (["/a/splitserve/__main__.py", "bench", f"--api-key={KEY}"], "splitserve bench --api-key=KEY"),
        (["x", "--api-key"], "x --api-key KEY"),
        (["x", "--api-key-file", "f", "--recorded", "/d", "a b"], "x --api-key-file f 'a b'"),
        (["x", "--recorded=/d"], "x"),
    ],
)
def test_a_command_line_as_it_is_kept(argv: list[str], kept: str) -> None:
    assert command_line(argv, own=("--recorded",)) == kept


def test_a_url_is_no_place_for_a_password(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="password") as caught:
        run([f"http://me:{KEY}@127.0.0.1:1", "--detach"], program=("false",), runs_dir=tmp_path)
    assert KEY not in caught.value.message
    assert not list(tmp_path.iterdir())
