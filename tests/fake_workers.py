"""Scripted engines for router tests: real sockets, no model. Each request runs a behaviour that may fail in any way.

worker = await FakeWorker.start(decode_of(tokens(4)))
worker.behaves = dies(after=2)          # from the next request on
worker.seen[0].body, worker.num_left    # what came, how many clients left before the end
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-engine: fake\r\n"
    b"server: fake\r\ntransfer-encoding: chunked\r\n\r\n"
)


@dataclass
class Seen:
    """One request as the engine got it."""

    method: str
    path: str
    headers: dict[str, str]
    raw: bytes
    at_s: float

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.raw)


class Line:
    """The answering side of one request: raw writes, and the client's leaving."""

    def __init__(self, writer: asyncio.StreamWriter, left: asyncio.Event) -> None:
        self.writer = writer
        self.left = left

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def frame(self, piece: bytes) -> None:
        await self.raw(b"%x\r\n%s\r\n" % (len(piece), piece))

    def cut(self) -> None:
        self.writer.transport.abort()


Behaviour = Callable[[Seen, Line], Awaitable[None]]


@dataclass
class FakeWorker:
    behaves: Behaviour
    healthy: bool = True
    load: dict[str, int] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    probes: int = 0  # of the router itself: they are answered by `probe_behaves`
    probe_behaves: Behaviour = field(default_factory=lambda: whole(200, {"text": "!"}))
    num_left: int = 0
    num_connections: int = 0
    port: int = 0
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @classmethod
    async def start(cls, behaves: Behaviour, port: int = 0, **more: Any) -> FakeWorker:
        worker = cls(behaves, **more)
        worker._server = await asyncio.start_server(worker._serve, "127.0.0.1", port)
        worker.port = worker._server.sockets[0].getsockname()[1]
        return worker

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def die(self) -> None:
        """As kill -9: every connection is reset, nobody listens."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def rise(self) -> None:
        """Listen again on the same port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    # -------------------------------------------------------------- inside

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self.num_connections += 1
        try:
            while True:
                seen = await self._read(reader)
                await self._answer(seen, reader, writer)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._writers.discard(writer)
            self.num_connections -= 1
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> Seen:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        method, path, _ = first.split(" ")
        headers = {n.lower(): v.strip() for n, v in (line.split(":", 1) for line in lines)}
        raw = await reader.readexactly(int(headers.get("content-length", "0")))
        return Seen(method, path, headers, raw, asyncio.get_running_loop().time())

    async def _answer(self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = asyncio.Event()
        line = Line(writer, left)
        path = seen.path.partition("?")[0]
        if path == "/health":
            await whole(200 if self.healthy else 503, {})(seen, line)
        elif path == "/get_load":
            await whole(200, [self.load])(seen, line)
        elif path in (
            "/v1/loads",
            "/metrics",
        ):  # SGLang's and vLLM's; the latter is no JSON, and may be silent
            await whole(200, {"loads": [self.load]})(seen, line)
        elif path in ("/server_info", "/model_info"):
            await whole(200, self.info)(seen, line)
        elif b'"Hello"' in seen.raw and b'"max_new_tokens":1,' in seen.raw:
            self.probes += 1
            await self._run(self.probe_behaves, seen, line, reader)
        else:
            self.seen.append(seen)
            await self._run(self.behaves, seen, line, reader)

    async def _run(self, behaves: Behaviour, seen: Seen, line: Line, reader: asyncio.StreamReader) -> None:
        """The behaviour beside a watch for the client's leaving."""
        acting = asyncio.ensure_future(behaves(seen, line))
        watching = asyncio.ensure_future(reader.read(1))
        await asyncio.wait({acting, watching}, return_when=asyncio.FIRST_COMPLETED)
        if acting.done():
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await watching
            acting.result()
            return
        self.num_left += 1
        line.left.set()
        acting.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await acting
        raise ConnectionResetError


# ---------------------------------------------------------------- behaviours


def tokens(count: int) -> list[bytes]:
    """`count` events and [DONE]."""
    events = [b'data: {"choices":[{"index":0,"text":" t%d"}]}\n\n' % i for i in range(count)]
    return [*events, b"data: [DONE]\n\n"]


def whole(status: int, obj: Any, *, headers: str = "", after_s: float = 0.0) -> Behaviour:
    """A complete JSON answer."""

    async def behave(seen: Seen, line: Line) -> None:
        await asyncio.sleep(after_s)
        body = json.dumps(obj).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{headers}content-length: {len(body)}\r\n\r\n"
        await line.raw(head.encode() + body)

    return behave


def error(
    status: int, code: str, message: str = "said the engine", *, after_s: float = 0.0, headers: str = ""
) -> Behaviour:
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return whole(status, body, after_s=after_s, headers=headers)


def streams(
    pieces: list[bytes], *, gap_s: float = 0.0, head_after_s: float = 0.0, first_after_s: float = 0.0
) -> Behaviour:
    """Head, then one frame a piece."""

    async def behave(seen: Seen, line: Line) -> None:
        await asyncio.sleep(head_after_s)
        await line.raw(STREAM_HEAD)
        await asyncio.sleep(first_after_s)
        for piece in pieces:
            await line.frame(piece)
            await asyncio.sleep(gap_s)
        await line.raw(b"0\r\n\r\n")

    return behave


def completes(count: int = 4, *, gap_s: float = 0.0, after_s: float = 0.0) -> Behaviour:
    """What a good engine does: a stream if asked for one, else JSON with usage."""

    async def behave(seen: Seen, line: Line) -> None:
        if seen.body.get("stream"):
            await streams(tokens(count), gap_s=gap_s, first_after_s=after_s)(seen, line)
        else:
            usage = {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}
            answer = {
                "choices": [{"index": 0, "text": "".join(f" t{i}" for i in range(count))}],
                "usage": usage,
            }
            await whole(200, answer, after_s=after_s)(seen, line)

    return behave


def dies(*, after: int = 0, head: bool = True, half_frame: bool = False, after_s: float = 0.0) -> Behaviour:
    """A stream cut after `after` events, in the middle of a frame if `half_frame`; without a head if not `head`."""

    async def behave(seen: Seen, line: Line) -> None:
        await asyncio.sleep(after_s)
        if head:
            await line.raw(STREAM_HEAD)
        for piece in tokens(after)[:-1]:
            await line.frame(piece)
        if half_frame:
            await line.raw(b'40\r\ndata: {"choices":[{"te')
        await asyncio.sleep(0.005)
        line.cut()
        raise ConnectionResetError

    return behave


def cut_json(*, after_s: float = 0.0) -> Behaviour:
    """Half of a JSON body."""

    async def behave(seen: Seen, line: Line) -> None:
        await asyncio.sleep(after_s)
        await line.raw(
            b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"choices":'
        )
        await asyncio.sleep(0.005)
        line.cut()
        raise ConnectionResetError

    return behave


def continues(
    count: int = 4,
    *,
    dies_after: int | None = None,
    half_event: bool = False,
    error: bytes = b"",
    gap_s: float = 0.0,
) -> Behaviour:
    """As our engines stream to our router: token i is told before event i, and a stream may begin in the middle.

    Cut before event `dies_after`, in the middle of that event if `half_event`, after the event `error` if there is one.
    """

    async def behave(seen: Seen, line: Line) -> None:
        begun = len((seen.body.get("splitserve_resume") or {"tokens": []})["tokens"])
        ticket = json.dumps({"num_tokens": begun, "seed": 7, "answer_id": "a", "created": 1}).encode()
        await line.raw(STREAM_HEAD[:-2] + b"x-splitserve-resume: " + ticket + b"\r\n\r\n")
        for i, event in list(enumerate(tokens(count)))[begun:]:
            if i == dies_after:
                if half_event:
                    await line.frame(b":%d\n%s" % (i, event[:15]))
                if error:
                    await line.frame(error + b"data: [DONE]\n\n")
                await asyncio.sleep(0.005)
                line.cut()
                raise ConnectionResetError
            await line.frame(b":%d\n%s" % (i, event) if i < count else event)
            await asyncio.sleep(gap_s)
        await line.raw(b"0\r\n\r\n")

    return behave


def silent(*, head: bool = False) -> Behaviour:
    """Nothing (or only a stream's head) until the client leaves."""

    async def behave(seen: Seen, line: Line) -> None:
        if head:
            await line.raw(STREAM_HEAD)
        await line.left.wait()

    return behave


def garbage() -> Behaviour:
    async def behave(seen: Seen, line: Line) -> None:
        await line.raw(b"SSH-2.0-OpenSSH_9.6\r\n")
        await line.left.wait()

    return behave


def one_by_one(*behaviours: Behaviour) -> Behaviour:
    """The n-th request gets the n-th behaviour; the last one stays."""
    left = list(behaviours)

    async def behave(seen: Seen, line: Line) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(seen, line)

    return behave
