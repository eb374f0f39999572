"""Two questions over HTTP to the router: is it /ready, and what do its /workers do? No client beyond that."""

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
    status, body = await _get(host, port, "/ready", timeout_s=timeout_s)
    return Readiness(status == 200, _hopeless(body))


async def workers(host: str, port: int, key: str, *, timeout_s: float = TIMEOUT_S) -> list[dict[str, Any]]:
    """What GET /workers says of the engines; nothing where the router does not answer, or not to this key."""
    status, body = await _get(host, port, "/workers", key=key, timeout_s=timeout_s)
    try:
        told: Any = json.loads(body)["workers"] if status == 200 else []
    except (ValueError, KeyError, TypeError):
        return []
    return [w for w in told if isinstance(w, dict)]


async def _get(host: str, port: int, path: str, *, timeout_s: float, key: str = "") -> tuple[int, bytes]:
    """(status, body); 0 where nobody answers in time."""
    lines = [f"GET {path} HTTP/1.1", f"Host: {reach(host)}:{port}", "Connection: close"]
    lines += [f"Authorization: Bearer {key}"] if key else []
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(reach(host), port)
            try:
                writer.write("\r\n".join([*lines, "", ""]).encode())
                status = (await reader.readline()).split()[1:2]
                answer = b""
                while len(answer) < _MOST_BYTES and (piece := await reader.read(_MOST_BYTES)):
                    answer += piece
            finally:
                writer.close()
        return int(status[0]) if status else 0, answer.partition(b"\r\n\r\n")[2]
    except (OSError, TimeoutError, ValueError):
        return 0, b""


def _hopeless(body: bytes) -> str:
    """The first problem of a pair that is an error of configuration."""
    try:
        problems: Any = json.loads(body)["problems"].values()
        return next((str(p["message"]) for p in problems if p["code"] == "config_error"), "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""
