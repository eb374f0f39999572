"""What a server received and the bytes of what it answers: `Limits`, `Request`, response heads. No sockets.

Headers and the query are decoded only when somebody asks for them: a proxy never does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote

Headers = Iterable[tuple[str, str]]

RawHeaders = list[tuple[bytes, bytes]]

AN_OBJECT = "send one JSON object in UTF-8, as docs/api.md shows"
"""What to do about a body that is none."""


@dataclass(frozen=True)
class Limits:
    """What one client may cost. Each violation is answered once, typed, and ends the connection.

    max_head_bytes        431  request line and headers
    max_body_bytes        413  body after un-chunking (framing may add 16 KiB and 8 bytes for each body byte)
    head_timeout_s        400  from a head's first byte to its last (slow-loris)
    body_timeout_s        400  from the end of the head to the end of the body
    idle_timeout_s        -    a silent connection is closed without a word
    write_timeout_s       -    a client that takes nothing for so long is cut off
    max_connections       503  after the longest idle connection has been closed to make room
    """

    max_head_bytes: int = 32 * 1024
    max_body_bytes: int = 8 * 1024 * 1024
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    idle_timeout_s: float = 75.0
    write_timeout_s: float = 60.0
    max_connections: int = 4096


class RequestHead(NamedTuple):
    """What the bytes of a head said."""

    method: str
    target: bytes
    headers: RawHeaders


class Request:
    """One request, complete with its body.

    `target` is the request target as sent (path and query, bytes); `raw_headers` keeps order and case.
    """

    def __init__(self, method: str, target: bytes, raw_headers: RawHeaders, body: bytes) -> None:
        self.method = method
        self.target = target
        self.raw_headers = raw_headers
        self.body = body
        self.path, self._raw_query = _split(target)

    @property
    def origin_form(self) -> bytes:
        """The target without scheme and host: what is asked of another server in its turn."""
        return _origin_form(self.target)

    @cached_property
    def headers(self) -> dict[str, str]:
        """Lower-case names; values of a repeated header are joined by commas."""
        found: dict[str, str] = {}
        for raw_name, raw_value in self.raw_headers:
            name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1").strip()
            found[name] = f"{found[name]}, {value}" if name in found else value
        return found

    @cached_property
    def query(self) -> dict[str, str]:
        """Decoded query; the last of equal keys wins."""
        return dict(parse_qsl(self._raw_query.decode("latin-1"), keep_blank_values=True))

    def __repr__(self) -> str:
        return f"Request({self.method} {self.path}, body={len(self.body)})"


@lru_cache(maxsize=64)
def _split(target: bytes) -> tuple[str, bytes]:
    """(path, query) of a target. Clients ask for the same few paths again and again."""
    path, _, query = _origin_form(target).partition(b"?")
    text = path.decode("latin-1")
    return unquote(text) if "%" in text else text, query


def _origin_form(target: bytes) -> bytes:
    """`/path?query` of a target that may be in absolute form, as proxies send it: http://host/path?query."""
    if target.startswith(b"/"):
        return target
    _, scheme, rest = target.partition(b"://")
    if not scheme:
        return target  # "*" or the host:port of CONNECT
    _, slash, path = rest.partition(b"/")
    return slash + path or b"/"


_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}


def status_line(status: int) -> bytes:
    """`HTTP/1.1 200 OK` and its line end."""
    return _STATUS_LINES.get(status) or f"HTTP/1.1 {status} -\r\n".encode()


def named(rid: str, request_id: str) -> str:
    """A request as logs have it, found by either: its rid, and the client's X-Request-Id where that is another."""
    if rid and request_id and request_id != rid:
        return f"{rid} [X-Request-Id {request_id}]"
    return rid or request_id or "without a name"


def header_lines(headers: Headers) -> bytes:
    """Encoded header lines. ValueError for a name or value that would start another line."""
    lines = [f"{name}: {value}\r\n" for name, value in headers]
    for line in lines:
        if line.count("\n") > 1 or line.count("\r") > 1:
            raise ValueError(f"line end inside a response header: {line!r}")
    return "".join(lines).encode("latin-1")
