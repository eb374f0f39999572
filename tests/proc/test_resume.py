"""kill -9 of the decode engine that is streaming: with another one there the client sees the answer it would have had."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.proc.real import Deployment, until
from tests.tiny_chat import write_chat_checkpoint

pytestmark = pytest.mark.timeout(300)

NUM = 300
PROMPT = "It was a dark and stormy night; the rain fell in torrents"
MESSAGES = [{"role": "user", "content": PROMPT}]
FREE = {"max_tokens": NUM, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
ASKS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "temperature": 0, **FREE},
    "/v1/chat/completions": {
        "messages": MESSAGES,
        "temperature": 0.9,
        "top_p": 0.95,
        "seed": 11,
        "frequency_penalty": 0.3,
        **FREE,
    },
}


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = Deployment(
        write_chat_checkpoint(tmp_path_factory.mktemp("model") / "tiny"), decodes=2, num_pages=512
    )
    deployment.up()
    yield deployment
    deployment.close()


class Stream:
    """One streamed answer, event by event."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        self._answer = urllib.request.urlopen(request, timeout=150)
        self.events: list[dict[str, Any]] = []
        self.done = False

    def read(self, most: int = 1 << 30) -> Stream:
        """Up to `most` more events, or all that are left."""
        while most and not self.done:
            line = self._answer.readline()
            if line == b"data: [DONE]\n":
                self.done = True
            elif line.startswith(b"data: "):
                self.events.append(json.loads(line[6:]))
                most -= 1
            else:
                assert line == b"\n", line
        return self

    @property
    def text(self) -> str:
        choices = [c for e in self.events for c in e["choices"]]
        return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def test_streams_go_on_without_a_seam(trio: Deployment) -> None:
    """Two streams at each decode engine, greedy and seeded; one of the engines dies."""
    until("both pairs are proven", lambda: trio.call("router", "/ready")[1]["proven"] == 2)
    url = trio.url("router")
    known = {path: Stream(url + path, body).read() for path, body in ASKS.items()}
    order = [*ASKS, *reversed(ASKS)]  # the router takes the engines in turn
    streams = [(path, Stream(url + path, ASKS[path])) for path in order]
    for _, stream in streams:
        stream.read(20)
    assert [trio.call(n, "/debug/stats")[1]["num_running"] for n in ("decode-0", "decode-1")] == [2, 2]
    os.kill(trio.process("decode-0")["pid"], signal.SIGKILL)
    for path, stream in streams:
        stream.read()
        assert stream.text == known[path].text
        assert len({(e["id"], e["created"]) for e in stream.events}) == 1
        assert [c["finish_reason"] for e in stream.events for c in e["choices"] if c["finish_reason"]] == [
            "length"
        ]
        usage, known_usage = stream.events[-1]["usage"], known[path].events[-1]["usage"]
        assert usage["completion_tokens"] == NUM
        assert usage["prompt_tokens"] == known_usage["prompt_tokens"]
    metrics = urllib.request.urlopen(url + "/metrics", timeout=10).read().decode()
    assert "\nsplitserve_router_resumed_streams_total 2\n" in metrics


@pytest.mark.slow
def test_a_stream_waits_for_the_only_engine_to_come_back(tmp_path: Path) -> None:
    deployment = Deployment(write_chat_checkpoint(tmp_path / "tiny"), name="wait", num_pages=512)
    try:
        told = deployment.run("up", str(deployment.file), "--detach", "--set", "router.resume_wait_s=120")
        assert told.returncode == 0, told.stderr
        url = deployment.url("router")
        for path, body in ASKS.items():
            known = Stream(url + path, body).read()
            stream = Stream(url + path, body).read(20)
            os.kill(deployment.process("decode-0")["ranks"][0]["pid"], signal.SIGKILL)
            assert stream.read().text == known.text
            assert stream.events[-1]["usage"]["completion_tokens"] == NUM
    finally:
        deployment.close()
