"""Server-sent events: format one, or find them in a byte stream cut anywhere. Only the `data` field is kept."""

from __future__ import annotations

import re

DONE = b"data: [DONE]\n\n"
"""The last event of every OpenAI-style stream."""

_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")


def event(payload: bytes) -> bytes:
    """One event; a payload of several lines becomes several data lines."""
    if b"\n" not in payload:
        return b"data: " + payload + b"\n\n"
    return b"".join(b"data: %s\n" % line for line in payload.split(b"\n")) + b"\n"


class SseParser:
    """Feed bytes as they come; get the payload of each event that is complete.

    `max_event` bounds what an endless event can hold in memory; ValueError beyond it.
    """

    def __init__(self, max_event: int = 8 << 20) -> None:
        self._buffer = bytearray()
        self._max_event = max_event

    def feed(self, piece: bytes) -> list[bytes]:
        """Payloads completed by `piece`, in order. Comments and events without data yield nothing."""
        seen = max(0, len(self._buffer) - 3)  # an event's end may have begun in what came before
        self._buffer += piece
        found: list[bytes] = []
        start = 0
        for end in _EVENT_END.finditer(self._buffer, seen):
            payload = _payload(bytes(self._buffer[start : end.start()]))
            if payload is not None:
                found.append(payload)
            start = end.end()
        if start:
            del self._buffer[:start]
        if len(self._buffer) > self._max_event:
            raise ValueError(f"a server-sent event is longer than {self._max_event} bytes")
        return found

    @property
    def rest(self) -> bytes:
        """What has come of an event that is not complete: should be blank at the end of a stream."""
        return bytes(self._buffer)


def _payload(lines: bytes) -> bytes | None:
    values = []
    for line in re.split(rb"\r\n|\n|\r", lines):
        if line.startswith(b"data:"):
            values.append(line[6:] if line.startswith(b"data: ") else line[5:])
        elif line == b"data":
            values.append(b"")
    return b"\n".join(values) if values else None
