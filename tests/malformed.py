"""Requests that are wrong, from a seed: bytes, heads, chunked framing, JSON shapes and field types.

Each is (bytes, complete): a request that is not complete has no answer before the server's patience ends.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from splitserve.server.openai import ChatBody, CompletionBody
from splitserve.server.operator import DetokenizeBody, TokenizeBody
from splitserve.server.sglang import GenerateBody, SglangSampling

Case = tuple[bytes, bool]

GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 3}},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [72, 105]},
}
FIELDS = {
    "/v1/chat/completions": ChatBody.__struct_fields__,
    "/v1/completions": CompletionBody.__struct_fields__,
    "/generate": GenerateBody.__struct_fields__,
    "/tokenize": TokenizeBody.__struct_fields__,
    "/detokenize": DetokenizeBody.__struct_fields__,
}
OTHER_PATHS = (
    "/v1/models", "/health", "/get_load", "/server_info", "/flush_cache", "/abort_request", "/openapi.json",
    "/metrics", "/nowhere", "/v1/", "//", "/%00", "/v1/completions/../models", "/generate?x=1&x=%ff", "*", "",
)  # fmt: skip
JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 2**31, 2**63, 2**64, -(2**63) - 1, 10**40, 0.5, -0.0, 1e308, -1e-320, "", "x",
    "\x00", "\ud800", "é" * 300, "1", "NaN", "null", [], [[]], [None], [1, "x"], [1, 2, 3], [-1], [2**70], [[1], [2]],
    ["a", "b"], [["a"]], {}, {"a": {"b": [1]}}, {"type": "json_object"}, {"type": "text"}, {"": ""}, {"1": 5},
)  # fmt: skip


def case(rng: random.Random) -> Case:
    """The next wrong request."""
    kinds: tuple[tuple[Callable[[random.Random], Case], int], ...] = (
        (_fields, 50),
        (_json_text, 15),
        (_head, 15),
        (_chunks, 12),
        (_bytes, 5),
        (_pipelined, 3),
    )
    make = rng.choices([k for k, _ in kinds], [w for _, w in kinds])[0]
    return make(rng)


def _fields(rng: random.Random) -> Case:
    """A good body with some fields replaced, added or taken out."""
    path = rng.choice(list(GOOD))
    body = dict(GOOD[path])
    for _ in range(rng.randrange(1, 4)):
        name = rng.choice(FIELDS[path]) if rng.random() < 0.9 else rng.choice(("x", "", "\x00", "é"))
        body[name] = rng.choice(JUNK)
    if path == "/generate" and rng.random() < 0.5:
        body["sampling_params"] = {rng.choice(SglangSampling.__struct_fields__): rng.choice(JUNK)}
    if path == "/v1/chat/completions" and rng.random() < 0.3:
        message = {rng.choice(("role", "content", "name", "tool_calls")): rng.choice(JUNK)}
        body["messages"] = [{"role": "user", "content": "Hi", **message}]
    if rng.random() < 0.1:
        body.pop(rng.choice(list(body)))
    return _post(path, json.dumps(body).encode()), True


def _json_text(rng: random.Random) -> Case:
    """Bodies that are no JSON object, or only just."""
    good = json.dumps(GOOD["/v1/completions"]).encode()
    cut = rng.randrange(len(good))
    body = rng.choice(
        (
            good[:cut],
            good[:cut] + bytes([rng.randrange(256)]) + good[cut + 1 :],
            good + b"}",
            good * 2,
            b"[" * rng.choice((10, 1000, 100_000)),
            b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}",
            b'{"a":' * 2000 + b"1" + b"}" * 2000,
            b"null", b"1", b'"x"', b"[]", b"{}", b"", b" ", b"\xef\xbb\xbf" + good, b"\x00", b"\xff\xfe{}",
            b'{"prompt":"\xc3\x28"}', b'{"prompt":"\\ud800"}', b'{"prompt":"a","prompt":"b","max_tokens":1}',
            b'{"prompt":"a","temperature":NaN}', b'{"prompt":"a","temperature":1e999}',
            b'{"prompt":"a","max_tokens":' + b"9" * 5000 + b"}", b'{"prompt":"a","stop":[' + b'"x",' * 3000 + b'"x"]}',
            b'{"prompt":"' + b"a" * 100_000 + b'"}', b'{"prompt":[' + b"1," * 50_000 + b"1]}",
            b"{'prompt':'a'}", b'{"prompt":"a",}', b'{"prompt":"a"/**/}',
        )
    )  # fmt: skip
    return _post(rng.choice(list(GOOD)), body), True


def _head(rng: random.Random) -> Case:
    """Request lines and headers that are wrong, ambiguous or too large; the body fits them if it can."""
    body = b'{"prompt":"Hi","max_tokens":1}'
    method = rng.choice(
        (b"POST", b"GET", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"TRACE", b"post", b"P\x00ST", b"X" * 300)
    )
    target = rng.choice((*GOOD, *OTHER_PATHS)).encode() + rng.choice(
        (b"", b"", b"#a", b"?" + b"q" * 9000, b"\x80")
    )
    version = rng.choice(
        (b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.1 x", b"")
    )
    lengths = rng.choice(
        (
            b"content-length: %d\r\n" % len(body),
            b"content-length: %d\r\ncontent-length: %d\r\n" % (len(body), len(body) + 1),
            b"content-length: -1\r\n", b"content-length: +5\r\n", b"content-length: 0x5\r\n", b"content-length: \r\n",
            b"content-length: 99999999999999999999\r\n", b"content-length: %d\r\n" % (1 << 33), b"content-length: 5, 5\r\n",
            b"content-length: 5\r\ntransfer-encoding: chunked\r\n", b"transfer-encoding: gzip\r\n",
            b"transfer-encoding: chunked, identity\r\n", b"transfer-encoding : chunked\r\n", b"",
        )
    )  # fmt: skip
    extra = rng.choice(
        (
            b"", b"", b"no colon\r\n", b": empty\r\n", b"x: \x00\r\n", b"x: a\r\n folded\r\n", b"x\x80: y\r\n", b"x y: z\r\n",
            b"x: " + b"a" * 40_000 + b"\r\n", b"x: y\r\n" * 2000, b"expect: 100-continue\r\n", b"upgrade: websocket\r\n",
            b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\n", b"authorization: Bearer \xff\r\n", b"x: y\n",
            b"content-encoding: gzip\r\n", b"host: a\r\nhost: b\r\n", b"x-request-id: " + b"\xe9" * 600 + b"\r\n",
        )
    )  # fmt: skip
    end = rng.choice((b"\r\n", b"\r\n", b"\n", b""))
    sent = b"%s %s %s\r\nhost: x\r\n%s%s%s%s" % (method, target, version, lengths, extra, end, body)
    return sent, False


def _chunks(rng: random.Random) -> Case:
    """Chunked bodies: wrong sizes, floods, trailers, ends that never come."""
    body = b'{"prompt":"Hi","max_tokens":1}'
    good = b"%x\r\n%s\r\n" % (len(body), body)
    sent = rng.choice(
        (
            good + b"0\r\n\r\n",
            b"".join(b"1\r\n%c\r\n" % c for c in body) + b"0\r\n\r\n",
            good + b"0\r\n" + b"trailer: x\r\n" * rng.choice((1, 3000)) + b"\r\n",
            b"1;" + b"e" * 40_000 + b"\r\nx\r\n0\r\n\r\n",
            b"".join(b"1;ext=%030d\r\n \r\n" % i for i in range(3000)) + good + b"0\r\n\r\n",
            b"-1\r\nx\r\n0\r\n\r\n", b"g\r\nx\r\n0\r\n\r\n", b"ffffffffffffffffff\r\nx", b"7fffffffffffffff\r\nx",
            b"\r\n\r\n", b"5\r\nabc\r\n0\r\n\r\n", b"3\r\nabcdef\r\n0\r\n\r\n", b"0x3\r\nabc\r\n0\r\n\r\n", b" 3\r\nabc\r\n0\r\n\r\n",
            good, good + b"0\r\n", b"1e\r\n", b"0\r\n\r\n", b"00000000000000000000003\r\n{} \r\n0\r\n\r\n", b"3\n{} \n0\n\n",
            good + b"0\r\n\r\nGARBAGE\r\n\r\n",
        )
    )  # fmt: skip
    return b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n%s" % (
        rng.choice(list(GOOD)).encode(),
        sent,
    ), False


def _bytes(rng: random.Random) -> Case:
    """No HTTP at all, another protocol's greeting, or a good request with bytes flipped."""
    good = bytearray(_post("/v1/completions", json.dumps(GOOD["/v1/completions"]).encode()))
    for _ in range(rng.randrange(1, 6)):
        good[rng.randrange(len(good))] = rng.randrange(256)
    return rng.choice(
        (
            bytes(good),
            rng.randbytes(rng.choice((1, 10, 1000, 70_000))),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),
            b"SSH-2.0-x\r\n", b"\r\n" * 5000, b"\x00" * 100, b"GET / HTTP/1.1", b"",
        )
    ), False  # fmt: skip


def _pipelined(rng: random.Random) -> Case:
    """Several requests at once on one connection, good and bad, sometimes more than may be held."""
    parts = [_fields(rng)[0].replace(b"connection: close\r\n", b"") for _ in range(rng.choice((2, 5, 80)))]
    if rng.random() < 0.5:
        parts.insert(rng.randrange(len(parts)), _bytes(rng)[0])
    return b"".join(parts), False


def _post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body
