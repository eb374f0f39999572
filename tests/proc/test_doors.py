"""Routers of other projects, as their packages are, in front of real engines of ours: sglang_router and vllm-router.

One deployment with a tiny model for all tests. Every answer is compared with that of our own router: same seed, same
tokens, whoever stands in front.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from splitserve.net.probe import free_ports
from tests.proc.real import Deployment, call, until
from tests.tiny_chat import write_chat_checkpoint

pytestmark = pytest.mark.timeout(120)

CHAT = {"messages": [{"role": "user", "content": "who stands at the door?"}], "temperature": 0, "seed": 3}
DRAWN = {**CHAT, "temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
TEXTS = ["one prompt", "and another one, somewhat longer"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = Deployment(write_chat_checkpoint(tmp_path_factory.mktemp("model") / "tiny"))
    deployment.up()
    yield deployment
    deployment.close()


@contextmanager
def router(module: str, *words: str, home: Path, ready: str = "/readiness") -> Iterator[str]:
    """A foreign router in a session of its own, so that all of it can be ended; yields its address."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    port, figures = free_ports(2)
    launch = [sys.executable, "-m", f"{module}.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    more = ["--prometheus-port", str(figures), "--policy", "round_robin"]
    with (home / f"{module}.log").open("wb") as file:
        process = subprocess.Popen(
            [*launch, *more, *words],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "NO_PROXY": "*"},
        )
    try:
        url = f"http://127.0.0.1:{port}"
        until(f"{module} is ready", lambda: answers(url + ready))
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def prefill_words(pair: Deployment, port: str | None) -> list[str]:
    url = pair.url("prefill-0")
    return ["--prefill", url, *([port] if port else []), "--decode", pair.url("decode-0")]


