"""A stream that stops anywhere and goes on at another server is the stream of one server, byte for byte."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest

from splitserve.types import Role
from tests.fake_engine import say
from tests.unit.test_server_http import CHAT, MEET, bench, model_dir  # noqa: F401

OURS = "x-splitserve-router: 1\r\n"
TEXT = "naïve ##\u20ac# words## hidden"  # characters of several bytes, and half stops on the way to the stop
SAMPLING = {"stop": ["##!", "# w"], "seed": 5, "max_tokens": 40}

ASKS = {
    "chat": ("/v1/chat/completions", {**CHAT, **SAMPLING, "stream_options": {"include_usage": True}}),
    "completions": ("/v1/completions", {"prompt": "Hi", "echo": True, **SAMPLING}),
    "length": ("/v1/completions", {"prompt": [72, 105], "max_tokens": 12, "rid": "mine"}),
    "generate": ("/generate", {"text": "Hi", "sampling_params": {"max_new_tokens": 40, "stop": ["# w"]}}),
}


async def stream(
    b: Any, path: str, body: dict[str, Any]
) -> tuple[dict[str, Any] | None, list[str], list[str]]:
    """(ticket, the token ids told before each event, events with what differs from run to run taken out)."""
    status, head, raw = await b.call("POST", path, {**body, "stream": True}, headers=OURS)
    assert status == 200, raw
    ids, events = [], []
    for block in raw.decode().split("\n\n")[:-1]:
        comment, _, event = block.rpartition("\n")
        ids.append(comment.removeprefix(":"))
        events.append(re.sub(r'"e2e_latency":[0-9.e-]+', "", event))
    assert events[-1] == "data: [DONE]"
    ticket = head.get("x-splitserve-resume")
    return (json.loads(ticket) if ticket else None), ids, events


@pytest.mark.parametrize("name", ASKS)
def test_going_on_after_any_event_gives_the_same_events(bench, name):  # noqa: F811
    path, ask = ASKS[name]

    async def body(b) -> None:
        ticket, ids, events = await stream(b, path, ask)
        assert ticket is not None
        assert ticket["num_tokens"] == 0
        shown = [t for t in ids if t]
        assert len(shown) > 3
        for stop in range(1, len(shown)):
            emitted = [int(t) for told in ids[:stop] for t in told.split(",") if t]
            more = {"splitserve_resume": {"ticket": ticket, "tokens": emitted}}
            again, _, rest = await stream(b, path, {**ask, **more})
            assert again == {**ticket, "num_tokens": len(emitted)}
            if name == "generate":  # events say all that came so far: tokens that came together are one
                assert rest[-2:] == events[-2:], f"after {stop} events"
                texts = [json.loads(e[6:].replace(",}", "}"))["text"] for e in [events[stop - 1], *rest[:-1]]]
                assert all(after.startswith(before) for before, after in pairwise(texts))
            else:
                assert rest == events[stop:], f"after {stop} events"
            sent = b.engine.generates[-1]
            assert sent.tokens[sent.num_prompt :] == emitted
            assert sent.sampling == b.engine.generates[0].sampling
        await b.quiet()

    bench(say(TEXT), body)


def test_prefill_takes_the_tokens_along(bench):  # noqa: F811
    async def body(b) -> None:
        ticket = {"num_tokens": 0, "seed": 9, "answer_id": "x", "created": 1}
        more = {"splitserve_resume": {"ticket": ticket, "tokens": [65, 66]}, **MEET}
        again, ids, _ = await stream(b, "/generate", {"text": "Hi", **more})
        assert again is None  # nobody continues prefill's answer
        assert not any(ids)
        sent = b.engine.generates[0]
        assert (sent.tokens, sent.num_prompt, sent.half) == ([72, 105, 65, 66], 2, "prefill")
        assert sent.sampling.seed == 9

    bench(say("ABCD"), body, role=Role.PREFILL)


@pytest.mark.parametrize(
    "more",
    [{"n": 2}, {"logprobs": 1}, {"max_tokens": 0}, {"prompt": ["a", "b"]}],
    ids=lambda m: next(iter(m)),
)
def test_some_streams_cannot_go_on_elsewhere(bench, more):  # noqa: F811
    async def body(b) -> None:
        ticket, ids, _ = await stream(b, "/v1/completions", {"prompt": "Hi", **more})
        assert ticket is None
        assert not any(ids)

    bench(say("abc"), body)


@pytest.mark.parametrize(
    ("tokens", "more", "headers"),
    [
        ([65], {}, ""),  # not from our router
        ([65, 66, 67], {}, OURS),  # as many as may be emitted
        ([9999], {}, OURS),
        (["A"], {}, OURS),
        ([65], {"n": 2}, OURS),
        ([35, 35], {"stop": "##"}, OURS),  # complete
        (None, {}, OURS),
    ],
)
def test_what_cannot_be_continued_is_refused(bench, tokens, more, headers):  # noqa: F811
    ticket = {"num_tokens": 0, "seed": 9, "answer_id": "x", "created": 1}
    resume = {"ticket": ticket, "tokens": tokens}

    async def body(b) -> None:
        ask = {"prompt": "Hi", "max_tokens": 3, "stream": True, "splitserve_resume": resume, **more}
        status, _, raw = await b.call("POST", "/v1/completions", ask, headers=headers)
        assert status == 400, raw
        assert json.loads(raw)["error"]["param"].startswith("splitserve_resume")

    bench(say("abc"), body)


def test_others_see_nothing_of_it(bench):  # noqa: F811
    async def body(b) -> None:
        status, head, raw = await b.call("POST", "/v1/completions", {"prompt": "Hi", "stream": True})
        assert status == 200
        assert "x-splitserve-resume" not in head
        assert all(line.startswith(b"data: ") for line in raw.split(b"\n\n")[:-1])

    bench(say("abc"), body)
