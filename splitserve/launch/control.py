"""The supervisor's control socket: one JSON line in, one JSON line out, over a Unix socket that only its owner opens.

    {"op": "status"}                          {"ok": true, "state": {...}}
    {"op": "stop", "kill": false}             {"ok": true}               then the supervisor stops
    {"op": "restart", "name": "decode-0"}     {"ok": true}
    {"op": "fence", "pid": 7, "start": 99}    {"ok": true, "dead": true}  only once that process cannot write any more
    anything wrong                            {"ok": false, "error": "...", "fix": "..."}

`ask` is the client: blocking, for commands. The serving half knows no operation; the supervisor passes one function.
Engines may call `ask` too (fencing a silent peer); they are given the socket's path as --control.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from splitserve.errors import PeerLost, SplitserveError

_MAX_LINE = 1 << 20

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def ask(path: Path, request: dict[str, Any], *, timeout_s: float = 10.0) -> dict[str, Any]:
    """Send one request and return the answer. PeerLost where no supervisor answers."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            s.settimeout(timeout_s)
            s.connect(os.fspath(path))
            s.sendall(json.dumps(request).encode() + b"\n")
            raw = b""
            while not raw.endswith(b"\n"):
                piece = s.recv(65536)
                if not piece:
                    break
                raw += piece
        answer = json.loads(raw)
    except (OSError, ValueError) as e:
        raise PeerLost(f"no supervisor answers at {path}: {e}", fix="see `splitserve status`") from e
    return answer if isinstance(answer, dict) else {"ok": False, "error": f"not an object: {answer!r}"}


async def serve(path: Path, answer: Answer) -> asyncio.AbstractServer:
    """Listen at `path` (mode 0600) and answer each line of each connection with `answer`."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(json.dumps(await _answered(line, answer)).encode() + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError):  # the client left, or its line is longer than _MAX_LINE
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(talk, path, limit=_MAX_LINE)
    path.chmod(0o600)
    return server


async def _answered(line: bytes, answer: Answer) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except ValueError:
        return {"ok": False, "error": "not JSON", "fix": 'send one line such as {"op": "status"}'}
    if not isinstance(request, dict):
        return {"ok": False, "error": "not a JSON object", "fix": 'send one line such as {"op": "status"}'}
    try:
        return await answer(request)
    except SplitserveError as e:
        return {"ok": False, "error": e.message, "fix": e.fix}
