"""Heads that pass through the router: which request headers go to the engines, which response headers to the client.

Hop-by-hop headers end here; framing is set anew on each side.
"""

from __future__ import annotations

from splitserve.net.request import RawHeaders, status_line

from .fleet import Route
from .trail import HEADER as RESUME

FORWARDED = frozenset(
    (
        b"authorization",
        b"x-request-id",
        b"x-correlation-id",
        b"traceparent",
        b"tracestate",
        b"x-smg-routing-key",
    )
)
OURS = b"x-splitserve-router: 1\r\n"
"""Tells decode that nobody puts prefill's prompt logprobs in front of its own, as sglang_router does, and that its
stream can be continued elsewhere (trail.py)."""

_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
        RESUME,
    )
)


def request_id(headers: RawHeaders) -> bytes:
    """The client's X-Request-Id; empty if it sent none."""
    return next((value.strip() for name, value in headers if name.lower() == b"x-request-id"), b"")


def forwarded_lines(headers: RawHeaders, *, but: frozenset[bytes] = frozenset()) -> bytes:
    """Header lines of a client's request that the engines should see. `but`: those that the router sends itself."""
    names = FORWARDED - but if but else FORWARDED
    return b"".join([b"%s: %s\r\n" % (n, v) for n, v in headers if n.lower() in names])


def request_parts(method: str, target: bytes, lines: bytes, body: bytes) -> tuple[bytes, bytes]:
    """A request to an engine, in two parts: the value of its Host header belongs between them."""
    before = b"%s %s HTTP/1.1\r\nhost: " % (method.encode(), target)
    after = b"\r\ncontent-type: application/json\r\n%scontent-length: %d\r\n%s\r\n%s" % (
        OURS,
        len(body),
        lines,
        body,
    )
    return before, after


def response_head(status: int, headers: RawHeaders, framing: bytes, extra: bytes = b"") -> bytes:
    """An engine's head as the client gets it: its own headers, our framing."""
    kept = [b"%s: %s\r\n" % (n, v) for n, v in headers if n.lower() not in _HOP_BY_HOP]
    return b"%s%s%s%s\r\n" % (status_line(status), b"".join(kept), framing, extra)


def route_lines(route: Route, *, tell_route: bool) -> bytes:
    """x-splitserve-route where it is asked for, x-splitserve-warning where there is one."""
    if not (tell_route or route.warning):
        return b""
    lines = b""
    if tell_route:
        prefill = route.prefill.id if route.prefill else "none"
        lines += (
            f"x-splitserve-route: prefill={prefill}, answer={route.answer.id}, why={route.why}\r\n".encode()
        )
    if route.warning:
        lines += f"x-splitserve-warning: {route.warning}\r\n".encode()
    return lines
