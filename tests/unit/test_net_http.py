"""The HTTP server: what it accepts, what it refuses and how, and that nothing of a client survives it."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from splitserve.errors import Overloaded, PortTaken, RequestError
from splitserve.net.http import App, HttpServer, Limits, Request, Responder, serve
from tests.wire_http import Answer, Wire, ask, go, request, until


@asynccontextmanager
async def served(app: App, **limits: float) -> AsyncIterator[HttpServer]:
    server = await serve(app, host="127.0.0.1", port=0, limits=Limits(**limits))  # type: ignore[arg-type]
    try:
        yield server
    finally:
        await server.close()
        assert server.num_connections == 0


def echo(req: Request, res: Responder) -> None:
    told = {"method": req.method, "path": req.path, "query": req.query, "body": req.body.decode("latin-1")}
    res.send_json(200, {**told, "x": req.headers.get("x", "")})


async def stream(req: Request, res: Responder) -> None:
    res.start_stream()
    for i in range(3):
        res.write(b"data: %d\n\n" % i)
        await res.drain()
    res.end(b"data: [DONE]\n\n")


# ---------------------------------------------------------------- answers


def test_echo_with_query_and_body() -> None:
    async def run() -> Answer:
        async with served(echo) as server:
            return await ask(server.port, "POST", "/a%20b?x=1&y=%C3%A9", b"hello", "X: one\r\nx: two\r\n")

    answer = go(run())
    assert answer.status == 200
    assert answer.json == {
        "method": "POST",
        "path": "/a b",
        "query": {"x": "1", "y": "é"},
        "body": "hello",
        "x": "one, two",
    }


def test_absolute_target_is_its_path() -> None:
    async def run() -> Answer:
        async with served(echo) as server:
            return await ask(server.port, "GET", "http://elsewhere:1/a?b=c")

    assert go(run()).json["path"] == "/a"


def test_stream_is_chunked_and_the_connection_lives_on() -> None:
    async def run() -> list[Answer]:
        async with served(stream) as server, await Wire.open(server.port) as wire:
            answers = []
            for _ in range(2):
                await wire.send(request("POST", "/", b"{}"))
                answers.append(await wire.answer())
            return answers

    for answer in go(run()):
        assert answer.headers["transfer-encoding"] == "chunked"
        assert answer.body == b"data: 0\n\ndata: 1\n\ndata: 2\n\ndata: [DONE]\n\n"


def test_http_1_0_gets_no_chunks() -> None:
    async def run() -> Answer:
        async with served(stream) as server, await Wire.open(server.port) as wire:
            await wire.send(b"GET / HTTP/1.0\r\n\r\n")
            answer = await wire.answer()
            assert await wire.ended() == b""
            return answer

    answer = go(run())
    assert "transfer-encoding" not in answer.headers
    assert answer.body.endswith(b"[DONE]\n\n")


def test_head_has_length_but_no_body() -> None:
    async def run() -> bytes:
        async with served(echo) as server, await Wire.open(server.port) as wire:
            await wire.send(request("HEAD", "/", headers="connection: close\r\n"))
            return await wire.ended()

    head, _, body = go(run()).partition(b"\r\n\r\n")
    assert b"content-length: " in head
    assert body == b""


def test_pipelined_requests_are_answered_in_order_one_at_a_time() -> None:
    running = 0

    async def slow(req: Request, res: Responder) -> None:
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(0.001 * (5 - int(req.path[1:]) % 5))
        running -= 1
        res.send_json(200, int(req.path[1:]))

    async def run() -> list[int]:
        async with served(slow) as server, await Wire.open(server.port) as wire:
            for i in range(10):
                await wire.send(request("POST", f"/{i}", b"x" * i))
            await wire.send(b"".join(request("GET", f"/{i}") for i in range(10, 20)))
            return [(await wire.answer()).json for _ in range(20)]

    assert go(run()) == list(range(20))


def test_expect_100_continue() -> None:
    async def run() -> list[int]:
        async with served(echo) as server, await Wire.open(server.port) as wire:
            await wire.send(request("POST", "/", headers="content-length: 2\r\nexpect: 100-continue\r\n"))
            first = await wire.answer()
            await wire.send(b"ok")
            return [first.status, (await wire.answer()).status]

    assert go(run()) == [100, 200]


def test_upgrade_offer_is_ignored_and_the_body_is_not_lost() -> None:
    """Java's client offers h2c on its first request; the parser alone would take the body for another request."""

    async def run() -> list[Answer]:
        offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
        async with served(echo) as server, await Wire.open(server.port) as wire:
            await wire.send(request("POST", "/first", b"GET /smuggled HTTP/1.1\r\n\r\n", offer))
            first = await wire.answer()
            await wire.send(request("GET", "/second"))
            return [first, await wire.answer()]

    first, second = go(run())
    assert first.json["body"] == "GET /smuggled HTTP/1.1\r\n\r\n"
    assert second.json["path"] == "/second"


