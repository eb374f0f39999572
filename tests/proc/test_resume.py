"""kill -9 of the decode engine that is streaming: with another one there the client sees the answer it would have had."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.proc.real import Deployment, until
from tests.tiny_chat import write_chat_checkpoint

pytestmark = pytest.mark.timeout(300)

NUM = 600
PROMPT = "It was a dark and stormy night; the rain fell in torrents"
MESSAGES = [{"role": "user", "content": PROMPT}]
FREE = {"max_tokens": NUM, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
ASKS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": PROMPT, "temperature": 0, **FREE}),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "temperature": 0.9,
            "top_p": 0.95,
            "seed": 11,
            "frequency_penalty": 0.3,
            **FREE,
        },
    ),
]


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
        self._answer = urllib.request.urlopen(request, timeout=60)
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


def busy_decode(d: Deployment) -> dict[str, Any]:
    """The process that runs a request now."""
    names = ("decode-0", "decode-1")
    loads = {n: d.call(n, "/debug/stats")[1]["num_running"] for n in names}
    assert sorted(loads.values()) == [0, 1], loads
    return d.process(max(names, key=loads.__getitem__))


@pytest.mark.parametrize(("path", "body"), ASKS, ids=["greedy", "seeded"])
def test_a_stream_goes_on_without_a_seam(trio: Deployment, path: str, body: dict[str, Any]) -> None:
    until("both pairs are proven", lambda: trio.call("router", "/ready")[1]["proven"] == 2)
    url = trio.url("router") + path
    known = Stream(url, body).read()
    stream = Stream(url, body).read(20)
    os.kill(busy_decode(trio)["pid"], signal.SIGKILL)
    stream.read()
    assert stream.text == known.text
    assert len({e["id"] for e in stream.events}) == 1
    assert len({e["created"] for e in stream.events}) == 1
    assert [c["finish_reason"] for e in stream.events for c in e["choices"] if c["finish_reason"]] == [
        "length"
    ]
    usage, known_usage = stream.events[-1]["usage"], known.events[-1]["usage"]
    assert usage["completion_tokens"] == NUM
    assert usage["prompt_tokens"] == known_usage["prompt_tokens"]
    metrics = urllib.request.urlopen(trio.url("router") + "/metrics", timeout=10).read().decode()
    assert int(metrics.split("resumed_streams_total ")[2].split()[0]) > 0
