"""One client connection of an HTTP/1.1 server. Parsing by httptools; one Python object, no streams, no locks.

The app is called with (Request, Responder) once a request is complete. It returns an awaitable, which then runs as a
task, or None when it answers by callbacks (a proxy does). Requests of one connection are answered in order, one at a
time; bytes that arrive meanwhile are held, up to MAX_HELD, so that a client's leaving is always noticed at once.

    bytes ─▶ parser ─▶ waiting (complete requests) ─▶ app ─▶ Responder ─▶ bytes
               │                                       ▲
               └── a broken limit: waits its turn ─────┘ typed error, lingering close

A client that closes its sending side has left: half-closed connections are not served.
It knows no API: paths, JSON and keys are the app's affair.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import httptools

from splitserve.errors import (
    BodyTooLarge,
    HeadTooLarge,
    Overloaded,
    RequestError,
    RequestTimeout,
    SplitserveError,
)

from .request import RawHeaders, Request, RequestHead
from .responder import Responder

if TYPE_CHECKING:
    from .http import HttpServer

MAX_HELD = 64 * 1024  # bytes of later requests kept unparsed while one is being answered
MAX_PIPELINED = 64  # complete requests that one segment may queue
MAX_LINGER_BYTES = 64 << 20  # read and dropped after an error, so that the client can read the answer
LINGER_S = 2.0


# Phases of reading. Plain numbers: they are compared several times for each segment.
IDLE = 0  # between requests
HEAD = 1
BODY = 2
LINGER = 3  # answered with an error; reading only to drop


class Connection(asyncio.Protocol):
    """One client. Owned by its HttpServer, which also keeps its deadlines."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._phase = IDLE
        self._deadline = 0.0
        self._version = "1.1"
        self._target = b""
        self._headers: RawHeaders = []
        self._body: bytes | bytearray = b""
        self._head_bytes = 0
        self._num_fed = 0  # bytes of the segment that is being parsed
        self._body_raw = 0
        self._waiting: deque[tuple[Request, Responder]] = deque()
        self._active: Responder | None = None
        self._rejection: SplitserveError | None = None
        self._held = bytearray()
        self._pumping = False
        self._write_paused_at = 0.0
        self._writable: asyncio.Future[None] | None = None
        self.on_writable: Callable[[bool], None] | None = (
            None  # for proxies: False when full, True when drained
        )
        self.transport: asyncio.Transport | None = None

    # -------------------------------------------------------------- transport events

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit from it
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._deadline = self._server.loop.time() + self._server.limits.idle_timeout_s
        if not self._server.admit(self):
            self.transport = None
            full = Overloaded(f"{self._server.limits.max_connections} connections are open, the most allowed")
            transport.write(Responder.error_bytes(full))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncio's signature)
        self.transport = None
        self._server.forget(self)
        self._waiting.clear()
        self._held.clear()
        self.resume_writing()
        self._leave()

    def eof_received(self) -> bool:
        self._leave()
        return False  # the transport closes itself

    def _leave(self) -> None:
        active, self._active = self._active, None
        if active is not None:
            active.client_left()

    def pause_writing(self) -> None:
        self._write_paused_at = self._server.loop.time()
        if self.on_writable is not None:
            self.on_writable(False)

    def resume_writing(self) -> None:
        self._write_paused_at = 0.0
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None
        if self.on_writable is not None:
            self.on_writable(True)

    async def drained(self) -> None:
        """Return once the transport's buffer is below its low-water mark, or the client is gone."""
        while self._write_paused_at and self.transport is not None:
            if self._writable is None:
                self._writable = self._server.loop.create_future()
            await asyncio.shield(self._writable)

    # -------------------------------------------------------------- bytes in

    def data_received(self, data: bytes) -> None:
        if self._phase == LINGER:
            self._body_raw += len(data)
            if self._body_raw > MAX_LINGER_BYTES:
                self.abort()
        elif self._active is not None or self._rejection is not None:
            self._held += data
            if len(self._held) > MAX_HELD and self.transport is not None:
                self.transport.pause_reading()
        else:
            self._feed(data)
            self._pump()

    def _feed(self, data: bytes) -> None:
        fresh = self._phase == IDLE
        if fresh:
            known = self._server.known.whole(data)
            if known is not None:
                self._take_known(*known)
                return
            self._phase = HEAD
            self._deadline = self._server.loop.time() + self._server.limits.head_timeout_s
        if self._phase == BODY:
            self._body_raw += len(data)
        self._num_fed = len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as e:
            self._not_http(e)
        if self._rejection is not None:
            return
        if fresh and self._phase == IDLE and len(self._waiting) == 1:
            self._learn(data)
        elif self._phase == HEAD:
            self._head_bytes += len(data)
            if self._head_bytes > self._server.limits.max_head_bytes:
                self._reject_head()
        elif self._phase == BODY and self._body_raw > 16384 + 9 * len(self._body):
            self._reject(
                RequestError(f"{self._body_raw} bytes of chunk framing around {len(self._body)} of body")
            )

    def _take_known(self, head: RequestHead, body: bytes) -> None:
        """A whole request whose head was parsed before: the parser need not see it."""
        keep = not self._server.draining
        responder = Responder(self, head_only=head.method == "HEAD", keep_alive=keep, chunks=True)
        self._waiting.append((Request(head.method, head.target, head.headers, body), responder))

    def _learn(self, data: bytes) -> None:
        """`data` was one request, or several: only one whole request has a head worth knowing."""
        request, responder = self._waiting[0]
        if self._version == "1.1" and responder.keeps_alive:
            head = RequestHead(request.method, request.target, request.raw_headers)
            self._server.known.learn(data, request.raw_headers, head)

    def _not_http(self, error: httptools.HttpParserError) -> None:
        if self._target == b"*" and "PRI" in str(error):  # an HTTP/2 client, or a router probing for gRPC
            if self.transport is not None:
                self.transport.close()
            self._phase = LINGER
        else:
            self._reject(RequestError(f"not an HTTP/1.1 request: {error}"))

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Serve a request that offers `Upgrade` as if it had not: parse it again without those headers.

        The parser stops after such a head and skips its body, hence the second pass.
        """
        if self._rejection is not None:
            return
        if self._parser.get_method() == b"CONNECT":
            self._reject(RequestError("CONNECT is for proxies; this is none"))
            return
        hop = (b"upgrade", b"connection", b"http2-settings")
        lines = [b"%s: %s\r\n" % (n, v) for n, v in self._headers if n.lower() not in hop]
        version = self._parser.get_http_version().encode()
        head = b"%s %s HTTP/%s\r\n%s\r\n" % (
            self._parser.get_method(),
            self._target,
            version,
            b"".join(lines),
        )
        self._parser = httptools.HttpRequestParser(self)
        self._feed(head + rest)

    # -------------------------------------------------------------- parser events

    def on_message_begin(self) -> None:
        self._phase = HEAD
        self._target = b""
        self._headers = []
        self._body = b""
        self._head_bytes = self._body_raw = 0

    def on_url(self, piece: bytes) -> None:
        self._target += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase == HEAD:  # otherwise a trailer, which must not add to the headers
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        limits = self._server.limits
        self._version = self._parser.get_http_version()
        length, expects = 0, False
        for name, value in self._headers:
            size = len(name)
            if size == 14 and name.lower() == b"content-length":
                length = int(value)
            elif size == 6 and name.lower() == b"expect":
                expects = value.lower() == b"100-continue"
        if (
            self._head_bytes + self._num_fed > limits.max_head_bytes
            and self._head_size() > limits.max_head_bytes
        ):
            self._reject_head()
        elif length > limits.max_body_bytes:
            self._reject_body(length)
        elif self._version not in ("1.1", "1.0"):
            self._reject(RequestError(f"HTTP/{self._version} is not spoken here, HTTP/1.1 is"))
        elif (
            expects
            and self._active is None
            and self.transport is not None
            and not self._parser.should_upgrade()
        ):
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._phase = BODY
        self._deadline = self._server.loop.time() + limits.body_timeout_s

    def _head_size(self) -> int:
        """Bytes of the head that was read: what came with it may hold a body or another request."""
        return len(self._target) + 16 + sum(len(n) + len(v) + 4 for n, v in self._headers)

    def on_body(self, piece: bytes) -> None:
        if self._rejection is not None:
            return
        if not self._body:
            self._body = piece
        else:
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += piece
        if len(self._body) > self._server.limits.max_body_bytes:
            self._reject_body(len(self._body))

    def on_message_complete(self) -> None:
        if self._rejection is not None or self._parser.should_upgrade():
            return
        if len(self._waiting) >= MAX_PIPELINED:
            self._reject(RequestError(f"more than {MAX_PIPELINED} requests in one go"))
            return
        method = self._parser.get_method()
        keep = self._parser.should_keep_alive() and not self._server.draining
        chunks = self._version == "1.1"
        responder = Responder(self, head_only=method == b"HEAD", keep_alive=keep, chunks=chunks)
        request = Request(method.decode(), self._target, self._headers, bytes(self._body))
        self._waiting.append((request, responder))
        self._body = b""
        self._phase = IDLE

    # -------------------------------------------------------------- one request at a time

    def _pump(self) -> None:
        """Start what can be started. Loops instead of recursing: an app may answer before it returns."""
        if self._pumping:
            return
        self._pumping = True
        while self._active is None and self.transport is not None and self._phase != LINGER:
            if self._waiting:
                request, self._active = self._waiting.popleft()
                self._server.start(request, self._active)
            elif self._rejection is not None:
                self._refuse(self._rejection)
            elif self._held:
                held = bytes(self._held)
                self._held.clear()
                self.transport.resume_reading()
                self._feed(held)
            else:
                break
        self._pumping = False

    def finished(self, responder: Responder, *, keep_alive: bool) -> None:
        """The responder has written its last byte."""
        if self._active is not responder:
            return
        self._active = None
        if self.transport is None:
            return
        if not keep_alive or self._server.draining:
            if self._held or self._phase in (HEAD, BODY):
                self._linger()
            else:
                self.transport.close()
            return
        if self._phase == IDLE:
            self._deadline = self._server.loop.time() + self._server.limits.idle_timeout_s
        self._pump()

    # -------------------------------------------------------------- refusing

    def _reject_head(self) -> None:
        limit = self._server.limits.max_head_bytes
        self._reject(HeadTooLarge(f"request line and headers are over {limit} bytes"))

    def _reject_body(self, size: int) -> None:
        limit = self._server.limits.max_body_bytes
        self._reject(BodyTooLarge(f"the body has {size} bytes or more, at most {limit} are taken"))

    def _reject(self, error: SplitserveError) -> None:
        self._rejection = self._rejection or error

    def _refuse(self, error: SplitserveError) -> None:
        if self.transport is not None:
            self.transport.write(Responder.error_bytes(error))
            self._linger()

    def _linger(self) -> None:
        """Close without a reset: stop sending, go on reading for a moment, so that the answer is not destroyed."""
        self._phase = LINGER
        self._held.clear()
        self._waiting.clear()
        self._body = b""
        self._body_raw = 0
        self._deadline = self._server.loop.time() + LINGER_S
        if self.transport is not None:
            self.transport.resume_reading()
            with contextlib.suppress(OSError):  # the client may have gone already
                self.transport.write_eof()

    def abort(self) -> None:
        """Drop the connection with whatever was not sent yet."""
        if self.transport is not None:
            self.transport.abort()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._server.loop

    @property
    def idle(self) -> bool:
        return self._active is None and self._phase == IDLE and not self._waiting

    @property
    def deadline(self) -> float:
        return self._deadline

    def check_deadline(self, now: float) -> None:
        """Called by the server a few times in each shortest timeout."""
        if self.transport is None:
            return
        if self._write_paused_at and now - self._write_paused_at > self._server.limits.write_timeout_s:
            self.abort()
        elif self._active is not None or now < self._deadline:
            return
        elif self._phase == IDLE:
            self.transport.close()
        elif self._phase == LINGER:
            self.abort()
        else:
            limits = self._server.limits
            late = "head" if self._phase == HEAD else "body"
            limit = limits.head_timeout_s if self._phase == HEAD else limits.body_timeout_s
            self._reject(RequestTimeout(f"the request's {late} did not arrive within {limit:g} s"))
            self._pump()
