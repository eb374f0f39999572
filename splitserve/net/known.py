"""Heads that were parsed before. Two programs that talk to each other send the same few heads again and again.

    a segment ─▶ its head is known, and its body is whole ─▶ what the parser made of the same bytes before
            └──▶ anything else ─▶ the parser

Only heads with a plain framing are remembered: HTTP/1.1, at most one Content-Length, nothing that changes the
connection. The bytes of the head are the key, so a known head means exactly what it meant to the parser.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from .request import RawHeaders

T = TypeVar("T")

MAX_HEADS = 512
MAX_HEAD_BYTES = 2048
_END = b"\r\n\r\n"


class KnownHeads(Generic[T]):
    """Heads of one direction with what was made of each: (`T`, bytes of the body that follows)."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[bytes, tuple[T, int]] = {}

    def whole(self, data: bytes) -> tuple[T, bytes] | None:
        """(what the head meant, the body) of a segment that is exactly one message with a known head."""
        end = data.find(_END, 0, MAX_HEAD_BYTES) + 4
        found = self._found.get(data[:end])
        if found is None or len(data) != end + found[1]:
            return None
        return found[0], data[end:]

    def learn(self, data: bytes, headers: RawHeaders, meaning: T) -> None:
        """`data` was one whole message with these headers; does nothing if its framing is not plain."""
        end = data.find(_END, 0, MAX_HEAD_BYTES) + 4
        size = plain_size(headers)
        if end < 4 or size is None or len(data) != end + size:
            return
        if len(self._found) >= MAX_HEADS:  # heads that are never the same: begin anew rather than grow
            self._found.clear()
        self._found[data[:end]] = meaning, size


def plain_size(headers: RawHeaders) -> int | None:
    """Bytes of the body; None where anything but one Content-Length has a say about framing or connection."""
    size = 0
    num_lengths = 0
    for name, value in headers:
        match name.lower():
            case b"content-length":
                if not value.isdigit():
                    return None
                size = int(value)
                num_lengths += 1
            case b"transfer-encoding" | b"upgrade" | b"expect" | b"trailer" | b"http2-settings":
                return None
            case b"connection":
                if value.lower() != b"keep-alive":
                    return None
    return size if num_lengths <= 1 else None
