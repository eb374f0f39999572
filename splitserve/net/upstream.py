"""Client side of HTTP/1.1 at protocol level: one pooled connection (`Upstream`), its pool, and what a caller is told.

    Pool.take / Pool.connect ─▶ Upstream.start(request bytes, exchange)
                                   │
        exchange.on_head ◀─────────┤  once; 1xx are swallowed
        exchange.on_body ◀─────────┤  decoded bytes, all that one segment brought in one call
        exchange.on_end  ◀─────────┤  the connection is back in the pool already
        exchange.on_lost ◀─────────┘  instead of on_end, at any point; the connection is gone

Exactly one of on_end and on_lost is called, unless the caller aborts first: then neither is. client.py puts a
request/response face on this; the router uses it as it is.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import httptools

from splitserve.errors import ConfigError

from .known import KnownHeads
from .request import Headers, RawHeaders, header_lines

ParsedHead = tuple[int, RawHeaders]  # status, headers


class Origin(NamedTuple):
    """Where to connect; `authority` is the value of the Host header."""

    host: str
    port: int

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Lost:
    """Why an exchange ended before its response did."""

    reason: str
    connected: bool = True  # False: the request was never written
    reused: bool = False  # the connection had served before, so the peer may just have closed it for idleness
    received: bool = False  # some byte of the response had come

    @property
    def unheard(self) -> bool:
        """An old connection was lost before anything came: the peer may have closed it before it saw the request."""
        return self.reused and not self.received


class Exchange(Protocol):
    """What the maker of one request is told about its response."""

    def on_head(self, status: int, headers: RawHeaders) -> None: ...
    def on_body(self, piece: bytes) -> None: ...
    def on_end(self) -> None: ...
    def on_lost(self, lost: Lost) -> None: ...


class Upstream(asyncio.Protocol):
    """One connection to one origin; at most one exchange at a time."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append  # a stream has a piece for each token: no Python frame for each
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._headers: RawHeaders = []
        self._num_pieces = 0  # of the answer that is complete; more belong to one that nobody asked for
        self._status = 0
        self._head_done = self._head_told = self._complete = False
        self._keep_alive = self._surplus = self._received = False
        self._head_bytes = 0
        self._num_served = 0
        self._paused = False
        self.idle_since = 0.0

    # -------------------------------------------------------------- for the caller

    def start(self, request: bytes, exchange: Exchange) -> None:
        """Send one request. The connection must be taken from the pool and idle."""
        self._exchange = exchange
        self._head_bytes = 0
        self._received = self._head_done = self._head_told = self._complete = False
        transport = self._transport
        if transport is None or transport.is_closing():
            self._lose("the connection was closed before the request was sent", connected=False)
        else:
            transport.write(request)

    def abort(self) -> None:
        """Give the exchange up and close the connection at once; the peer sees its client leave."""
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()

    def pause_reading(self) -> None:
        """Let the peer wait: somebody behind us is slow. Ends with the exchange at the latest."""
        if self.usable and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._paused and self.usable and self._transport is not None:
            self._transport.resume_reading()
        self._paused = False

    @property
    def at_end(self) -> bool:
        """Inside `on_body`: whether this is the last of the body, so that `on_end` follows at once."""
        return self._complete

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    # -------------------------------------------------------------- transport events

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._pool.forget(self)
        if self._exchange is None:
            return
        if self._head_done and self._until_close():
            self._end()
        else:
            where = "in the middle of the response" if self._received else "before a byte of the response"
            self._lose(f"the connection broke {where}" + (f": {exc}" if exc else ""))

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:  # nobody asked: whatever it is, it would be taken for the next answer
            self.abort()
            return
        is_first, self._received = not self._received, True
        known = self._pool.known.whole(data) if is_first else None
        if known is not None:
            self._take_known(*known, exchange)
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._fail(f"sent what is not an HTTP/1.1 response: {e}")
            return
        if not self._head_told:
            if not self._head_done:
                self._bound_head(len(data))
                return
            self._head_told = True
            if is_first and self._complete and self._keep_alive and not self._surplus:
                self._pool.known.learn(data, self._headers, (self._status, self._headers))
            exchange.on_head(self._status, self._headers)
        pieces = self._pieces
        if pieces:
            if self._surplus:
                del pieces[self._num_pieces :]
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            if body and self._exchange is exchange:
                exchange.on_body(body)
        if self._complete and self._exchange is exchange:
            self._end()

    def _take_known(self, head: ParsedHead, body: bytes, exchange: Exchange) -> None:
        """A whole response whose head was parsed before: the parser need not see it."""
        self._complete = self._keep_alive = True
        self._surplus = False
        exchange.on_head(*head)
        if body and self._exchange is exchange:
            exchange.on_body(body)
        if self._exchange is exchange:
            self._end()

    # -------------------------------------------------------------- parser events

    def on_message_begin(self) -> None:
        if self._complete:
            self._surplus = True  # a second response that nobody asked for
        else:
            self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_done:  # else a trailer
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if not self._head_done:
            self._status = self._parser.get_status_code()
            self._head_done = self._status >= 200

    def on_message_complete(self) -> None:
        if not self._complete:
            self._complete = self._head_done
            self._num_pieces = len(self._pieces)
            self._keep_alive = self._parser.should_keep_alive()

    # -------------------------------------------------------------- ends

    def _until_close(self) -> bool:
        """Whether the body has no length and so ends with the connection."""
        return not any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in self._headers)

    def _bound_head(self, received: int) -> None:
        self._head_bytes += received
        if self._head_bytes > 64 * 1024:
            self._fail("sent more than 64 KiB of response head")

    def _end(self) -> None:
        exchange, self._exchange = self._exchange, None
        self._num_served += 1
        if self._paused:
            self.resume_reading()  # the piece that ended the response may have filled the reader behind us
        transport = self._transport
        if transport is not None:
            if self._keep_alive and not self._surplus and not transport.is_closing():
                self._pool.give(self)
            else:
                transport.close()
        if exchange is not None:
            exchange.on_end()

    def _fail(self, reason: str) -> None:
        self._lose(reason)
        self.abort()

    def _lose(self, reason: str, *, connected: bool = True) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            lost = Lost(reason, connected=connected, reused=self._num_served > 0, received=self._received)
            exchange.on_lost(lost)


