"""The failure contract of the router, against engines that fail in every way over real sockets."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from splitserve.config import RouterConfig
from splitserve.router.fleet import Endpoint
from splitserve.router.main import Router
from splitserve.types import Role
from tests.fake_workers import (
    Behaviour,
    FakeWorker,
    Line,
    Seen,
    completes,
    cut_json,
    dies,
    error,
    garbage,
    one_by_one,
    silent,
    streams,
    tokens,
    whole,
)
from tests.wire_http import Answer, Wire, ask, go, request, until

PROMPT = {"model": "m", "prompt": "hi", "stream": True}
PLAIN = {"model": "m", "prompt": "hi"}
ALL_TOKENS = b"".join(tokens(4))


@dataclass
class Bench:
    router: Router
    prefills: list[FakeWorker]
    decodes: list[FakeWorker]

    @property
    def port(self) -> int:
        assert self.router.server is not None
        return self.router.server.port

    async def ask(self, body: dict[str, Any], path: str = "/v1/completions", headers: str = "") -> Answer:
        return await ask(self.port, "POST", path, body, headers)

    def outcome(self, name: str) -> int:
        return self.router.proxy.metrics.outcomes.get(name, 0)


@asynccontextmanager
async def bench(
    prefill: Behaviour | list[Behaviour],
    decode: Behaviour | list[Behaviour],
    *,
    unified: bool = False,
    **config: Any,
) -> AsyncIterator[Bench]:
    """A router that is ready, in front of fake engines; checks at the end that nothing is left of any request."""
    prefills = [await FakeWorker.start(b) for b in (prefill if isinstance(prefill, list) else [prefill])]
    decodes = [await FakeWorker.start(b) for b in (decode if isinstance(decode, list) else [decode])]
    workers = [Endpoint(w.url, Role.PREFILL, 8998) for w in prefills]
    workers += [Endpoint(w.url, Role.UNIFIED if unified else Role.DECODE) for w in decodes]
    settings = {"port": 0, "health_interval_s": 0.05, "prefill_grace_s": 0.3, **config}
    router = Router(RouterConfig(**settings), workers)
    await router.start()
    try:
        pairs = len(decodes) * (1 if unified else len(prefills))
        await until(lambda: router.fleet.num_proven == pairs, what="every pair proven")
        found = Bench(router, prefills, decodes)
        yield found
        await until(lambda: router.proxy.num_active == 0, what="requests over")
        router.proxy.check()
    finally:
        await router.close()
        for worker in (*prefills, *decodes):
            await worker.die()


def stream_error(answer: Answer) -> dict[str, Any]:
    """The error event of a stream that broke off: it must be well framed and end in [DONE]."""
    assert answer.status == 200
    assert answer.whole, "the chunked body was cut"
    assert answer.body.endswith(b"data: [DONE]\n\n")
    events = [e for e in answer.body.split(b"\n\n") if e.startswith(b"data: {")]
    return json.loads(events[-1].removeprefix(b"data: "))["error"]


# ---------------------------------------------------------------- the good case


def test_both_legs_get_the_same_bytes_and_decode_answers() -> None:
    async def run() -> None:
        async with bench(whole(200, {"text": "x"}), completes()) as b:
            body = {"model": "m", "prompt": "hi", "stream": True, "unknown": {"deep": [1, 2.50, "é"]}}
            answer = await b.ask(body, headers="authorization: Bearer k\r\nx-request-id: r1\r\ncookie: c\r\n")
            assert answer.body == ALL_TOKENS
            assert answer.headers["x-engine"] == "fake"  # decode's head
            (to_prefill,), (to_decode,) = b.prefills[0].seen, b.decodes[0].seen
            assert to_prefill.raw == to_decode.raw
            assert to_prefill.path == to_decode.path == "/v1/completions"
            sent = to_decode.body
            assert sent["bootstrap_host"] == "127.0.0.1"
            assert sent["bootstrap_port"] == 8998
            assert 0 < sent["bootstrap_room"] < 2**63
            assert isinstance(sent["seed"], int)
            assert sent["unknown"] == {"deep": [1, 2.5, "é"]}
            assert b"2.5," in to_decode.raw or b"2.50" in to_decode.raw
            assert to_decode.headers["authorization"] == "Bearer k"
            assert to_decode.headers["x-request-id"] == "r1"
            assert "cookie" not in to_decode.headers
            assert b.outcome("ok") == 1

    go(run())


@pytest.mark.parametrize(
    ("path", "more", "headers", "want"),
    [
        ("/v1/completions", {}, "", "cmpl-[0-9a-f]{24}"),
        ("/v1/chat/completions", {"rid": None}, "", "chatcmpl-[0-9a-f]{24}"),
        ("/generate", {}, "", "[0-9a-f]{24}"),
        ("/v1/completions", {"rid": "mine"}, "", "mine"),
        ("/v1/completions", {"request_id": "mine"}, "", None),
        ("/v1/completions", {}, "x-request-id: mine\r\n", None),
    ],
)
def test_both_halves_know_a_request_by_one_name(path, more, headers, want) -> None:
    async def run() -> None:
        async with bench(whole(200, {}), completes()) as b:
            await b.ask({**PLAIN, **more}, path, headers)
            (one,), (other,) = b.prefills[0].seen, b.decodes[0].seen
            assert one.raw == other.raw
            assert re.fullmatch(want, one.body["rid"]) if want else "rid" not in one.body

    go(run())


def test_requests_that_break_off_are_logged_with_their_name(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with bench(whole(200, {}), [completes()]) as b:
            for rid, behaviour in (("good", completes()), ("bad", dies()), ("early", silent())):
                b.decodes[0].behaves = behaviour
                if rid == "early":
                    wire = await Wire.open(b.port)
                    raw = json.dumps({**PLAIN, "rid": rid}).encode()
                    await wire.send(request("POST", "/v1/completions", raw))
                    await until(lambda: b.decodes[0].seen[-1].body["rid"] == "early")
                    wire.abort()
                    await until(lambda: b.outcome("client_left") == 1)
                else:
                    await b.ask({**PLAIN, "rid": rid}, headers="X-Request-Id: other\r\n")

    with caplog.at_level("INFO", logger="splitserve.router.proxy"):
        go(run())
    lines = [line for line in caplog.messages if line.startswith("request ")]
    assert [line.split()[1] for line in lines] == ["bad", "early"], lines
    assert "(/v1/completions, prefill-0+decode-0)" in lines[1]
    assert lines[0].startswith("request bad [X-Request-Id other] ")
    assert ": lost," in lines[0]
    assert "last failure: decode-0 at http" in lines[0]


def test_the_legs_leave_at_once() -> None:
    """Decode does not wait for prefill's answer."""

    async def run() -> None:
        async with bench(whole(200, {}, after_s=0.2), completes(after_s=0.25)) as b:
            assert (await b.ask(PLAIN)).status == 200
            (one,), (other,) = b.prefills[0].seen, b.decodes[0].seen
            assert abs(one.at_s - other.at_s) < 0.1

    go(run())


