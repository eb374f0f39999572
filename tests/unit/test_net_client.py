"""The pooled client: whole and streamed answers, connection reuse, what is sent again and what never is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.errors import ConfigError, DeadlineExceeded, PeerLost
from splitserve.net.client import MAX_QUEUED, Client, Unreachable
from splitserve.net.http import Request, Responder, serve
from splitserve.net.request import RawHeaders
from splitserve.net.sse import DONE, SseParser, event
from splitserve.net.upstream import Lost, Origin, Upstream, request_bytes, split_url
from tests.wire_http import go, until

Serving = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def raw_server(answer: Serving) -> AsyncIterator[str]:
    """A server of plain bytes; `answer` is called for each connection."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            await answer(reader, writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def replies(*answers: bytes) -> Serving:
    """Each request on a connection gets the next of `answers`; then the connection is closed."""

    async def serving(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()

    return serving


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A: b\r\n\r\nok"


# ---------------------------------------------------------------- answers


ANSWERS = {
    "length": (OK, b"ok"),
    "chunks": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\nX-T: 1\r\n\r\n",
        b"ok",
    ),
    "until close": (b"HTTP/1.1 200 OK\r\n\r\nok", b"ok"),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    "after 100 and 103": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK,
        b"ok",
    ),
    "error status": (OK.replace(b"200", b"404"), b"ok"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_forms_of_a_body(case: str) -> None:
    raw, body = ANSWERS[case]

    async def run() -> None:
        async with raw_server(replies(raw)) as url, Client() as client:
            answer = await client.request("GET", url)
            assert answer.body == body
            assert answer.status == {"no content": 204, "error status": 404}.get(case, 200)

    go(run())


BROKEN = {
    "closed at once": b"",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "half a body": b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nok",
    "half a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nok",
    "no last chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
    "no HTTP": b"220 smtp ready\r\n",
    "endless head": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000,
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_answers_are_peer_lost_and_say_whom(case: str) -> None:
    async def run() -> None:
        async with raw_server(replies(BROKEN[case])) as url, Client() as client:
            with pytest.raises(PeerLost) as caught:
                await client.request("GET", f"{url}/x", timeout_s=5)
            assert f"GET {url}/x" in caught.value.message

    go(run())


def test_a_second_answer_nobody_asked_for_is_not_the_next_answer() -> None:
    """Response splitting: surplus bytes end the connection instead of answering somebody else."""

    async def run() -> None:
        async with raw_server(replies(OK + OK.replace(b"ok", b"no"), OK)) as url, Client() as client:
            for _ in range(3):
                assert (await client.request("GET", url)).body == b"ok"

    go(run())


def test_nobody_listens() -> None:
    async def run() -> None:
        async with Client() as client:
            with pytest.raises(Unreachable, match=r"cannot connect to 127.0.0.1:1: Connection refused"):
                await client.request("GET", "http://127.0.0.1:1/")

    go(run())


def test_timeout_closes_the_connection() -> None:
    left = asyncio.Event()

    async def app(req: Request, res: Responder) -> None:
        await res.closed.wait()
        left.set()

    async def run() -> None:
        server = await serve(app, host="127.0.0.1", port=0)
        async with Client() as client:
            with pytest.raises(DeadlineExceeded, match=r"within 0.1 s"):
                await client.request("GET", f"http://127.0.0.1:{server.port}/", timeout_s=0.1)
            await asyncio.wait_for(left.wait(), 1)
        await server.close()

    go(run())


# ---------------------------------------------------------------- reuse


def test_connections_are_reused() -> None:
    connections = 0

    async def serving(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await replies(*[OK] * 100)(reader, writer)

    async def run() -> None:
        async with raw_server(serving) as url, Client() as client:
            for _ in range(20):
                await client.request("POST", url, body=b"x")

    go(run())
    assert connections == 1


def test_connection_close_is_obeyed() -> None:
    connections = 0

    async def serving(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await replies(OK.replace(b"X-A: b", b"Connection: close"))(reader, writer)

    async def run() -> None:
        async with raw_server(serving) as url, Client() as client:
            for _ in range(3):
                await client.request("GET", url)

    go(run())
    assert connections == 3


@pytest.mark.parametrize(
    ("method", "idempotent", "sent_again"),
    [("GET", None, True), ("POST", None, False), ("POST", True, True), ("GET", False, False)],
)
def test_stale_connection(method: str, idempotent: bool | None, sent_again: bool) -> None:
    """The server takes the second request on a kept connection and closes without a byte."""
    seen: list[int] = []

    async def serving(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(0)
        mine = len(seen) - 1
        await reader.readuntil(b"\r\n\r\n")
        seen[mine] += 1
        writer.write(OK)
        await reader.readuntil(b"\r\n\r\n")
        seen[mine] += 1

    async def run() -> None:
        async with raw_server(serving) as url, Client() as client:
            await client.request("GET", url)
            if sent_again:
                assert (await client.request(method, url, idempotent=idempotent)).body == b"ok"
            else:
                with pytest.raises(PeerLost):
                    await client.request(method, url, idempotent=idempotent)

    go(run())
    assert seen == ([2, 1] if sent_again else [2])


def test_never_sent_again_once_a_byte_has_come() -> None:
    count = 0

    async def serving(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        for answer in (OK, b"HTTP/1.1 2"):
            await reader.readuntil(b"\r\n\r\n")
            count += 1
            writer.write(answer)
            await writer.drain()

    async def run() -> None:
        async with raw_server(serving) as url, Client() as client:
            await client.request("GET", url)
            with pytest.raises(PeerLost, match="in the middle"):
                await client.request("GET", url)

    go(run())
    assert count == 2


def test_connections_that_idled_too_long_are_not_used() -> None:
    connections = 0

    async def serving(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await replies(*[OK] * 9)(reader, writer)

    async def run() -> None:
        async with raw_server(serving) as url, Client(max_idle_s=0.05) as client:
            await client.request("GET", url)
            await asyncio.sleep(0.1)
            await client.request("POST", url)

    go(run())
    assert connections == 2


# ---------------------------------------------------------------- streams


def test_events_of_a_stream() -> None:
    async def app(req: Request, res: Responder) -> None:
        res.start_stream()
        for i in range(3):
            res.write(event(b"%d" % i))
            await asyncio.sleep(0.001)
        res.end(DONE)

    async def run() -> list[bytes]:
        server = await serve(app, host="127.0.0.1", port=0)
        async with Client() as client, client.stream("POST", f"http://127.0.0.1:{server.port}/") as stream:
            assert stream.status == 200
            found = [payload async for payload in stream.events()]
        await server.close()
        return found

    assert go(run()) == [b"0", b"1", b"2", b"[DONE]"]


def test_leaving_the_block_early_leaves_the_server() -> None:
    left = asyncio.Event()

    async def app(req: Request, res: Responder) -> None:
        res.start_stream()
        res.write(b"x")
        await res.closed.wait()
        left.set()

    async def run() -> None:
        server = await serve(app, host="127.0.0.1", port=0)
        async with Client() as client:
            async with client.stream("POST", f"http://127.0.0.1:{server.port}/") as stream:
                async for _ in stream.pieces():
                    break
            await asyncio.wait_for(left.wait(), 1)
        await server.close()

    go(run())


def test_a_slow_reader_holds_the_server_back() -> None:
    sent = 0

    async def app(req: Request, res: Responder) -> None:
        nonlocal sent
        res.start_stream()
        for _ in range(400):
            res.write(b"x" * 100_000)
            await res.drain()
            sent += 100_000
        res.end()

    async def run() -> None:
        server = await serve(app, host="127.0.0.1", port=0)
        async with Client() as client, client.stream("GET", f"http://127.0.0.1:{server.port}/") as stream:
            before = -1
            while before != sent:
                before = sent
                await asyncio.sleep(0.05)
            assert sent < MAX_QUEUED + (20 << 20)  # ours and the kernel's, not 40 MB
            assert len(await stream.read()) == 40_000_000
        await server.close()

    go(run())


def test_a_connection_paused_by_its_last_piece_is_not_stuck() -> None:
    class Pausing:
        ended = 0
        upstream: Upstream | None = None

        def on_head(self, status: int, headers: RawHeaders) -> None: ...
        def on_lost(self, lost: Lost) -> None: ...

        def on_body(self, piece: bytes) -> None:
            assert self.upstream is not None
            self.upstream.pause_reading()  # whoever reads behind us is full

        def on_end(self) -> None:
            self.ended += 1

    async def run() -> None:
        async with raw_server(replies(OK, OK, OK)) as url, Client() as client:
            first = Pausing()
            first.upstream = await client.send("GET", url, first)
            await until(lambda: first.ended == 1)
            assert (await client.request("GET", url, timeout_s=2)).body == b"ok"
            (pool,) = client._pools.values()
            assert pool.num_open == 1

    go(run())


def test_exchange_gets_exactly_one_end() -> None:
    told: list[str] = []

    class Told:
        def on_head(self, status: int, headers: RawHeaders) -> None:
            told.append(f"head {status}")

        def on_body(self, piece: bytes) -> None:
            told.append("body")

        def on_end(self) -> None:
            told.append("end")

        def on_lost(self, lost: Lost) -> None:
            told.append("lost")

    async def run() -> None:
        async with raw_server(replies(OK, OK, b"")) as url, Client() as client:
            for count in (1, 2):
                await client.send("GET", url, Told())
                await until(lambda count=count: told.count("end") == count)  # type: ignore[misc]
            await client.send("GET", url, Told())
            await until(lambda: "lost" in told)
            (await client.send("GET", url, Told())).abort()
            await asyncio.sleep(0.01)

    go(run())
    assert told == ["head 200", "body", "end"] * 2 + ["lost"]


# ---------------------------------------------------------------- URLs and requests


def test_split_url() -> None:
    assert split_url("http://h:1/a?b=c") == (Origin("h", 1), "/a?b=c")
    assert split_url("127.0.0.1:8000") == (Origin("127.0.0.1", 8000), "/")
    assert split_url("http://[::1]:9/x")[0].authority == "[::1]:9"
    assert split_url("http://h")[0].port == 80


@pytest.mark.parametrize("url", ["https://h/", "ftp://h", "http://", "http://h:port", "http://h:99999", ""])
def test_split_url_refuses(url: str) -> None:
    with pytest.raises(ConfigError):
        split_url(url)


def test_requests_cannot_be_split() -> None:
    origin = Origin("h", 1)
    for bad in ("/a b", "/a\r\nx: y", "/\0"):
        with pytest.raises(ValueError, match="request target"):
            request_bytes("GET", origin, bad, b"")
    with pytest.raises(ValueError, match="line end"):
        request_bytes("GET", origin, "/", b"", [("a", "b\r\nc: d")])


# ---------------------------------------------------------------- server-sent events


PAYLOAD = st.binary(max_size=50).filter(lambda b: b"\r" not in b)


@settings(max_examples=100, deadline=None)
@given(payloads=st.lists(PAYLOAD, max_size=6), comments=st.booleans(), data=st.data())
def test_events_come_back_from_any_split(payloads: list[bytes], comments: bool, data: st.DataObject) -> None:
    stream = b"".join((b": hi\n\n" if comments else b"") + event(p) for p in payloads)
    points = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    parser = SseParser()
    found: list[bytes] = []
    for a, b in zip([0, *points], [*points, len(stream)], strict=True):
        found += parser.feed(stream[a:b])
    assert found == payloads
    assert parser.rest == b""


def test_foreign_line_ends_and_fields() -> None:
    parser = SseParser()
    assert parser.feed(b"id: 1\r\nevent: x\r\ndata: a\r\ndata:b\r\n\r\n") == [b"a\nb"]
    assert parser.feed(b"retry: 5\n\n: comment\n\ndata\n\n") == [b""]


def test_an_endless_event_is_an_error() -> None:
    parser = SseParser(max_event=1000)
    assert parser.feed(b"data: " + b"x" * 900) == []
    with pytest.raises(ValueError, match="1000 bytes"):
        parser.feed(b"x" * 200)
