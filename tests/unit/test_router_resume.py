"""Streams that break after the client has begun to read, and go on at another engine without a seam."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from splitserve.router.relay import MAX_RESUMED
from splitserve.router.trail import Trail
from tests.fake_workers import continues, error, one_by_one, streams, tokens, whole
from tests.unit.test_router_relay import ALL_TOKENS, PROMPT, bench, stream_error
from tests.wire_http import go

ENGINE_LOST = b'data: {"error":{"message":"its engine died","type":"server_error","code":"engine_lost"}}\n\n'
TOO_LATE = b'data: {"error":{"message":"too late","type":"server_error","code":"deadline_exceeded"}}\n\n'
TICKET = [(b"x-splitserve-resume", b'{"num_tokens":0}')]


@pytest.mark.parametrize("how", ["lost", "half an event", "an error event"])
def test_another_engine_goes_on_and_nothing_shows(how: str) -> None:
    async def run() -> None:
        breaks = continues(
            dies_after=2,
            half_event=how == "half an event",
            error=ENGINE_LOST if how == "an error event" else b"",
        )
        async with bench(whole(200, {}), [breaks, continues()]) as b:
            answer = await b.ask(PROMPT)
            assert answer.body == ALL_TOKENS
            assert answer.whole
            assert "x-splitserve-resume" not in answer.headers
            (first,), (second,) = b.decodes[0].seen, b.decodes[1].seen
            assert second.raw == b.prefills[0].seen[1].raw  # both halves compute from the same tokens
            again = second.body.pop("splitserve_resume")
            assert again == {
                "ticket": {"num_tokens": 0, "seed": 7, "answer_id": "a", "created": 1},
                "tokens": [0, 1],
            }
            assert "splitserve_resume" not in first.body
            assert first.body["bootstrap_room"] != second.body["bootstrap_room"]
            assert first.body["seed"] == second.body["seed"]
            assert b.outcome("ok") == 1
            assert b.router.proxy.metrics.num_resumed == 1

    go(run())


def test_the_same_engine_may_go_on_when_it_is_back() -> None:
    async def run() -> None:
        async with bench(whole(200, {}), one_by_one(continues(dies_after=1), continues())) as b:
            assert (await b.ask(PROMPT)).body == ALL_TOKENS

    go(run())


def test_it_waits_for_an_engine_that_is_not_back_yet() -> None:
    async def run() -> None:
        async with bench(whole(200, {}), continues(50, gap_s=0.02), resume_wait_s=5.0) as b:
            (decode,) = b.decodes
            asking = asyncio.create_task(b.ask(PROMPT))
            await asyncio.sleep(0.2)
            await decode.die()
            await asyncio.sleep(0.5)
            await decode.rise()
            assert (await asking).body == b"".join(tokens(50))

    go(run())


@pytest.mark.parametrize("how", ["refused", "an error event"])
def test_the_only_decode_engine_dies_and_prefill_goes_on_alone(how: str) -> None:
    """Known from the connection, or from what the dying engine says: no health check is due."""

    async def run() -> None:
        breaks = continues(50, gap_s=0.01)
        if how == "an error event":
            breaks = continues(50, dies_after=5, error=ENGINE_LOST)
        async with bench(continues(50), breaks, health_interval_s=20.0) as b:
            asking = asyncio.create_task(b.ask(PROMPT))
            if how == "refused":
                await asyncio.sleep(0.2)
                await b.decodes[0].die()
            answer = await asking
            assert answer.body == b"".join(tokens(50))
            again = b.prefills[0].seen[-1].body
            assert again["splitserve_resume"]["tokens"]
            assert "bootstrap_room" not in again
            metrics = b.router.proxy.metrics
            assert (metrics.num_resumed, metrics.num_alone) == (1, 1)

    go(run())


def test_nobody_there_is_a_typed_error_within_a_second() -> None:
    async def run() -> None:
        async with bench(whole(200, {}), continues(500, gap_s=0.01)) as b:
            asking = asyncio.create_task(b.ask(PROMPT))
            await asyncio.sleep(0.2)
            now = asyncio.get_running_loop().time
            begun = now()
            await b.decodes[0].die()
            assert stream_error(await asking)["code"] == "peer_lost"
            assert now() - begun < 1.0

    go(run())


def test_unified_engines_go_on_too() -> None:
    async def run() -> None:
        async with bench([], [continues(dies_after=3), continues()], unified=True) as b:
            assert (await b.ask(PROMPT)).body == ALL_TOKENS
            assert "bootstrap_room" not in b.decodes[1].seen[0].body

    go(run())


@pytest.mark.parametrize(
    "other", [streams(tokens(4)), whole(200, {"text": "anew"}), error(400, "invalid_request")]
)
def test_an_engine_that_would_begin_anew_is_not_believed(other: object) -> None:
    async def run() -> None:
        async with bench(whole(200, {}), [continues(dies_after=2), other]) as b:  # type: ignore[list-item]
            answer = await b.ask(PROMPT)
            stream_error(answer)
            assert answer.body.startswith(b"".join(tokens(2)[:2]) + b'data: {"error"')
            assert answer.body.count(b" t0") == 1

    go(run())


def test_a_passed_deadline_is_told_in_the_engines_own_words() -> None:
    async def run() -> None:
        async with bench(whole(200, {}), [continues(dies_after=2, error=TOO_LATE), continues()]) as b:
            told = stream_error(await b.ask(PROMPT))
            assert (told["code"], told["message"]) == ("deadline_exceeded", "too late")
            assert not b.decodes[1].seen

    go(run())


def test_a_request_that_kills_every_engine_ends() -> None:
    async def run() -> None:
        deadly = [continues(40, dies_after=i + 1) for i in range(6)]
        async with bench(whole(200, {}), one_by_one(*deadly), circuit_failures=100) as b:
            stream_error(await b.ask(PROMPT))
            assert len(b.decodes[0].seen) == 1 + MAX_RESUMED

    go(run())


def test_a_clients_own_field_is_dropped() -> None:
    async def run() -> None:
        async with bench(whole(200, {}), continues()) as b:
            body = {**PROMPT, "splitserve_resume": {"tokens": [1, 2]}}
            assert (await b.ask(body)).body == ALL_TOKENS
            assert "splitserve_resume" not in b.decodes[0].seen[0].body

    go(run())


def test_events_pass_whole_wherever_the_bytes_are_cut() -> None:
    rng = random.Random(3)
    sent = (
        b"".join(b":%d,%d\n" % (i, i + 100) + event for i, event in enumerate(tokens(30)[:-1])) + tokens(0)[0]
    )
    for _ in range(200):
        cuts = sorted(rng.sample(range(len(sent)), 12))
        trail = Trail.of(TICKET)
        assert trail is not None
        out = [trail.take(sent[a:b]) for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
        assert all(piece.endswith(b"\n\n") for piece in out if piece)
        assert b"".join(out) == b"".join(tokens(30))
        assert trail.num_tokens == 60
    assert trail.continues([(b"X-Splitserve-Resume", b'{"num_tokens":60}')])
    assert not trail.continues(TICKET)
    assert not trail.continues([])
    field = json.loads(b"{" + trail.field()[:-1] + b"}")["splitserve_resume"]
    assert field["tokens"] == [t for i in range(30) for t in (i, i + 100)]
