"""The main job with real processes, real NIXL and a tiny model: split is unified, faults caught, deaths survived."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proc.real import Deployment, call, until
from tests.tiny_chat import write_chat_checkpoint

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Deployment]:
    deployment = Deployment(model)
    deployment.up()
    yield deployment
    deployment.close()


def prompt(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{n} {seed}")
    return [rng.randrange(6, 262) for _ in range(n)]


def test_verify_proves_the_split_and_catches_every_planted_fault(pair: Deployment) -> None:
    done = pair.run("verify", str(pair.file), "--plant", "all", "--json", timeout_s=280)
    assert done.stdout, done.stderr
    proof = json.loads(done.stdout)
    assert not [f for c in proof["cases"] for f in c["findings"]], done.stderr
    missed = [p for p in proof["planted"] if not p["caught"]]
    assert not missed
    assert len(proof["planted"]) >= 5
    assert done.returncode == 0
    assert {c["crossing"]["recomputations"] for c in proof["cases"]} == {0}


def test_half_of_a_long_prompt_is_there_before_its_last_chunk_is_computed(pair: Deployment) -> None:
    status, answer = pair.generate(prompt(8 * 32, 1), 1)
    assert status == 200, answer
    received = pair.call("decode-0", "/debug/handoffs")[1]["received"][-1]
    sent = next(
        r for r in pair.call("prefill-0", "/debug/handoffs")[1]["sent"] if r["room"] == received["room"]
    )
    assert len(sent["chunks"]) == 8
    assert all(0 < c["moving"] < 5 for c in sent["chunks"]), (
        "the bytes' own time is what GB/s are worked out from"
    )
    last = max(c["computed"] for c in sent["chunks"])
    early = sum(n["bytes"] for n in received["notes"] if n["at"] <= last)
    assert early >= received["bytes"] / 2, f"{early} of {received['bytes']} bytes before the end"


def test_a_room_whose_other_half_never_comes_is_an_error_on_both_sides(pair: Deployment) -> None:
    door = pair.process("prefill-0")["ports"]["bootstrap"]
    lonely = {"bootstrap_host": "127.0.0.1", "bootstrap_port": door, "bootstrap_room": 4711}
    for name in ("prefill-0", "decode-0"):
        begun = time.monotonic()
        status, answer = pair.generate(
            prompt(40, 2), 2, at=name, **lonely | {"bootstrap_room": 4711 + len(name)}
        )
        assert status == 503, answer
        assert answer["error"]["code"] in ("deadline_exceeded", "transfer_failed", "peer_lost")
        assert time.monotonic() - begun < 15
    until("no page is held", pair.all_pages_free)
    pair.check()


def test_a_room_used_twice_is_refused_by_name(pair: Deployment) -> None:
    door = pair.process("prefill-0")["ports"]["bootstrap"]
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": door, "bootstrap_room": 815}
    first = threading.Thread(target=lambda: pair.generate(prompt(33, 3), 2, at="prefill-0", **room))
    first.start()
    assert pair.generate(prompt(33, 3), 2, at="decode-0", **room)[0] == 200
    first.join()
    for name in ("prefill-0", "decode-0"):
        status, answer = pair.generate(prompt(33, 4), 2, at=name, **room)
        assert status == 400, answer
        assert answer["error"]["param"] == "bootstrap_room"


def test_halves_of_two_prompts_never_become_one_answer(pair: Deployment) -> None:
    """Lengths agree and bytes are whole: only the prompts themselves tell that decode would store and say nonsense."""
    door = pair.process("prefill-0")["ports"]["bootstrap"]
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": door, "bootstrap_room": 816}
    mine = prompt(70, 21)
    truth = pair.generate(mine, 6)[1]["output_ids"]
    pair.call("decode-0", "/debug/flush_cache", {})
    first: list = []
    other = threading.Thread(
        target=lambda: first.append(pair.generate(prompt(70, 22), 6, at="prefill-0", **room))
    )
    other.start()
    answers = [pair.generate(mine, 6, at="decode-0", **room)]
    other.join()
    for status, answer in [*answers, *first]:
        assert status == 400, answer
        assert "different prompts of 70 tokens" in answer["error"]["message"]
    assert pair.generate(mine, 6)[1]["output_ids"] == truth, "wrong state was cached"
    pair.check()


def test_a_rendezvous_host_that_is_not_allowed_is_refused(pair: Deployment) -> None:
    room = {"bootstrap_host": "203.0.113.9", "bootstrap_port": 80, "bootstrap_room": 99}
    status, answer = pair.generate(prompt(5), 2, at="decode-0", **room)
    assert status == 400, answer
    assert answer["error"]["param"] == "bootstrap_host"


def test_clients_that_leave_at_any_moment_lose_no_page(pair: Deployment) -> None:
    rng = random.Random(5)
    url = pair.url("router")
    host, port = url.removeprefix("http://").split(":")

    def one(i: int) -> None:
        body = json.dumps(
            {
                "input_ids": prompt(rng.randrange(1, 200), i),
                "sampling_params": {"max_new_tokens": rng.randrange(1, 30), "ignore_eos": True},
                "stream": True,
            }
        ).encode()
        head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        with socket.create_connection((host, int(port)), timeout=60) as line:
            line.sendall(head.encode() + b"\r\nconnection: close\r\n\r\n" + body)
            if i % 3:
                line.settimeout(rng.random() * 0.4 + 0.001)
            try:
                while line.recv(65536):
                    pass
            except TimeoutError:
                return

    for start in range(0, 60, 12):
        threads = [threading.Thread(target=one, args=(i,)) for i in range(start, start + 12)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
            assert not t.is_alive(), "a request hangs"
    until("every page is free again", pair.all_pages_free)
    pair.check()


def test_the_openai_client_streams_through_the_pair(pair: Deployment) -> None:
    import openai

    client = openai.OpenAI(base_url=pair.url("router") + "/v1", api_key="none")
    chunks = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=8,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == "length"


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_kill_9_in_mid_request_is_an_answer_or_a_typed_error_and_then_all_is_well(
    pair: Deployment, victim: str
) -> None:
    want = pair.generate(prompt(900, 6), 40)[1]["output_ids"]
    for name in ("prefill-0", "decode-0"):
        pair.call(name, "/debug/flush_cache", {})
    got: list = []
    asking = threading.Thread(target=lambda: got.append(pair.generate(prompt(900, 6), 40)))
    rank = pair.process(victim)["ranks"][0]["pid"]
    asking.start()
    busy = until(
        "the prompt is being computed", lambda: pair.call("prefill-0", "/debug/stats")[1]["num_running"] > 0
    )
    assert busy
    os.kill(rank, signal.SIGKILL)
    asking.join(40)
    assert not asking.is_alive(), "the request hangs"
    status, answer = got[0]
    if status == 200:
        assert answer["output_ids"] == want
    else:
        assert status in (500, 502, 503), answer
        assert answer["error"]["code"] in ("peer_lost", "engine_lost", "transfer_failed", "deadline_exceeded")
    until("the router knows", lambda: call(pair.url("router") + "/ready")[0] == 503)
    status, answer = pair.generate(prompt(900, 6), 40)
    assert (status, answer.get("output_ids")) == (200, want), "the other engine answers alone meanwhile"
    until("the engine is restarted", lambda: ready_again(pair, victim, rank), within_s=60)
    assert pair.generate(prompt(900, 6), 40)[1]["output_ids"] == want
    pair.check()


def test_two_checkpoints_of_one_shape_never_make_a_pair(model: Path, tmp_path: Path) -> None:
    other = write_chat_checkpoint(tmp_path / "other", seed=1)
    mismatched = Deployment(model, name="mismatched")
    try:
        text = mismatched.file.read_text().replace("[decode]\n", f'[decode]\nmodel = "{other}"\n')
        mismatched.file.write_text(text)
        done = mismatched.run("up", str(mismatched.file), "--detach")
        assert done.returncode != 0, done.stdout
        assert "weights differ" in done.stderr
    finally:
        mismatched.close()


def test_status_tells_load_rates_and_lane_of_each_engine(pair: Deployment) -> None:
    pair.generate(list(range(3, 60)), 8)

    def shown() -> bool:
        processes = json.loads(pair.run("status", "--json").stdout)["deployments"][0]["processes"]
        prefill, decode, _ = (p["load"] for p in processes)
        return prefill["prompt_tokens"] > 0 < decode["output_tokens"] and bool(prefill["lane"])

    until("status has heard of it", shown)
    assert "output tok/s" in pair.run("status").stdout


@pytest.mark.slow
def test_a_prompt_of_twenty_thousand_tokens_crosses(tmp_path: Path) -> None:
    long = write_chat_checkpoint(tmp_path / "long", max_position_embeddings=32768)
    pair = Deployment(long, name="long", deadline_s=240.0, num_pages=1400, step_tokens=512)
    pair.up()
    try:
        sampling = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
        body = {"input_ids": prompt(20_000, 8), "sampling_params": sampling}
        status, answer = pair.call("router", "/generate", body, timeout_s=250.0)
        assert status == 200, answer
        received = pair.call("decode-0", "/debug/handoffs")[1]["received"][-1]
        assert received["ok"]
        assert received["bytes"] > 20_000 * 256
        assert pair.call("decode-0", "/debug/stats")[1]["counters"]["recomputations"] == 0
        assert len(answer["output_ids"]) == 3
        pair.check()
    finally:
        pair.close()


def ready_again(pair: Deployment, name: str, old_rank: int) -> bool:
    process = pair.process(name)
    if process["phase"] != "ready" or not process["ranks"] or process["ranks"][0]["pid"] == old_rank:
        return False
    return call(pair.url("router") + "/ready")[0] == 200