@pytest.fixture(scope="module")
def sglang(pair: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    door = str(pair.process("prefill-0")["ports"]["bootstrap"])
    words = ["--pd-disaggregation", *prefill_words(pair, door), "--log-level", "warn"]
    with router("sglang_router", *words, home=tmp_path_factory.mktemp("sglang")) as url:
        yield url


@pytest.fixture(scope="module")
def vllm(pair: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    words = ["--vllm-pd-disaggregation", *prefill_words(pair, None), "--log-level", "warning"]
    with router("vllm_router", *words, home=tmp_path_factory.mktemp("vllm"), ready="/health") as url:
        yield url


def events(url: str, body: dict[str, Any]) -> list[Any]:
    """Payloads of a stream; the last must be [DONE]."""
    raw = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(url, raw, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line[6:].strip() for line in response if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]", lines
    return [json.loads(line) for line in lines[:-1]]


def streamed_texts(url: str, body: dict[str, Any]) -> list[str]:
    """Text of each choice of a streamed chat."""
    texts: dict[int, str] = {}
    for chunk in events(url + "/v1/chat/completions", body):
        for choice in chunk["choices"]:
            i = choice["index"]
            texts[i] = texts.get(i, "") + (choice["delta"].get("content") or "")
    return [texts[i] for i in sorted(texts)]


def chat_texts(url: str, body: dict[str, Any]) -> list[str]:
    status, answer = call(url + "/v1/chat/completions", body)
    assert status == 200, answer
    return [choice["message"]["content"] for choice in answer["choices"]]


def crossed(pair: Deployment) -> set[int]:
    """Rooms whose state decode has received lately."""
    return {r["room"] for r in pair.call("decode-0", "/debug/handoffs")[1]["received"]}


# ---------------------------------------------------------------- sglang_router, a pair


def test_sglang_router_gives_the_same_chat_as_ours(pair: Deployment, sglang: str) -> None:
    before = crossed(pair)
    texts = chat_texts(sglang, DRAWN)
    assert len(crossed(pair) - before) == 1, "the state did not cross"
    assert texts == chat_texts(pair.url("router"), DRAWN)
    assert streamed_texts(sglang, DRAWN) == texts


def test_sglang_router_with_several_choices_uses_a_list_of_rooms(pair: Deployment, sglang: str) -> None:
    three = {**DRAWN, "n": 3}
    before = crossed(pair)
    texts = chat_texts(sglang, three)
    assert len(crossed(pair) - before) == 3
    assert len(set(texts)) == 3
    assert texts == chat_texts(pair.url("router"), three)
    assert streamed_texts(sglang, three) == texts


def test_sglang_router_with_lists_of_prompts(pair: Deployment, sglang: str) -> None:
    body = {"model": "tiny", "prompt": TEXTS, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    before = crossed(pair)
    found = [call(url + "/v1/completions", body) for url in (sglang, pair.url("router"))]
    assert [status for status, _ in found] == [200, 200], found
    texts = [[c["text"] for c in answer["choices"]] for _, answer in found]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 2
    assert len(crossed(pair) - before) == 4

    ids = [[7, 8, 9, 10], list(range(20, 60))]
    batch = {"input_ids": ids, "sampling_params": {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}}
    (status, theirs), (_, own) = (call(url + "/generate", batch) for url in (sglang, pair.url("router")))
    assert status == 200, theirs
    assert [a["output_ids"] for a in theirs] == [a["output_ids"] for a in own]


def test_sglang_router_puts_prefills_logprobs_in_front_once(pair: Deployment, sglang: str) -> None:
    body = {
        "input_ids": list(range(20, 40)),
        "sampling_params": {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    (status, theirs), (_, own) = (call(url + "/generate", body) for url in (sglang, pair.url("router")))
    assert status == 200, theirs
    for name in ("input_token_logprobs", "output_token_logprobs"):
        assert [e[1] for e in theirs["meta_info"][name]] == [e[1] for e in own["meta_info"][name]], name
    assert len(theirs["meta_info"]["input_token_logprobs"]) == 20


def test_a_stream_through_sglang_router_counts_its_tokens(sglang: str) -> None:
    body = {"text": TEXTS[1], "sampling_params": {"max_new_tokens": 9, "temperature": 0, "ignore_eos": True}}
    last = events(sglang + "/generate", body)[-1]
    assert last["meta_info"]["completion_tokens"] == 9
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 9}


def test_a_refusal_comes_through_sglang_router_at_once_and_as_400(pair: Deployment, sglang: str) -> None:
    status, answer = call(sglang + "/v1/chat/completions", {**CHAT, "max_tokens": 10**6}, timeout_s=5)
    assert status == 400, answer
    assert "1000000" in json.dumps(answer)
    pair.check()


def test_sglang_router_without_a_bootstrap_port_meets_at_the_only_prefill(
    pair: Deployment, tmp_path: Path
) -> None:
    words = ["--pd-disaggregation", *prefill_words(pair, None), "--log-level", "warn"]
    with router("sglang_router", *words, home=tmp_path) as url:
        before = crossed(pair)
        assert chat_texts(url, DRAWN) == chat_texts(pair.url("router"), DRAWN)
        assert len(crossed(pair) - before) == 2


# ---------------------------------------------------------------- sglang_router, plain


def test_sglang_router_in_plain_mode(pair: Deployment, tmp_path: Path) -> None:
    """Without bootstrap fields any engine does the whole request, whatever its role."""
    engines = [pair.url("prefill-0"), pair.url("decode-0")]
    with router("sglang_router", "--worker-urls", *engines, "--log-level", "warn", home=tmp_path) as url:
        before = crossed(pair)
        expected = chat_texts(pair.url("router"), {**DRAWN, "n": 2})
        for _ in engines:  # round robin: each of them once, and once more as a stream
            assert chat_texts(url, {**DRAWN, "n": 2}) == expected
            assert streamed_texts(url, {**DRAWN, "n": 2}) == expected
        assert len(crossed(pair) - before) == 2, "only our own router's request may have crossed"


# ---------------------------------------------------------------- vllm-router


def test_vllm_router_gives_the_same_as_ours(pair: Deployment, vllm: str) -> None:
    before = crossed(pair)
    body = {**DRAWN, "model": "tiny"}
    texts = chat_texts(vllm, body)
    assert len(crossed(pair) - before) == 1, "the state did not cross"
    assert texts == chat_texts(pair.url("router"), body)
    assert streamed_texts(vllm, body) == texts


def test_vllm_router_with_several_choices_and_token_ids(pair: Deployment, vllm: str) -> None:
    three = {**DRAWN, "model": "tiny", "n": 3}
    before = crossed(pair)
    texts = chat_texts(vllm, three)
    assert len(crossed(pair) - before) == 3
    assert texts == chat_texts(pair.url("router"), three)

    ids = {"model": "tiny", "prompt": [30, 31, 32, 33], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    (status, theirs), (_, own) = (call(u + "/v1/completions", ids) for u in (vllm, pair.url("router")))
    assert status == 200, theirs
    assert theirs["choices"][0]["text"] == own["choices"][0]["text"]
    assert theirs["usage"]["completion_tokens"] == 6


def test_a_refusal_comes_through_vllm_router(vllm: str) -> None:
    body = {**CHAT, "model": "tiny", "temperature": -1}
    status, answer = call(vllm + "/v1/chat/completions", body, timeout_s=5)
    assert status == 400, answer
    assert "temperature" in json.dumps(answer)


def test_prefill_answers_first_and_gives_up_what_nobody_takes(pair: Deployment) -> None:
    """What a router does that dies between its two calls: the state is held for the lease, then freed."""
    ask = {**DRAWN, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    status, answer = pair.call("prefill-0", "/v1/chat/completions", ask, timeout_s=5)
    assert status == 200, answer
    told = answer["kv_transfer_params"]
    assert told["do_remote_prefill"] is True
    assert told["bootstrap_port"] == pair.process("prefill-0")["ports"]["bootstrap"]
    assert not pair.all_pages_free(), "nothing is held for decode"
    until("the lease is over", pair.all_pages_free)
    late = {**DRAWN, "kv_transfer_params": told}
    status, answer = pair.call("decode-0", "/v1/chat/completions", late)
    assert status != 200, "decode made an answer out of a state that was gone"
    until("no page is held", pair.all_pages_free)
    pair.check()
