"""Heads that were parsed before: they save the parser, and change nothing that anybody can see."""

from __future__ import annotations

import random

import pytest

from splitserve.net import known
from splitserve.net.client import Client
from splitserve.net.http import Request, Responder
from splitserve.net.known import MAX_HEADS, KnownHeads, plain_size
from tests.unit.test_net_http import served
from tests.wire_http import Wire, go


def echo(req: Request, res: Responder) -> None:
    told = {
        "method": req.method,
        "target": req.target.decode(),
        "headers": req.headers,
        "body": req.body.decode(),
    }
    res.send_json(200, told)


@pytest.mark.parametrize(
    ("headers", "size"),
    [
        ([], 0),
        ([(b"Content-Length", b"5"), (b"Host", b"x")], 5),
        ([(b"connection", b"Keep-Alive")], 0),
        ([(b"content-length", b"5"), (b"content-length", b"5")], None),
        ([(b"content-length", b"+5")], None),
        ([(b"transfer-encoding", b"chunked")], None),
        ([(b"connection", b"close")], None),
        ([(b"connection", b"upgrade"), (b"upgrade", b"h2c")], None),
        ([(b"expect", b"100-continue")], None),
    ],
)
def test_only_plain_framing_is_remembered(headers: list[tuple[bytes, bytes]], size: int | None) -> None:
    assert plain_size(headers) == size


def test_a_known_head_needs_its_whole_body_and_no_more() -> None:
    heads: KnownHeads[str] = KnownHeads()
    head = b"POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\n"
    heads.learn(head + b"abc", [(b"content-length", b"3")], "post")
    assert heads.whole(head + b"xyz") == ("post", b"xyz")
    for other in (head, head + b"ab", head + b"abcd", head[:-1], b"", b"x" * 10_000):
        assert heads.whole(other) is None
    heads.learn(head + b"ab", [(b"content-length", b"3")], "half")
    assert heads.whole(head + b"xyz") == ("post", b"xyz")


def test_heads_that_are_never_the_same_do_not_grow() -> None:
    heads: KnownHeads[int] = KnownHeads()
    for i in range(3 * MAX_HEADS):
        heads.learn(b"GET /%d HTTP/1.1\r\n\r\n" % i, [], i)
    assert len(heads._found) <= MAX_HEADS


def test_answers_are_those_of_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same requests, in segments cut anywhere, with and without a memory for heads."""
    rng = random.Random(5)
    heads = [
        b"POST /a HTTP/1.1\r\nHost: x\r\nX: 1\r\nContent-Length: %d\r\n\r\n",
        b"PUT /b?c=d HTTP/1.1\r\nhost: x\r\nconnection: keep-alive\r\ncontent-length: %d\r\n\r\n",
        b"POST /c HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"GET /d HTTP/1.1\r\nhost: x\r\n\r\n",
    ]
    asks = []
    for _ in range(60):
        head, body = rng.choice(heads), b"b" * rng.choice((0, 1, 2, 300))
        asks.append(head % len(body) + body if b"%d" in head else head)
    cuts = [rng.choice((None, None, None, 5)) for _ in asks]

    async def run() -> list[bytes]:
        found = []
        async with served(echo) as server, await Wire.open(server.port) as wire:
            for sent, cut in zip(asks, cuts, strict=True):
                await wire.send(sent[:cut])
                if cut is not None:
                    await wire.send(sent[cut:])
                found.append((await wire.answer()).body)
        return found

    remembered = go(run())
    monkeypatch.setattr(known, "MAX_HEAD_BYTES", 0)  # nothing is ever known
    assert go(run()) == remembered


def test_a_client_reads_the_same_answers_again_and_again() -> None:
    async def run() -> None:
        async with served(echo) as server, Client() as client:
            for i in range(30):
                body = b"y" * (i % 3)
                told = await client.request("POST", f"http://127.0.0.1:{server.port}/p", body=body)
                assert told.json["body"] == body.decode()
                assert told.headers["content-type"] == "application/json"

    go(run())
