"""What has come of one stream that another engine could continue, and how to ask for that. Pure.

Our engines say in a stream's head (x-splitserve-resume) that it can be continued, and then put the token ids that each
event shows before it, as an SSE comment (server/resumption.py). Here the comments are taken out and the ids kept, and
only whole events pass: so what the client has got and what the ids stand for are the same at every moment.

    :12,13                                 kept
    data: {"choices": ...}                 passed on
    data: {"cho                            waits for its end; lost with its engine, and made again by the next one
"""

from __future__ import annotations

from typing import Any

import msgspec

from splitserve.net.request import RawHeaders

HEADER = b"x-splitserve-resume"


class Trail:
    """One client's stream, whichever engines it comes from."""

    __slots__ = ("_ids", "_rest", "_ticket")

    def __init__(self, ticket: bytes) -> None:
        self._ticket = ticket
        self._ids = bytearray()  # as JSON: "12,13,"
        self._rest = b""

    @staticmethod
    def of(headers: RawHeaders) -> Trail | None:
        """A fresh one for a stream with this head; None when its engine offers no continuation."""
        ticket = _ticket_in(headers)
        return None if ticket is None else Trail(ticket)

    @property
    def num_tokens(self) -> int:
        return self._ids.count(b",")

    def take(self, piece: bytes) -> bytes:
        """The whole events that `piece` completes, without our comments; may be empty."""
        if self._rest:
            piece = self._rest + piece
        if piece.endswith(b"\n\n"):
            self._rest = b""
        else:
            end = piece.rfind(b"\n\n")
            cut = end + 2 if end >= 0 else 0
            self._rest, piece = piece[cut:], piece[:cut]
        events = piece.split(b"\n\n")  # no event of our engines has an empty line inside
        for i, event in enumerate(events):
            if event.startswith(b":"):
                ids, _, events[i] = event[1:].partition(b"\n")
                self._ids += ids + b","
        return b"\n\n".join(events)

    def broken(self) -> None:
        """The engine is lost, and with it the event that was not complete."""
        self._rest = b""

    def continues(self, headers: RawHeaders) -> bool:
        """Whether a stream with this head begins where this one stopped."""
        try:
            told: Any = msgspec.json.decode(_ticket_in(headers) or b"null")
        except msgspec.DecodeError:
            return False
        return isinstance(told, dict) and told.get("num_tokens") == self.num_tokens

    def field(self) -> bytes:
        """What to add to the request's body, with a comma behind it."""
        return b'"splitserve_resume":{"ticket":%s,"tokens":[%s]},' % (self._ticket, self._ids[:-1])


def _ticket_in(headers: RawHeaders) -> bytes | None:
    return next((value for name, value in headers if name.lower() == HEADER), None)