def test_rooms_are_fresh_and_a_clients_seed_is_kept() -> None:
    async def run() -> None:
        async with bench(whole(200, {}), completes()) as b:
            for _ in range(5):
                await b.ask({**PLAIN, "seed": 7, "bootstrap_room": 3, "bootstrap_host": "evil"})
            rooms = [s.body["bootstrap_room"] for s in b.decodes[0].seen]
            assert len(set(rooms)) == 5
            assert 3 not in rooms
            assert {s.body["seed"] for s in b.decodes[0].seen} == {7}
            assert {s.body["bootstrap_host"] for s in b.decodes[0].seen} == {"127.0.0.1"}

    go(run())


def test_unified_engine_is_one_leg_without_a_room() -> None:
    async def run() -> None:
        async with bench([], completes(), unified=True) as b:
            assert (await b.ask(PROMPT)).body == ALL_TOKENS
            assert "bootstrap_room" not in b.decodes[0].seen[0].body

    go(run())


def test_upstream_connections_are_used_again() -> None:
    async def run() -> None:
        async with bench(whole(200, {}), completes()) as b:
            for _ in range(20):
                await b.ask(PROMPT)
            assert b.decodes[0].num_connections <= 3  # one for the data, others for health
            assert b.prefills[0].num_connections <= 3

    go(run())


def test_json_has_a_length_and_the_connection_lives_on() -> None:
    async def run() -> None:
        async with bench(whole(200, {}), completes()) as b, await Wire.open(b.port) as wire:
            for _ in range(3):
                await wire.send(request("POST", "/generate", json.dumps({"text": "x"}).encode()))
                answer = await wire.answer()
                assert int(answer.headers["content-length"]) == len(answer.body)
                assert answer.json["usage"]["completion_tokens"] == 4

    go(run())


