"""Pooled HTTP/1.1 client: `Client.request` for a whole answer, `Client.stream` for one that is read as it comes.

A request that meets a stale kept-alive connection (closed by the peer, not one byte of an answer) is sent again on a
new one if that is safe: the method is idempotent, the bytes were never written, or the caller says `idempotent=True`.
Nothing else is retried here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from splitserve.errors import DeadlineExceeded, PeerLost

from .request import Headers, RawHeaders
from .sse import SseParser
from .upstream import Exchange, Lost, Origin, Pool, Upstream, request_bytes, split_url

IDEMPOTENT = frozenset(("GET", "HEAD", "PUT", "DELETE", "OPTIONS"))
MAX_QUEUED = 1 << 20  # bytes of a stream kept for a slow reader before the peer is made to wait


class Unreachable(PeerLost):
    """Nobody listens there: the connection was refused, not merely late."""


@dataclass
class ClientResponse:
    """A whole answer; header names are lower-case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @cached_property
    def json(self) -> Any:
        """The decoded body. msgspec.DecodeError when it is no JSON."""
        return msgspec.json.decode(self.body)


class ClientStream:
    """An answer whose head is here. Read it by `pieces`, `events` or `read`, once."""

    def __init__(self, what: str) -> None:
        self.what = what  # for error messages: "POST http://..."
        self.status = 0
        self.headers: dict[str, str] = {}
        self.ended = False
        self.lost: Lost | None = None
        self._queue: deque[bytes] = deque()
        self._num_queued = 0
        self._paused = False
        self._wakeup: asyncio.Future[None] | None = None
        self._upstream: Upstream | None = None

    # -------------------------------------------------------------- Exchange

    def on_head(self, status: int, headers: RawHeaders) -> None:
        self.status = status
        self.headers = {n.decode("latin-1").lower(): v.decode("latin-1") for n, v in headers}
        self._wake()

    def on_body(self, piece: bytes) -> None:
        self._queue.append(piece)
        self._num_queued += len(piece)
        if self._num_queued > MAX_QUEUED and not self._paused and self._upstream is not None:
            self._paused = True
            self._upstream.pause_reading()
        self._wake()

    def on_end(self) -> None:
        self.ended = True
        self._wake()

    def on_lost(self, lost: Lost) -> None:
        self.lost = lost
        self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    # -------------------------------------------------------------- for the caller

    async def pieces(self) -> AsyncIterator[bytes]:
        """Body bytes as they come. PeerLost when the connection breaks before the body's end."""
        while True:
            while self._queue:
                piece = self._queue.popleft()
                self._num_queued -= len(piece)
                if self._paused and self._num_queued < MAX_QUEUED // 2 and self._upstream is not None:
                    self._paused = False
                    self._upstream.resume_reading()
                yield piece
            if self.ended:
                return
            if self.lost is not None:
                raise PeerLost(f"{self.what}: {self.lost.reason}")
            await self.wait()

    async def events(self) -> AsyncIterator[bytes]:
        """Payloads of the server-sent events, `[DONE]` included."""
        parser = SseParser()
        async for piece in self.pieces():
            for payload in parser.feed(piece):
                yield payload

    async def read(self, max_bytes: int = 256 << 20) -> bytes:
        """The whole body; PeerLost when it is longer than `max_bytes`."""
        parts: list[bytes] = []
        size = 0
        async for piece in self.pieces():
            parts.append(piece)
            size += len(piece)
            if size > max_bytes:
                raise PeerLost(f"{self.what}: the answer is longer than {max_bytes} bytes")
        return b"".join(parts)

    async def wait(self) -> None:
        """Return when something has changed: the head, a piece, the end or a loss."""
        self._wakeup = asyncio.get_running_loop().create_future()
        try:
            await self._wakeup
        finally:
            self._wakeup = None

    def begin(self, upstream: Upstream, request: bytes) -> None:
        """Send `request`. A stream can begin again only if it was lost with nothing received."""
        self.lost = None
        self._upstream = upstream
        upstream.start(request, self)

    def close(self) -> None:
        """Stop reading; an unfinished exchange closes its connection, so that the server sees its client leave."""
        if not self.ended and self.lost is None and self._upstream is not None:
            self._upstream.abort()