def test_trailers_do_not_become_headers() -> None:
    async def run() -> Answer:
        async with served(echo) as server, await Wire.open(server.port) as wire:
            head = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
            await wire.send(head + b"3\r\nabc\r\n0\r\nx: forged\r\n\r\n")
            return await wire.answer()

    answer = go(run())
    assert answer.json["body"] == "abc"
    assert answer.json["x"] == ""


# ---------------------------------------------------------------- errors of the app


def test_an_error_of_the_tree_is_the_answer() -> None:
    async def app(req: Request, res: Responder) -> None:
        raise RequestError("temperature is -1", field="temperature", fix="use 0 or more")

    async def run() -> Answer:
        async with served(app) as server:
            return await ask(server.port, "POST", "/", b"{}")

    answer = go(run())
    assert answer.status == 400
    assert answer.error["param"] == "temperature"
    assert answer.error["fix"] == "use 0 or more"


def test_overloaded_says_when_to_come_again() -> None:
    def app(req: Request, res: Responder) -> None:
        raise Overloaded("full", retry_after_s=2.3)

    async def run() -> Answer:
        async with served(app) as server:
            return await ask(server.port, "GET", "/")

    answer = go(run())
    assert (answer.status, answer.headers["retry-after"]) == (503, "3")


@pytest.mark.parametrize("late", [False, True])
def test_a_bug_is_a_500_without_details(late: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def app(req: Request, res: Responder) -> None:
        if late:
            res.start_stream()
            res.write(b"half")
        raise ValueError("the secret")

    async def run() -> Answer:
        async with served(app) as server:
            return await ask(server.port, "GET", "/")

    with caplog.at_level(logging.ERROR):
        answer = go(run())
    if late:
        assert not answer.whole  # cut: nothing honest can follow
    else:
        assert answer.status == 500
        assert answer.error["code"] == "internal_error"
    assert b"secret" not in answer.body
    assert "the secret" in caplog.text


def test_an_app_that_answers_nothing_is_a_bug() -> None:
    async def app(req: Request, res: Responder) -> None:
        return None

    async def run() -> Answer:
        async with served(app) as server:
            return await ask(server.port, "GET", "/")

    assert go(run()).status == 500


def test_header_injection_is_refused() -> None:
    def app(req: Request, res: Responder) -> None:
        res.send_json(200, {}, [("x", "a\r\nset-cookie: b")])

    async def run() -> Answer:
        async with served(app) as server:
            return await ask(server.port, "GET", "/")

    answer = go(run())
    assert answer.status == 500
    assert "set-cookie" not in answer.headers


# ---------------------------------------------------------------- limits


REFUSED = {
    "head too long": (b"GET / HTTP/1.1\r\nx: " + b"y" * 5000 + b"\r\n\r\n", 431, "head_too_large"),
    "head never ends": (b"GET / HTTP/1.1\r\nx: " + b"y" * 5000, 431, "head_too_large"),
    "target too long": (b"GET /" + b"y" * 5000, 431, "head_too_large"),
    "body announced too long": (b"POST / HTTP/1.1\r\ncontent-length: 10001\r\n\r\n", 413, "body_too_large"),
    "chunks too long": (
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
        + b"1000\r\n"
        + b"z" * 4096
        + b"\r\n" * 1
        + b"1000\r\n"
        + b"z" * 4096
        + b"\r\n1000\r\n"
        + b"z" * 4096
        + b"\r\n",
        413,
        "body_too_large",
    ),
    "chunk extensions without end": (
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n",
        400,
        "invalid_request",
    ),
    "length twice": (
        b"POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        400,
        "invalid_request",
    ),
    "length and chunks": (
        b"POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        400,
        "invalid_request",
    ),
    "absurd length": (
        b"POST / HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        400,
        "invalid_request",
    ),
    "negative length": (b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400, "invalid_request"),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00", 400, "invalid_request"),
    "HTTP/0.9": (b"GET /\r\n\r\n", 400, "invalid_request"),
    "HTTP/2 in words": (b"GET / HTTP/2.0\r\n\r\n", 400, "invalid_request"),
    "CONNECT": (b"CONNECT a:1 HTTP/1.1\r\n\r\n", 400, "invalid_request"),
    "folded header": (b"GET / HTTP/1.1\r\na: b\r\n c\r\n\r\n", 400, "invalid_request"),
    "too many in one go": (b"GET / HTTP/1.1\r\n\r\n" * 100, 400, "invalid_request"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_type_and_a_close(case: str) -> None:
    data, status, code = REFUSED[case]

    async def run() -> list[Answer]:
        async with served(echo, max_head_bytes=4096, max_body_bytes=10_000) as server:
            async with await Wire.open(server.port) as wire:
                await wire.send(data)
                if case == "chunk extensions without end":
                    for _ in range(
                        8
                    ):  # what shares a segment with the head is not counted: nothing is kept of it
                        await wire.send(b"1;" + b"e" * 60_000 + b"\r\na\r\n")
                answers = []
                while not answers or answers[-1].status == 200:
                    answers.append(await wire.answer())
                await wire.ended()
            assert (await ask(server.port, "GET", "/")).status == 200  # the server is unharmed
            return answers

    *earlier, answer = go(run())
    assert answer.status == status
    assert answer.error["code"] == code
    assert answer.headers["connection"] == "close"
    assert len(earlier) == (64 if case == "too many in one go" else 0)


@pytest.mark.parametrize("part", ["head", "body"])
def test_slow_loris(part: str) -> None:
    """A byte now and then does not keep a connection: the time is for the whole of it."""

    async def run() -> Answer:
        begun = b"POST / HTTP/1.1\r\n" + (b"content-length: 1000\r\n\r\n" if part == "body" else b"")
        limits = {"head_timeout_s": 0.3, "body_timeout_s": 0.3}
        async with served(echo, **limits) as server, await Wire.open(server.port) as wire:
            await wire.send(begun)
            drip = asyncio.create_task(_drip(wire))
            answer = await asyncio.wait_for(wire.answer(), 3)
            drip.cancel()
            return answer

    answer = go(run())
    assert answer.status == 400
    assert answer.error["code"] == "request_timeout"
    assert part in answer.error["message"]


async def _drip(wire: Wire) -> None:
    while True:
        await wire.send(b"x")
        await asyncio.sleep(0.02)


def test_idle_connection_is_closed_without_a_word() -> None:
    async def run() -> bytes:
        async with served(echo, idle_timeout_s=0.2) as server, await Wire.open(server.port) as wire:
            await wire.send(request("GET", "/"))
            await wire.answer()
            return await wire.ended(within_s=3)

    assert go(run()) == b""


def test_slow_request_does_not_count_as_idle() -> None:
    async def app(req: Request, res: Responder) -> None:
        await asyncio.sleep(0.5)
        res.send_json(200, {})

    async def run() -> int:
        async with served(app, idle_timeout_s=0.1, head_timeout_s=0.1, body_timeout_s=0.1) as server:
            return (await ask(server.port, "POST", "/", b"{}")).status

    assert go(run()) == 200


def test_a_client_that_reads_nothing_is_cut_off() -> None:
    done = asyncio.Event()

    async def flood(req: Request, res: Responder) -> None:
        res.start_stream()
        while not res.gone:
            res.write(b"x" * 65536)
            await res.drain()
        done.set()

    async def run() -> None:
        async with served(flood, write_timeout_s=0.3) as server:
            wire = await Wire.open(server.port)
            wire.reader._transport.pause_reading()  # type: ignore[attr-defined]
            await wire.send(request("GET", "/"))
            await asyncio.wait_for(done.wait(), 5)
            wire.abort()

    go(run())


def test_connections_are_bounded_and_idle_ones_make_room() -> None:
    """1,500 idle connections against a limit of 50: new clients are served all the same."""

    async def run() -> None:
        async with served(echo, max_connections=50) as server:
            wires = []
            for _ in range(1500):
                wires.append(await Wire.open(server.port))
                assert server.num_connections <= 50
            assert (await ask(server.port, "GET", "/")).status == 200
            for wire in wires:
                wire.abort()

    go(run())


def test_full_of_busy_connections_is_503() -> None:
    release = asyncio.Event()

    async def app(req: Request, res: Responder) -> None:
        await release.wait()
        res.send_json(200, {})

    async def run() -> Answer:
        async with served(app, max_connections=3) as server:
            wires = [await Wire.open(server.port) for _ in range(3)]
            for wire in wires:
                await wire.send(request("GET", "/"))
            await until(lambda: server.num_busy == 3)
            async with await Wire.open(server.port) as late:
                refused = await late.answer()
            release.set()
            for wire in wires:
                assert (await wire.answer()).status == 200
                wire.abort()
            return refused

    refused = go(run())
    assert refused.status == 503
    assert refused.error["code"] == "overloaded"


def test_50_mb_body_is_refused_and_a_client_that_reads_late_can_read_why() -> None:
    """Most clients send the whole body before they read. A plain close would reset the connection under the answer."""

    def blocking(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(b"POST / HTTP/1.1\r\ncontent-length: 52428800\r\n\r\n")
            for _ in range(800):
                sock.sendall(b"x" * 65536)
            return sock.recv(65536)

    async def run() -> bytes:
        async with served(echo) as server:
            return await asyncio.to_thread(blocking, server.port)

    answer = go(run())
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"52428800" in answer


def test_what_comes_during_a_request_is_bounded() -> None:
    """30 MB sent behind a request that is being answered stay with the client."""
    release = asyncio.Event()

    async def app(req: Request, res: Responder) -> None:
        await release.wait()
        res.send_json(200, {})

    async def run() -> None:
        async with served(app) as server, await Wire.open(server.port) as wire:
            wire.writer.write(request("GET", "/"))
            await until(lambda: server.num_busy == 1)
            wire.writer.write(b"\0" * (30 << 20))
            buffered = wire.writer.transport.get_write_buffer_size
            before = -1
            while before != buffered():
                before = buffered()
                await asyncio.sleep(0.1)
            assert buffered() > 10 << 20  # the kernel has some
            release.set()
            assert (await wire.answer()).status == 200
            assert (await wire.answer()).status == 400
            wire.abort()

    go(run())


def test_h2c_preface_is_closed_quietly() -> None:
    async def run() -> list[bytes]:
        async with served(echo) as server:
            told = []
            for pieces in ([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], [b"PRI * HT", b"TP/2.0\r\n\r\nSM\r\n\r\n"]):
                async with await Wire.open(server.port) as wire:
                    for piece in pieces:
                        await wire.send(piece)
                        await asyncio.sleep(0.01)
                    told.append(await wire.ended())
            return told

    assert go(run()) == [b"", b""]


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("how", ["close", "reset", "half close"])
def test_leaving_is_seen_within_milliseconds_while_the_app_computes(how: str) -> None:
    noticed: list[float] = []

    async def app(req: Request, res: Responder) -> None:
        await res.closed.wait()
        noticed.append(asyncio.get_running_loop().time())

    async def run() -> float:
        async with served(app) as server:
            wire = await Wire.open(server.port)
            await wire.send(request("POST", "/", b"{}"))
            await until(lambda: server.num_busy == 1)
            left = asyncio.get_running_loop().time()
            if how == "close":
                wire.writer.close()
            elif how == "reset":
                wire.abort()
            else:
                wire.writer.write_eof()
            await until(lambda: bool(noticed))
            await until(lambda: server.num_connections == 0)
            wire.abort()
            return noticed[0] - left

    assert go(run()) < 0.1


def test_leaving_is_seen_although_another_request_is_waiting() -> None:
    left = []

    async def app(req: Request, res: Responder) -> None:
        await res.closed.wait()
        left.append(req.path)

    async def run() -> None:
        async with served(app) as server:
            wire = await Wire.open(server.port)
            await wire.send(request("GET", "/1") + request("GET", "/2"))
            await until(lambda: server.num_busy == 1)
            wire.abort()
            await until(lambda: left == ["/1"])

    go(run())


def test_closed_stays_unset_when_the_answer_was_complete() -> None:
    seen = []

    async def app(req: Request, res: Responder) -> None:
        event = res.closed
        res.send_json(200, {})
        seen.append(event)

    async def run() -> None:
        async with served(app) as server:
            await ask(server.port, "GET", "/")

    go(run())
    assert not seen[0].is_set()


def test_writes_after_leaving_are_harmless() -> None:
    ended = []

    async def app(req: Request, res: Responder) -> None:
        res.start_stream()
        await res.closed.wait()
        for _ in range(3):
            res.write(b"x" * 100_000)
            await res.drain()
        res.end()
        ended.append(True)

    async def run() -> None:
        async with served(app) as server:
            wire = await Wire.open(server.port)
            await wire.send(request("GET", "/"))
            await until(lambda: server.num_busy == 1)
            wire.abort()
            await until(lambda: bool(ended))

    go(run())


# ---------------------------------------------------------------- life of a server


def test_taken_port_names_its_owner() -> None:
    import os

    async def run() -> str:
        async with served(echo) as server:
            with pytest.raises(PortTaken) as caught:
                await serve(echo, host="127.0.0.1", port=server.port)
            assert str(server.port) in caught.value.message
            return caught.value.message

    assert f"pid {os.getpid()}" in go(run())


def test_a_socket_that_is_bound_already() -> None:
    async def run() -> int:
        sock = socket.create_server(("127.0.0.1", 0))
        server = await serve(echo, host="", port=0, sock=sock)
        status = (await ask(server.port, "GET", "/")).status
        await server.close()
        return status

    assert go(run()) == 200


def test_close_lets_running_requests_end() -> None:
    started = asyncio.Event()

    async def app(req: Request, res: Responder) -> None:
        started.set()
        await asyncio.sleep(0.2)
        res.send_json(200, {})

    async def run() -> tuple[Answer, bytes]:
        server = await serve(app, host="127.0.0.1", port=0)
        busy, idle = await Wire.open(server.port), await Wire.open(server.port)
        await busy.send(request("GET", "/"))
        await started.wait()
        closing = asyncio.create_task(server.close(drain_s=2))
        answer, rest = await busy.answer(), await idle.ended()
        await closing
        with pytest.raises(OSError):  # noqa: PT011 (refused or reset)
            await Wire.open(server.port)
        return answer, rest

    answer, rest = go(run())
    assert answer.status == 200
    assert rest == b""


def test_close_cuts_what_does_not_end() -> None:
    cancelled = []

    async def app(req: Request, res: Responder) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def run() -> None:
        server = await serve(app, host="127.0.0.1", port=0)
        wire = await Wire.open(server.port)
        await wire.send(request("GET", "/"))
        await until(lambda: server.num_busy == 1)
        await server.close(drain_s=0.05)
        assert await wire.ended() == b""

    go(run())
    assert cancelled == [True]


# ---------------------------------------------------------------- properties


BODIES = st.lists(st.binary(max_size=300), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(bodies=BODIES, chunked=st.lists(st.booleans(), min_size=4, max_size=4), cuts=st.data())
def test_any_split_of_the_bytes_gives_the_same_requests(
    bodies: list[bytes], chunked: list[bool], cuts: st.DataObject
) -> None:
    """Segments end anywhere: inside a header name, a chunk size, a body, between pipelined requests."""
    wires = b""
    for body, in_chunks in zip(bodies, chunked, strict=False):
        if in_chunks:
            middle = len(body) // 2
            parts = [p for p in (body[:middle], body[middle:]) if p]
            framed = b"".join(b"%x;e=1\r\n%s\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n"
            wires += b"POST /c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + framed
        else:
            wires += b"POST /l HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    points = sorted(cuts.draw(st.lists(st.integers(0, len(wires)), max_size=12)))
    pieces = [wires[a:b] for a, b in zip([0, *points], [*points, len(wires)], strict=True)]

    async def run() -> list[str]:
        async with served(echo) as server, await Wire.open(server.port) as wire:
            for piece in pieces:
                await wire.send(piece)
                await asyncio.sleep(0)
            return [(await wire.answer()).json["body"] for _ in bodies]

    assert go(run()) == [b.decode("latin-1") for b in bodies]


def test_2000_malformed_requests_no_500_no_hang_no_leak() -> None:
    rng = random.Random(20261129)
    seeds = [
        request("POST", "/v1/completions", json.dumps({"prompt": "x", "n": 1}).encode()),
        request("GET", "/health?x=y", headers="accept: */*\r\ncookie: a=b\r\n"),
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\nexpect: 100-continue\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 3\r\n\r\nabc",
    ]
    statuses: dict[int, int] = {}

    def mutate(data: bytes) -> bytes:
        found = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            at = rng.randrange(len(found))
            match rng.randrange(5):
                case 0:
                    found[at] = rng.randrange(256)
                case 1:
                    del found[at : at + rng.randint(1, 20)]
                case 2:
                    found[at:at] = rng.randbytes(rng.randint(1, 20))
                case 3:
                    found[at:at] = rng.choice(
                        [b"\r\n", b"\n", b"\0", b":", b" ", b"ffffffff", b"-1", b"\r\n\r\n"]
                    )
                case 4:
                    found[at:at] = found[rng.randrange(len(found)) :]
            if not found:
                return b"\0"
        return bytes(found)

    async def one(server: HttpServer) -> None:
        wire = await Wire.open(server.port)
        wire.writer.write(mutate(rng.choice(seeds)))
        wire.writer.write_eof() if rng.random() < 0.5 else None
        answer = await wire.ended(within_s=10)
        if answer:
            status = int(answer.split(b" ", 2)[1])
            statuses[status] = statuses.get(status, 0) + 1
        wire.abort()

    async def run() -> None:
        limits = {"head_timeout_s": 0.1, "body_timeout_s": 0.1, "idle_timeout_s": 0.1}
        async with served(echo, **limits) as server:
            for _ in range(20):
                async with asyncio.TaskGroup() as group:
                    for _ in range(100):
                        group.create_task(one(server))
            await until(lambda: server.num_connections == 0)

    go(run(), within_s=60)
    assert not [s for s in statuses if s >= 500], statuses
    assert statuses.get(400, 0) > 200
