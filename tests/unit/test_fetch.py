"""`splitserve fetch` against a Hub of our own on this machine: whole, in parts, damaged, and not there at all."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from splitserve.cli import main
from splitserve.errors import ConfigError, FetchError
from splitserve.weights import fetch as module
from splitserve.weights.fetch import NOTED, fetch

pytest.importorskip("huggingface_hub")

COMMIT = "c" * 40
REPOSITORY = "owner/tiny"
FILES = {
    "config.json": b'{"model_type": "deepseek_v4"}',
    "model-00001.safetensors": bytes(range(256)) * 400,
    "model-00002.safetensors": b"\x07" * 50_000,
    "pytorch_model.bin": b"not wanted",
    "inference/config.json": b"not wanted",
}


class Hub:
    """The few answers of the Hub that a download needs. `served` counts bytes of each file's body."""

    def __init__(self) -> None:
        self.files = dict(FILES)
        self.damaged: dict[str, int] = {}  # so many times yet
        self.cut: dict[str, int] = {}  # the connection breaks after so many bytes, once
        self.served: dict[str, int] = {}
        hub = self

        class Answers(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: Any, *, body: bool) -> None:
        if request.path.startswith(f"/api/models/{REPOSITORY}/revision/"):
            self.send(request, json.dumps(self.description()).encode(), {}, body)
            return
        found = re.fullmatch(rf"/{REPOSITORY}/resolve/\w+/(.+)", request.path)
        if found is None or found[1] not in self.files:
            missing = {"X-Error-Code": "RepoNotFound"}
            self.send(request, b"", missing, body, status=404)
            return
        self.send_file(request, found[1], body)

    def send_file(self, request: Any, name: str, body: bool) -> None:
        content = self.files[name]
        headers = {
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "Accept-Ranges": "bytes",
        }
        first = re.match(r"bytes=(\d+)-", request.headers.get("range", ""))
        start, status = 0, 200
        if first and body:
            start, status = int(first[1]), 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        sent = content[start:]
        if body and self.damaged.get(name, 0) and len(sent):
            self.damaged[name] -= 1
            sent = b"?" + sent[1:]
        cut = self.cut.pop(name, None) if body else None
        if body:
            self.served[name] = self.served.get(name, 0) + len(sent[:cut])
        self.send(request, sent, headers, body, status=status, cut=cut)

    def send(
        self,
        request: Any,
        content: bytes,
        headers: dict[str, str],
        body: bool,
        *,
        status: int = 200,
        cut: int | None = None,
    ) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            request.send_header(name, value)
        request.end_headers()
        if body:
            request.wfile.write(content[:cut])
        if cut is not None:
            request.wfile.flush()
            request.connection.shutdown(socket.SHUT_RDWR)

    def description(self) -> dict[str, Any]:
        siblings = []
        for name, content in self.files.items():
            blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
            entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": blob}
            if name.endswith((".safetensors", ".bin")):
                entry["lfs"] = {
                    "sha256": hashlib.sha256(content).hexdigest(),
                    "size": len(content),
                    "pointerSize": 1,
                }
            siblings.append(entry)
        return {"id": REPOSITORY, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    made.server.shutdown()
    made.server.server_close()


def run(hub: Hub, directory: Path, lines: list[str] | None = None) -> module.Fetched:
    return fetch(REPOSITORY, directory, endpoint=hub.url, tell=(lines if lines is not None else []).append)


def test_what_an_engine_reads_is_fetched_and_checked(hub: Hub, tmp_path: Path) -> None:
    lines: list[str] = []
    done = run(hub, tmp_path / "m", lines)
    assert {p.name for p in (tmp_path / "m").iterdir() if p.is_file()} == {
        "config.json",
        "model-00001.safetensors",
        "model-00002.safetensors",
        NOTED,
    }
    for name in ("config.json", "model-00001.safetensors", "model-00002.safetensors"):
        assert (tmp_path / "m" / name).read_bytes() == FILES[name]
    assert (done.num_files, done.revision) == (3, COMMIT)
    assert done.num_bytes == sum(
        len(FILES[n]) for n in ("config.json", "model-00001.safetensors", "model-00002.safetensors")
    )
    assert [line.split(":")[0] for line in lines] == [
        "[1/3] config.json",
        "[2/3] model-00002.safetensors",
        "[3/3] model-00001.safetensors",
    ]


def test_the_second_time_nothing_is_sent_or_read(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(hub, tmp_path)
    hub.served.clear()
    monkeypatch.setattr(module, "_is_intact", lambda *_: pytest.fail("read again"))
    run(hub, tmp_path)
    assert hub.served == {}
    (tmp_path / "config.json").unlink()
    monkeypatch.undo()
    run(hub, tmp_path)
    assert list(hub.served) == ["config.json"]


def test_a_broken_connection_is_gone_on_from(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, part = "model-00001.safetensors", 10_000
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", part)
    hub.cut[name] = 60_000
    try:
        run(hub, tmp_path)
    except FetchError:
        run(hub, tmp_path)
    assert (tmp_path / name).read_bytes() == FILES[name]
    assert hub.served[name] <= len(FILES[name]) + part


def test_a_damaged_file_is_fetched_again_and_twice_is_an_error(hub: Hub, tmp_path: Path) -> None:
    name = "model-00002.safetensors"
    hub.damaged[name] = 1
    run(hub, tmp_path / "a")
    assert (tmp_path / "a" / name).read_bytes() == FILES[name]
    hub.damaged[name] = 2
    with pytest.raises(FetchError, match="damaged twice"):
        run(hub, tmp_path / "b")
    assert not (tmp_path / "b" / name).exists()


def test_a_disk_that_is_too_small_is_said_before_the_first_byte(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(FetchError, match="free") as raised:
        run(hub, tmp_path / "new" / "deep")
    assert raised.value.fix
    assert hub.served == {}


def test_models_that_are_not_there(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no model"):
        fetch("nothing", tmp_path, tell=print)
    with pytest.raises(ConfigError, match="no owner/other"):
        fetch("owner/other", tmp_path, endpoint=hub.url, tell=print)
    del hub.files["model-00001.safetensors"], hub.files["model-00002.safetensors"]
    with pytest.raises(ConfigError, match="no weights"):
        run(hub, tmp_path)


def test_without_a_network_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    real = module.fetch
    monkeypatch.setattr(module, "fetch", lambda *a, **kw: real(*a, **kw, endpoint=f"http://127.0.0.1:{port}"))
    assert main(["fetch", "deepseek-v4-flash", "--dir", str(tmp_path / "flash")]) == 1
    said = capsys.readouterr().err
    assert "does not answer" in said
    assert "hf download deepseek-ai/DeepSeek-V4-Flash --local-dir flash" in said
