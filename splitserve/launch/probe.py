"""One question over HTTP, asked by the supervisor and by `status`: is the router /ready? No client beyond that."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from splitserve.launch.commands import reach

PAUSE_S = 0.1
TIMEOUT_S = 15.0
"""A readiness answer waits for a real token, which on a busy two-core machine may take seconds."""


_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Readiness:
    """`hopeless` is why waiting will not help: the pair is configured so that no token can ever come through."""

    ready: bool = False
    hopeless: str = ""


async def ask(host: str, port: int, *, timeout_s: float = TIMEOUT_S) -> Readiness:
    """What GET /ready says; not ready where nobody answers in time."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(reach(host), port)
            try:
                writer.write(
                    f"GET /ready HTTP/1.1\r\nHost: {reach(host)}:{port}\r\nConnection: close\r\n\r\n".encode()
                )
                status = await reader.readline()
                rest = await reader.read(_MOST_BYTES)
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):
        return Readiness()
    return Readiness(status.split()[1:2] == [b"200"], _hopeless(rest.partition(b"\r\n\r\n")[2]))


def _hopeless(body: bytes) -> str:
    """The first problem of a pair that is an error of configuration."""
    try:
        problems: Any = json.loads(body)["problems"].values()
        return next((str(p["message"]) for p in problems if p["code"] == "config_error"), "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""
