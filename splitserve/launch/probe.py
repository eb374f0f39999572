"""One question over HTTP, asked by the supervisor and by `status`: does /ready answer 200? No client beyond that."""

from __future__ import annotations

import asyncio

from splitserve.launch.commands import reach

PAUSE_S = 0.1
TIMEOUT_S = 15.0
"""A readiness answer waits for a real token, which on a busy two-core machine may take seconds."""


async def ready(host: str, port: int, *, timeout_s: float = TIMEOUT_S) -> bool:
    """True when GET /ready is answered with 200 in time."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(reach(host), port)
            try:
                writer.write(
                    f"GET /ready HTTP/1.1\r\nHost: {reach(host)}:{port}\r\nConnection: close\r\n\r\n".encode()
                )
                status = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):
        return False
    return status.split()[1:2] == [b"200"]