def test_http_1_0_client_gets_the_stream_without_chunks() -> None:
    async def run() -> None:
        async with bench(whole(200, {}), completes()) as b, await Wire.open(b.port) as wire:
            body = json.dumps(PROMPT).encode()
            await wire.send(request("POST", "/generate", body).replace(b"HTTP/1.1", b"HTTP/1.0"))
            assert (await wire.answer()).body == ALL_TOKENS

    go(run())


def test_engine_without_length_or_chunks() -> None:
    """An HTTP/1.0-like engine: the body ends with the connection."""

    async def behave(seen: Seen, line: Line) -> None:
        await line.raw(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n" + b'{"a":1}'
        )
        line.writer.close()
        raise ConnectionResetError

    async def run() -> None:
        async with bench(whole(200, {}), behave) as b:
            answer = await b.ask(PLAIN)
            assert answer.json == {"a": 1}
            assert answer.headers["content-length"] == "7"

    go(run())


def test_large_json_passes_although_it_is_not_kept_whole() -> None:
    big = {"text": "x" * (9 << 20)}

    async def run() -> None:
        async with bench(whole(200, {}), whole(200, big)) as b:
            assert (await b.ask(PLAIN)).json == big

    go(run())


def test_a_slow_client_makes_the_engine_wait() -> None:
    """Back-pressure: the router must not hold what the client does not take."""
    sent = 0

    async def flood(seen: Seen, line: Line) -> None:
        nonlocal sent
        await line.raw(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for _ in range(600):
            await line.frame(b"data: " + b"x" * 65536 + b"\n\n")
            sent += 65536
        await line.raw(b"0\r\n\r\n")

    async def run() -> None:
        async with bench(whole(200, {}), flood) as b, await Wire.open(b.port) as wire:
            wire.reader._transport.pause_reading()  # type: ignore[attr-defined]
            await wire.send(request("POST", "/generate", json.dumps(PROMPT).encode()))
            before = -1
            while before != sent:  # until the engine cannot send any more
                before = sent
                await asyncio.sleep(0.1)
            assert sent < 25 << 20  # kernel buffers of two connections, not 39 MB
            wire.reader._transport.resume_reading()  # type: ignore[attr-defined]
            answer = await wire.answer()
            assert len(answer.body) == 600 * (65536 + 8)

    go(run(), within_s=60)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_4xx_of_either_leg_reaches_the_client_at_once(side: str, stream: bool) -> None:
    refuse = error(400, "invalid_request", "max_tokens is -1")

    async def run() -> None:
        legs = (refuse, silent(head=stream)) if side == "prefill" else (silent(), refuse)
        async with bench(*legs) as b:
            start = asyncio.get_running_loop().time()
            answer = await b.ask({**PLAIN, "stream": stream})
            assert asyncio.get_running_loop().time() - start < 0.5
            assert answer.status == 400
            assert answer.error["message"] == "max_tokens is -1"
            other = b.decodes[0] if side == "prefill" else b.prefills[0]
            await until(lambda: other.num_left == 1, what="the other leg cancelled")
            assert len(b.prefills[0].seen) == len(b.decodes[0].seen) == 1  # never tried again

    go(run())


def test_broken_json_is_refused_without_asking_an_engine() -> None:
    async def run() -> None:
        async with bench(whole(200, {}), completes()) as b:
            for body in (b"{", b"[]", b'"x"', b"", b"nul", b'{"a":NaN}', b"{'a':1}", b"[" * 100_000):
                answer = await ask(b.port, "POST", "/v1/completions", body)
                assert answer.status == 400, body[:20]
                assert answer.error["code"] == "invalid_request"
            assert b.decodes[0].seen == []

    go(run())


def test_an_error_as_first_event_becomes_a_status() -> None:
    """The engine had sent its 200 before it knew."""
    event = (
        b'data: {"error":{"message":"too long","type":"invalid_request_error","code":"invalid_request"}}\n\n'
    )

    async def run() -> None:
        async with bench(whole(200, {}), streams([event, b"data: [DONE]\n\n"])) as b:
            answer = await b.ask(PROMPT)
            assert (answer.status, answer.error["message"]) == (400, "too long")
            assert len(b.decodes[0].seen) == 1

    go(run())


# ---------------------------------------------------------------- failures before the first byte


FAILS_FIRST = {
    "connection lost": dies(head=False),
    "lost after the head": dies(head=True),
    "500": error(500, "internal_error"),
    "503": error(503, "transfer_failed"),
    "no HTTP": garbage(),
    "error event": streams(
        [b'data: {"error":{"message":"x","type":"server_error","code":"transfer_failed"}}\n\n']
    ),
}


@pytest.mark.parametrize("how", FAILS_FIRST)
def test_decode_failure_is_tried_again_with_a_new_room(how: str) -> None:
    async def run() -> None:
        async with bench(whole(200, {}), one_by_one(FAILS_FIRST[how], completes())) as b:
            answer = await b.ask(PROMPT)
            assert answer.status == 200
            assert answer.body == ALL_TOKENS
            first, second = (s.body["bootstrap_room"] for s in b.decodes[0].seen)
            assert first != second
            assert [s.body["bootstrap_room"] for s in b.prefills[0].seen] == [first, second]
            assert {s.body["seed"] for s in b.decodes[0].seen} == {b.decodes[0].seen[0].body["seed"]}
            assert b.router.proxy.metrics.num_retries == 1

    go(run())


@pytest.mark.parametrize("how", ["connection lost", "500", "503"])
def test_decode_failure_of_json_is_tried_again(how: str) -> None:
    async def run() -> None:
        async with bench(whole(200, {}), one_by_one(FAILS_FIRST[how], completes())) as b:
            assert (await b.ask(PLAIN)).json["usage"]["completion_tokens"] == 4

    go(run())


def test_json_cut_in_the_middle_is_tried_again_and_never_seen() -> None:
    async def run() -> None:
        async with bench(whole(200, {}), one_by_one(cut_json(), completes())) as b:
            answer = await b.ask(PLAIN)
            assert answer.whole
            assert answer.json["usage"]["completion_tokens"] == 4

    go(run())


def test_another_pair_takes_over() -> None:
    async def run() -> None:
        config = {"policy": "random", "retries": 1, "circuit_failures": 1000}
        async with bench([whole(200, {})] * 2, [dies(head=False), completes()], **config) as b:
            for _ in range(30):  # without a memory of who has failed, one in four would go wrong
                assert (await b.ask(PROMPT)).body == ALL_TOKENS

    go(run())


@pytest.mark.parametrize(
    ("how", "status", "code"),
    [
        ("connection lost", 502, "peer_lost"),
        ("lost after the head", 502, "peer_lost"),
        ("no HTTP", 502, "peer_lost"),
        ("500", 500, "internal_error"),
        ("503", 503, "transfer_failed"),
        ("error event", 503, "transfer_failed"),
    ],
)
def test_a_failure_that_stays_is_typed_json_within_a_second(how: str, status: int, code: str) -> None:
    async def run() -> None:
        async with bench(whole(200, {}), FAILS_FIRST[how], retries=2) as b:
            start = asyncio.get_running_loop().time()
            answer = await b.ask(PROMPT)
            assert asyncio.get_running_loop().time() - start < 1.0
            assert answer.status == status
            assert answer.error["code"] == code
            assert len(b.decodes[0].seen) == 3  # a try and two more

    go(run())


def test_retries_0_means_one_try() -> None:
    async def run() -> None:
        async with bench(whole(200, {}), dies(head=False), retries=0) as b:
            assert (await b.ask(PROMPT)).status == 502
            assert len(b.decodes[0].seen) == 1

    go(run())


@pytest.mark.parametrize("status", [504, 501, 529])
def test_other_5xx_become_502(status: int) -> None:
    async def run() -> None:
        async with bench(whole(200, {}), error(status, "strange"), retries=0) as b:
            assert (await b.ask(PLAIN)).status == 502

    go(run())


def test_overloaded_engine_is_not_tried_again_but_another_is() -> None:
    full = error(503, "overloaded", "no pages", headers="retry-after: 7\r\n")

    async def run() -> None:
        async with bench(whole(200, {}), full) as b:
            answer = await b.ask(PLAIN)
            assert (answer.status, answer.headers["retry-after"]) == (503, "7")
            assert len(b.decodes[0].seen) == 1
            assert b.router.fleet.get("decode-0").circuit.failures == 0  # it did nothing wrong
        async with bench(whole(200, {}), [full, completes()]) as b:
            for _ in range(4):
                assert (await b.ask(PLAIN)).status == 200

    go(run())


def test_prefill_5xx_is_tried_again() -> None:
    async def run() -> None:
        prefill = one_by_one(error(500, "internal_error"), whole(200, {}))
        async with bench(prefill, one_by_one(silent(head=True), completes())) as b:
            assert (await b.ask(PROMPT)).body == ALL_TOKENS
            assert b.decodes[0].num_left == 1

    go(run())


def test_nobody_listens_any_more() -> None:
    async def run() -> None:
        async with bench(whole(200, {}), completes(), health_interval_s=30.0, alone=False) as b:
            await b.decodes[0].die()
            start = asyncio.get_running_loop().time()
            answer = await b.ask(PROMPT)
            assert asyncio.get_running_loop().time() - start < 1.0
            assert answer.status == 502
            assert "decode-0" in answer.error["message"]

    go(run())


# ---------------------------------------------------------------- prefill dies while decode is silent


def test_decode_may_recover_from_the_death_of_the_last_prefill() -> None:
    async def run() -> None:
        slow = completes(after_s=0.3, gap_s=0.1)  # its first byte is in time, its last is not: that is enough
        async with bench(dies(after=0, after_s=0.15), slow, prefill_grace_s=0.4) as b:
            answer = await b.ask(PROMPT)
            assert answer.body == ALL_TOKENS
            assert len(b.decodes[0].seen) == 1  # not sent again
            assert b.router.fleet.get("prefill-0").circuit.failures == 1

    go(run())


def test_the_grace_ends() -> None:
    async def run() -> None:
        async with bench(dies(after=0, after_s=0.15), silent(head=True), prefill_grace_s=0.3) as b:
            start = asyncio.get_running_loop().time()
            answer = await b.ask(PROMPT)
            assert 0.4 < asyncio.get_running_loop().time() - start < 1.2
            assert (answer.status, answer.error["code"]) == (502, "peer_lost")
            assert "prefill-0" in answer.error["message"]
            await until(lambda: b.decodes[0].num_left == 1)

    go(run())


def test_an_error_at_the_end_of_prefills_stream_is_its_failure() -> None:
    """Its head was a 200: a rank that dies later is told of in an event, and decode would wait for a silence."""
    event = b'data: {"error":{"message":"rank 0 died","type":"server_error","code":"engine_lost"}}\n\n'

    async def run() -> None:
        prefill = streams([event, b"data: [DONE]\n\n"])
        async with bench(prefill, silent(head=True), prefill_grace_s=0.3, alone=False) as b:
            start = asyncio.get_running_loop().time()
            answer = await b.ask(PROMPT)
            assert asyncio.get_running_loop().time() - start < 1.2
            assert (answer.status, answer.error["code"]) == (502, "engine_lost")
            assert "rank 0 died" in answer.body.decode()

    go(run())


def test_the_first_to_hear_of_prefills_death_is_answered_by_decode_alone() -> None:
    """A stream hears of it in an event, before any health check: it is the one request that nobody else could warn."""
    event = b'data: {"error":{"message":"rank 0 died","type":"server_error","code":"engine_lost"}}\n\n'

    async def run() -> None:
        decode = one_by_one(silent(head=True), completes())
        prefill = streams([event, b"data: [DONE]\n\n"])
        async with bench(prefill, decode, prefill_grace_s=5.0, health_interval_s=30.0) as b:
            start = asyncio.get_running_loop().time()
            answer = await b.ask(PROMPT)
            assert asyncio.get_running_loop().time() - start < 2.0
            assert answer.body == ALL_TOKENS
            assert b.router.proxy.metrics.num_alone == 1

    go(run())


def test_an_absolute_target_is_forwarded_by_its_path() -> None:
    async def run() -> None:
        async with bench(whole(200, {}), completes()) as b:
            answer = await b.ask(PROMPT, path="http://example.org/v1/completions")
            assert answer.body == ALL_TOKENS
            assert b.decodes[0].seen[0].path == "/v1/completions"

    go(run())


def test_another_prefill_is_better_than_waiting() -> None:
    async def run() -> None:
        decode = one_by_one(silent(head=True), completes())
        async with bench([dies(after=0, after_s=0.15), whole(200, {})], decode, prefill_grace_s=5.0) as b:
            start = asyncio.get_running_loop().time()
            answer = await b.ask(PROMPT)
            assert asyncio.get_running_loop().time() - start < 1.0
            assert answer.body == ALL_TOKENS

    go(run())


def test_prefill_dying_after_decode_began_changes_nothing() -> None:
    async def run() -> None:
        async with bench(dies(after=0, after_s=0.15), completes(gap_s=0.05)) as b:
            assert (await b.ask(PROMPT)).body == ALL_TOKENS

    go(run())


# ---------------------------------------------------------------- failures after the first byte


@pytest.mark.parametrize("half_frame", [False, True])
def test_decode_death_in_a_stream_is_an_error_event_and_done(half_frame: bool) -> None:
    async def run() -> None:
        async with bench(whole(200, {}), dies(after=2, half_frame=half_frame)) as b:
            answer = await b.ask(PROMPT)
            assert answer.body.startswith(b"".join(tokens(2)[:2]))
            told = stream_error(answer)
            assert told["code"] == "peer_lost"
            assert len(b.decodes[0].seen) == 1  # never tried again after the first byte
            assert b.outcome("lost") == 1

    go(run())


def test_the_connection_is_good_after_a_broken_stream() -> None:
    async def run() -> None:
        decode = one_by_one(dies(after=1), completes())
        async with bench(whole(200, {}), decode) as b, await Wire.open(b.port) as wire:
            for _ in range(2):
                await wire.send(request("POST", "/v1/completions", json.dumps(PROMPT).encode()))
                answer = await wire.answer()
            assert answer.body == ALL_TOKENS

    go(run())


# ---------------------------------------------------------------- time


@pytest.mark.parametrize("stage", ["no head", "head only", "mid-stream"])
def test_one_deadline_over_all_stages(stage: str) -> None:
    decode = {
        "no head": silent(),
        "head only": silent(head=True),
        "mid-stream": streams(tokens(1000), gap_s=0.02),
    }[stage]

    async def run() -> None:
        async with bench(whole(200, {}), decode, request_deadline_s=0.3) as b:
            start = asyncio.get_running_loop().time()
            answer = await b.ask(PROMPT)
            assert 0.25 < asyncio.get_running_loop().time() - start < 1.0
            told = stream_error(answer) if stage == "mid-stream" else answer.error
            assert told["code"] == "deadline_exceeded"
            assert answer.status == (200 if stage == "mid-stream" else 503)
            await until(lambda: b.decodes[0].num_left == 1)

    go(run())


def test_silent_and_unhealthy_is_a_failure() -> None:
    """A stopped engine keeps its sockets: only health tells."""

    async def run() -> None:
        async with bench(whole(200, {}), silent(head=True), alone=False) as b:
            b.router.proxy.silence_s = 0.3
            asking = asyncio.create_task(b.ask(PROMPT))
            await until(lambda: len(b.decodes[0].seen) == 1)
            b.decodes[0].healthy = False
            answer = await asking
            assert answer.status == 502
            assert "unhealthy" in answer.error["message"]

    go(run())


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stage", ["before the head", "after the head", "mid-stream"])
def test_both_legs_are_cancelled_when_the_client_leaves(stage: str) -> None:
    decode = {
        "before the head": silent(),
        "after the head": silent(head=True),
        "mid-stream": streams(tokens(1000), gap_s=0.02),
    }[stage]

    async def run() -> None:
        async with bench(silent(), decode) as b:
            wire = await Wire.open(b.port)
            await wire.send(request("POST", "/generate", json.dumps(PROMPT).encode()))
            await until(lambda: len(b.decodes[0].seen) == len(b.prefills[0].seen) == 1)
            if stage == "mid-stream":
                await wire.reader.readuntil(b"t1")
            start = asyncio.get_running_loop().time()
            wire.abort()
            await until(lambda: b.decodes[0].num_left == b.prefills[0].num_left == 1)
            assert asyncio.get_running_loop().time() - start < 0.1
            await until(lambda: b.outcome("client_left") == 1)
            assert b.router.proxy.metrics.num_retries == 0

    go(run())


def test_a_burst_with_clients_leaving_at_random_leaves_nothing() -> None:
    import random

    rng = random.Random(7)

    async def one(b: Bench) -> None:
        wire = await Wire.open(b.port)
        await wire.send(
            request("POST", "/generate", json.dumps({**PROMPT, "stream": rng.random() < 0.7}).encode())
        )
        if rng.random() < 0.4:
            await asyncio.sleep(rng.random() * 0.05)
            wire.abort()
        else:
            assert (await wire.answer()).status in (200, 502)
            await wire.close()

    async def run() -> None:
        flaky = [completes(gap_s=0.005)] * 8 + [dies(after=2), dies(head=False)]

        async def decode(seen: Seen, line: Line) -> None:
            await rng.choice(flaky)(seen, line)

        async with bench([whole(200, {})] * 2, [decode, decode], circuit_failures=1000) as b:
            async with asyncio.TaskGroup() as group:
                for _ in range(300):
                    group.create_task(one(b))
            await until(lambda: b.router.proxy.num_active == 0)
            assert sum(b.router.proxy.metrics.outcomes.values()) == 300
            await until(lambda: b.router.server is not None and b.router.server.num_connections == 0)

    go(run(), within_s=60)


@pytest.mark.parametrize("dead", ["prefill", "decode"])
def test_while_one_half_is_down_the_other_answers_alone(dead: str) -> None:
    """Without a room; and as soon as the pair has proved itself again, both halves are asked as before."""

    async def run() -> None:
        async with bench(completes(), completes()) as b:
            victim, other = b.prefills[0], b.decodes[0]
            if dead == "decode":
                victim, other = other, victim
            await victim.die()
            await until(lambda: not b.router.fleet.ready)
            assert (await b.ask(PROMPT)).body == ALL_TOKENS
            assert not [name for name in other.seen[-1].body if name.startswith("bootstrap")]
            assert b.router.proxy.metrics.num_alone == 1
            await victim.rise()
            await until(lambda: b.router.fleet.ready)
            assert (await b.ask(PROMPT)).body == ALL_TOKENS
            assert other.seen[-1].body["bootstrap_room"] == victim.seen[-1].body["bootstrap_room"]
            assert b.router.proxy.metrics.num_alone == 1

    go(run())


@pytest.mark.parametrize("config", [{"alone": False}, {"engine": "sglang"}])
def test_where_halves_cannot_answer_alone_the_rest_is_told_to_wait(config: dict[str, Any]) -> None:
    async def run() -> None:
        async with bench(completes(), completes(), **config) as b:
            await b.prefills[0].die()
            await until(lambda: not b.router.fleet.ready)
            answer = await b.ask(PROMPT)
            assert (answer.status, answer.error["code"]) == (503, "overloaded")
            assert "retry-after" in answer.headers
            assert b.decodes[0].seen == []

    go(run())


# ---------------------------------------------------------------- room in the fleet


def test_max_requests() -> None:
    async def run() -> None:
        async with bench(whole(200, {}), silent(head=True), max_requests=2) as b:
            wires = [await Wire.open(b.port) for _ in range(2)]
            for wire in wires:
                await wire.send(request("POST", "/generate", json.dumps(PROMPT).encode()))
            await until(lambda: b.router.proxy.num_active == 2)
            answer = await b.ask(PROMPT)
            assert (answer.status, answer.error["code"]) == (503, "overloaded")
            assert answer.headers["retry-after"] == "1"
            for wire in wires:
                wire.abort()

    go(run())


def test_a_full_fleet_is_503_with_retry_after() -> None:
    async def run() -> None:
        async with bench(whole(200, {}), completes(), max_queued_tokens=1000) as b:
            b.prefills[0].load = {"num_reqs": 9, "num_waiting_reqs": 8, "queued_tokens": 4000}
            await until(lambda: b.router.fleet.get("prefill-0").load.queued_tokens == 4000)
            answer = await b.ask(PROMPT)
            assert answer.status == 503
            assert answer.headers["retry-after"] == "4"
            assert "prefill-0" in answer.error["message"]

    go(run())


def test_input_logprobs_of_sglangs_prefill_are_put_in_front() -> None:
    prefill = whole(200, {"text": "", "meta_info": {"input_token_logprobs": [[-1.0, 5, None]]}}, after_s=0.1)
    decode = whole(200, {"text": "x", "meta_info": {"input_token_logprobs": [], "completion_tokens": 1}})

    async def run() -> None:
        async with bench(prefill, decode) as b:
            answer = await b.ask({"text": "hi", "return_logprob": True}, "/generate")
            assert answer.json["meta_info"] == {
                "input_token_logprobs": [[-1.0, 5, None]],
                "completion_tokens": 1,
            }
            plain = await b.ask({"text": "hi"}, "/generate")
            assert plain.json["meta_info"]["input_token_logprobs"] == []

    go(run())
