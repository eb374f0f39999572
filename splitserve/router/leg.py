"""One half of one try: a request on one upstream connection, and what came back. Tells its relay; decides nothing."""

from __future__ import annotations

from typing import Protocol

from splitserve.net.request import RawHeaders
from splitserve.net.upstream import Lost, Upstream

from .fleet import Member

MAX_KEPT = 4 << 20
"""Bytes of an answer kept back to be sent whole; of an error or of prefill's answer as well."""


ERROR_EVENT = b'data: {"error"'
"""How our engines' streams begin an error; no text of an answer can hold it: there quotes are escaped."""


class Listener(Protocol):
    """What a leg tells."""

    def on_piece(self, leg: Leg, piece: bytes) -> None: ...
    def on_leg_end(self, leg: Leg) -> None: ...
    def on_leg_lost(self, leg: Leg, lost: Lost) -> None: ...


class Leg:
    """Implements net.upstream.Exchange.

    `answers`: the bytes of a 2xx body go to the listener as they come. Any other body is kept (up to MAX_KEPT) if
    `keeps`, or if it explains an error, and otherwise dropped.
    """

    __slots__ = (
        "_kept",
        "_listener",
        "_size",
        "answers",
        "ended",
        "error_event",
        "headers",
        "keeps",
        "lost",
        "member",
        "status",
        "upstream",
    )

    def __init__(self, member: Member, listener: Listener, *, answers: bool, keeps: bool = False) -> None:
        self.member = member
        self.answers = answers
        self.keeps = keeps
        self.status = 0  # 0: no head yet
        self.headers: RawHeaders = []
        self.ended = False  # by its end, a loss or stop()
        self.lost = False
        self.error_event = b""  # of prefill's stream: its status was sent before it failed
        self.upstream: Upstream | None = None
        self._listener: Listener | None = listener
        self._kept: list[bytes] = []
        self._size = 0

    def start(self, upstream: Upstream, request: bytes) -> None:
        self.upstream = upstream
        upstream.start(request, self)

    def stop(self) -> None:
        """Close the connection at once (the engine aborts) and tell nothing more."""
        self._listener = None
        if not self.ended:
            self.ended = True
            if self.upstream is not None:
                self.upstream.abort()

    def detach(self) -> None:
        """Let the response come to its end, unheard, so that the connection can be used again."""
        self._listener = None

    @property
    def body(self) -> bytes:
        """What was kept."""
        return b"".join(self._kept)

    @property
    def refused(self) -> bool:
        """The engine answered with an error status."""
        return self.status >= 400

    @property
    def streams(self) -> bool:
        """Whether the engine answers with server-sent events."""
        return self.header(b"content-type").startswith(b"text/event-stream")

    def header(self, name: bytes, default: bytes = b"") -> bytes:
        for n, value in self.headers:
            if n.lower() == name:
                return value
        return default

    # -------------------------------------------------------------- Exchange

    def on_head(self, status: int, headers: RawHeaders) -> None:
        self.status = status
        self.headers = headers

    def on_body(self, piece: bytes) -> None:
        if self._listener is None:
            return
        if self.answers and not self.refused:
            self._listener.on_piece(self, piece)
        elif not self.answers and ERROR_EVENT in piece:
            self.error_event = piece
        elif (self.keeps or self.refused) and self._size < MAX_KEPT:
            self._kept.append(piece)
            self._size += len(piece)

    def on_end(self) -> None:
        self.ended = True
        if self._listener is not None:
            self._listener.on_leg_end(self)

    def on_lost(self, lost: Lost) -> None:
        self.ended = self.lost = True
        if self._listener is not None:
            self._listener.on_leg_lost(self, lost)