class Client:
    """Connections to any number of origins. Bound to the running loop; end it with `close`."""

    def __init__(
        self, *, max_idle: int = 256, max_idle_s: float = 4.0, connect_timeout_s: float = 2.0
    ) -> None:
        self._max_idle = max_idle
        self._max_idle_s = max_idle_s
        self._connect_timeout_s = connect_timeout_s
        self._pools: dict[Origin, Pool] = {}

    def pool(self, origin: Origin) -> Pool:
        """The pool of one origin."""
        if origin not in self._pools:
            self._pools[origin] = Pool(
                origin,
                max_idle=self._max_idle,
                max_idle_s=self._max_idle_s,
                connect_timeout_s=self._connect_timeout_s,
            )
        return self._pools[origin]

    async def request(
        self,
        method: str,
        url: str,
        *,
        body: bytes = b"",
        headers: Headers = (),
        timeout_s: float = 60.0,
        idempotent: bool | None = None,
    ) -> ClientResponse:
        """One request, whole answer, any status. PeerLost, Unreachable, or DeadlineExceeded after `timeout_s`."""
        async with self.stream(
            method, url, body=body, headers=headers, timeout_s=timeout_s, idempotent=idempotent
        ) as s:
            return ClientResponse(s.status, s.headers, await s.read())

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        url: str,
        *,
        body: bytes = b"",
        headers: Headers = (),
        timeout_s: float = 600.0,
        idempotent: bool | None = None,
    ) -> AsyncIterator[ClientStream]:
        """One request; the block runs once the head is here, within the same `timeout_s`. Leaving it early aborts."""
        origin, target = split_url(url)
        safe = method in IDEMPOTENT if idempotent is None else idempotent
        stream = ClientStream(f"{method} {url}")
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                await self._begin(stream, origin, request_bytes(method, origin, target, body, headers), safe)
                yield stream
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded(f"{stream.what}: no complete answer within {timeout_s:g} s") from None
        finally:
            stream.close()

    async def _begin(self, stream: ClientStream, origin: Origin, request: bytes, safe: bool) -> None:
        """Send, and wait for the head; again on a fresh connection after a stale one."""
        while True:
            pool = self.pool(origin)
            stream.begin(pool.take() or await connect(pool), request)
            while not stream.status and stream.lost is None:
                await stream.wait()
            lost = stream.lost
            if stream.status or lost is None:
                return
            if not (lost.reused and not lost.received and (safe or not lost.connected)):
                raise PeerLost(f"{stream.what}: {lost.reason}")

    async def send(
        self, method: str, url: str, exchange: Exchange, *, body: bytes = b"", headers: Headers = ()
    ) -> Upstream:
        """Start a request whose answer goes to `exchange` by callbacks. PeerLost when nobody listens."""
        origin, target = split_url(url)
        pool = self.pool(origin)
        upstream = pool.take() or await connect(pool)
        upstream.start(request_bytes(method, origin, target, body, headers), exchange)
        return upstream

    async def close(self) -> None:
        """Close all connections."""
        for pool in self._pools.values():
            pool.close()
        while any(pool.num_open for pool in self._pools.values()):
            await asyncio.sleep(0)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


async def connect(pool: Pool) -> Upstream:
    """`Pool.connect` with its OSErrors told as PeerLost, a refusal as Unreachable."""
    try:
        return await pool.connect()
    except OSError as e:
        reason = (
            "no answer to the connection attempt" if isinstance(e, TimeoutError) else (e.strerror or str(e))
        )
        lost = Unreachable if isinstance(e, ConnectionRefusedError) else PeerLost
        raise lost(f"cannot connect to {pool.origin.authority}: {reason}") from None