class Pool:
    """Kept-alive connections to one origin, last used first.

    Connections that idled longer than `max_idle_s` are not used again: servers close theirs after a while (uvicorn
    after 5 s), and a request that meets such a close is lost. `max_idle` bounds how many are kept.
    """

    def __init__(
        self, origin: Origin, *, max_idle: int = 256, max_idle_s: float = 4.0, connect_timeout_s: float = 2.0
    ) -> None:
        self.origin = origin
        self._max_idle = max_idle
        self._max_idle_s = max_idle_s
        self._connect_timeout_s = connect_timeout_s
        self.known: KnownHeads[ParsedHead] = KnownHeads()
        self._idle: list[Upstream] = []
        self._open: set[Upstream] = set()
        self._loop = asyncio.get_running_loop()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def take(self) -> Upstream | None:
        """An idle connection that can be used at once, if there is one."""
        while self._idle:
            upstream = self._idle.pop()
            if upstream.usable and self._loop.time() - upstream.idle_since < self._max_idle_s:
                return upstream
            upstream.abort()
        return None

    async def connect(self) -> Upstream:
        """A new connection. OSError when nobody answers (TimeoutError after `connect_timeout_s`)."""
        async with asyncio.timeout(self._connect_timeout_s):
            _, upstream = await self._loop.create_connection(
                lambda: Upstream(self), self.origin.host, self.origin.port
            )
        self._open.add(upstream)
        return upstream

    def give(self, upstream: Upstream) -> None:
        """Take back a connection whose exchange is over."""
        if len(self._idle) >= self._max_idle:
            upstream.abort()
            return
        upstream.idle_since = self._loop.time()
        self._idle.append(upstream)

    def forget(self, upstream: Upstream) -> None:
        """A connection is gone."""
        self._open.discard(upstream)
        if upstream in self._idle:
            self._idle.remove(upstream)

    def close(self) -> None:
        """Close every connection; running exchanges are told that theirs is lost."""
        self._idle.clear()
        for upstream in list(self._open):
            upstream.abort()


def split_url(url: str) -> tuple[Origin, str]:
    """(`Origin`, target) of an http:// URL; the target holds path and query. ConfigError for anything else."""
    if any(c <= " " or c == "\x7f" for c in url):  # urlsplit drops some of them silently
        raise ConfigError(f"{url!r} has a space or control character in it", fix="write http://HOST:PORT")
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as e:
        raise ConfigError(f"{url!r} is not a URL: {e}", fix="write http://HOST:PORT") from None
    if parts.scheme != "http" or not parts.hostname or any(c.isspace() for c in parts.netloc):
        raise ConfigError(
            f"{url!r} is not an http:// URL", fix="write http://HOST:PORT (TLS belongs in front of this)"
        )
    if parts.username is not None:  # it would not be sent, and be kept wherever this URL is
        raise ConfigError(
            "a URL with a user or password in it", fix="write http://HOST:PORT, and give a key as a key"
        )
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Origin(parts.hostname, 80 if port is None else port), target


def request_bytes(method: str, origin: Origin, target: str, body: bytes, headers: Headers = ()) -> bytes:
    """A whole request. ValueError for a target or header that would break the framing."""
    if any(c <= " " or c == "\x7f" for c in target):
        raise ValueError(f"a space or control character in request target {target!r}")
    length = f"content-length: {len(body)}\r\n" if body or method in ("POST", "PUT", "PATCH") else ""
    head = f"{method} {target} HTTP/1.1\r\nhost: {origin.authority}\r\n{length}"
    return head.encode("latin-1") + header_lines(headers) + b"\r\n" + body
