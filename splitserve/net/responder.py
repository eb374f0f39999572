"""The answer to one request: whole, as a stream of chunks, or raw bytes that somebody else has framed.

    unstarted ── send / send_json / fail ─────────────────▶ ended
        ├─────── start_stream ─▶ write* (one frame each) ─▶ end ─▶ ended
        └─────── write_raw* (head included) ──────────────▶ end_raw ─▶ ended

After the client has left every method is harmless and does nothing. One call is one transport write.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from splitserve.errors import InvariantError, Overloaded, SplitserveError

from .request import Headers, header_lines, status_line

if TYPE_CHECKING:
    from .connection import Connection

_encode = msgspec.json.Encoder().encode


class Responder:
    """Made by the connection for each request."""

    __slots__ = (
        "_chunks",
        "_conn",
        "_ended",
        "_framed",
        "_head_only",
        "_keep_alive",
        "_left",
        "ended",
        "gone",
        "on_left",
        "started",
    )

    def __init__(self, conn: Connection, *, head_only: bool, keep_alive: bool, chunks: bool) -> None:
        self._conn = conn
        self._head_only = head_only
        self._keep_alive = keep_alive
        self._chunks = chunks  # False for HTTP/1.0: a stream ends with the connection
        self._framed = False
        self._left: asyncio.Event | None = None
        self._ended: asyncio.Future[None] | None = None
        self.started = False
        self.ended = False
        self.gone = False
        self.on_left: Callable[[], None] | None = None  # called once, when the client leaves before the end

    # -------------------------------------------------------------- whole answers

    def send(
        self, status: int, body: bytes, content_type: str = "application/json", headers: Headers = ()
    ) -> None:
        """Answer with `body` in one write."""
        head = self._head(status, content_type, headers, b"content-length: %d\r\n" % len(body))
        self._write(head if self._head_only else head + body)
        self._finish()

    def send_json(self, status: int, obj: Any, headers: Headers = ()) -> None:
        """Answer with anything msgspec encodes."""
        self.send(status, _encode(obj), headers=headers)

    def fail(self, error: SplitserveError) -> None:
        """Answer with the error's own status and body; Retry-After where it has one."""
        self.send_json(error.status, {"error": error.to_dict()}, retry_after(error))

    @staticmethod
    def error_bytes(error: SplitserveError) -> bytes:
        """A whole response that closes the connection, for requests that never reached an app."""
        body = _encode({"error": error.to_dict()})
        lines = header_lines(retry_after(error))
        return b"%scontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n%s\r\n%s" % (
            status_line(error.status),
            len(body),
            lines,
            body,
        )

    # -------------------------------------------------------------- streams

    def start_stream(
        self, status: int = 200, content_type: str = "text/event-stream", headers: Headers = ()
    ) -> None:
        """Send the head now. The body follows in chunks, or, to an HTTP/1.0 client, until the connection closes."""
        if not self._chunks:
            self._keep_alive = False
        self._framed = self._chunks
        self._write(
            self._head(
                status, content_type, headers, b"transfer-encoding: chunked\r\n" if self._chunks else b""
            )
        )

    def write(self, piece: bytes) -> None:
        """One frame of the stream. An empty piece is nothing (an empty chunk would end the stream)."""
        if not self.started or self.ended:
            raise InvariantError(f"write outside a stream: started={self.started}, ended={self.ended}")
        if piece and not self._head_only:
            self._write(b"%x\r\n%s\r\n" % (len(piece), piece) if self._framed else piece)

    def end(self, piece: bytes = b"") -> None:
        """Last frame, if any, and the end of the stream, in one write."""
        if self.ended:
            return
        last = b"%x\r\n%s\r\n" % (len(piece), piece) if piece and self._framed else piece
        if not self._head_only:
            self._write(last + b"0\r\n\r\n" if self._framed else last)
        self._finish()

    async def drain(self) -> None:
        """Wait while the client's socket takes no more. Returns at once when the client has left: look at `gone`."""
        await self._conn.drained()

    # -------------------------------------------------------------- raw

    def write_raw(self, framed: bytes) -> None:
        """Bytes that carry their own head or framing, untouched. The caller answers for their being HTTP/1.1."""
        self.started = True
        self._write(framed)

    def end_raw(self, *, keep_alive: bool) -> None:
        """The raw response is complete; `keep_alive` says whether its head promised another."""
        self._keep_alive = self._keep_alive and keep_alive
        self._finish()

    def abort(self) -> None:
        """Cut the connection: the only honest end of a body that cannot be completed."""
        self._mark_ended()
        self._conn.abort()

    # -------------------------------------------------------------- the client

    @property
    def closed(self) -> asyncio.Event:
        """Set within milliseconds of the client's leaving before the end of the answer."""
        if self._left is None:
            self._left = asyncio.Event()
            if self.gone:
                self._left.set()
        return self._left

    async def finished(self) -> None:
        """Return when the answer is complete, was cut, or the client has left: for apps that answer by callbacks."""
        if not self.ended and not self.gone:
            self._ended = self._conn.loop.create_future()
            await self._ended

    @property
    def keeps_alive(self) -> bool:
        return self._keep_alive

    @property
    def takes_chunks(self) -> bool:
        """Whether the client understands chunked framing (HTTP/1.1)."""
        return self._chunks

    def watch_writable(self, callback: Callable[[bool], None] | None) -> None:
        """Call `callback(False)` when the client's socket is full and `callback(True)` when it has drained."""
        self._conn.on_writable = callback

    def client_left(self) -> None:
        """Told by the connection."""
        self.gone = True
        self._tell_ended()
        if self._left is not None:
            self._left.set()
        if self.on_left is not None:
            self.on_left()

    # -------------------------------------------------------------- inside

    def _head(self, status: int, content_type: str, headers: Headers, framing: bytes) -> bytes:
        if self.started:
            raise InvariantError(f"a second response to one request (status {status})")
        close = b"" if self._keep_alive else b"connection: close\r\n"
        extra = header_lines(headers) if headers else b""
        kind = content_type.encode("latin-1")
        self.started = True  # not before: a header that cannot be sent must leave room for a 500
        return b"%scontent-type: %s\r\n%s%s%s\r\n" % (status_line(status), kind, framing, close, extra)

    def _write(self, raw: bytes) -> None:
        transport = self._conn.transport
        if transport is not None and not self.gone and raw:
            transport.write(raw)

    def _mark_ended(self) -> None:
        self.ended = True
        self._tell_ended()

    def _tell_ended(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _finish(self) -> None:
        self.ended = True
        if self._ended is not None:
            self._tell_ended()
        self._conn.on_writable = None
        self._conn.finished(self, keep_alive=self._keep_alive)


def retry_after(error: SplitserveError) -> Headers:
    """The Retry-After header of an Overloaded; nothing for others."""
    if isinstance(error, Overloaded):
        return (("retry-after", str(max(1, math.ceil(error.retry_after_s)))),)
    return ()
