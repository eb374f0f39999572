"""Raw HTTP for tests: run a coroutine on uvloop with a bound, speak bytes to a port, read answers strictly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def go(work: Coroutine[Any, Any, T], *, within_s: float = 30.0) -> T:
    """Run a test's coroutine on a fresh uvloop; TimeoutError instead of a hang."""

    async def bounded() -> T:
        async with asyncio.timeout(within_s):
            return await work

    return uvloop.run(bounded())


async def until(condition: Callable[[], bool], *, within_s: float = 5.0, what: str = "") -> None:
    """Wait, a turn of the loop at a time, until `condition` holds."""
    end = asyncio.get_running_loop().time() + within_s
    while not condition():
        if asyncio.get_running_loop().time() > end:
            raise AssertionError(f"not within {within_s} s: {what or condition}")
        await asyncio.sleep(0.002)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool = True  # ended as its framing says

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


class Wire:
    """One client connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int) -> Wire:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> Answer:
        """One response, checked: a strict reader that accepts only what HTTP/1.1 allows."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = head[:-4].split(b"\r\n")
        version, status, _ = first.split(b" ", 2)
        assert version == b"HTTP/1.1", first
        headers: dict[str, str] = {}
        for line in lines:
            name, value = line.decode("latin-1").split(":", 1)
            assert name.lower() not in headers, f"{name} twice"
            headers[name.lower()] = value.strip()
        if int(status) < 200:
            return Answer(int(status), headers, b"")
        assert not {"content-length", "transfer-encoding"} <= headers.keys()
        found = Answer(int(status), headers, b"")
        try:
            if "content-length" in headers:
                found.body = await self.reader.readexactly(int(headers["content-length"]))
            elif headers.get("transfer-encoding") == "chunked":
                await self._chunks(found)
            else:
                assert headers.get("connection") == "close", "no framing, yet the connection stays"
                found.body = await self.reader.read()
        except (asyncio.IncompleteReadError, ConnectionResetError) as e:
            found.body += getattr(e, "partial", b"")
            found.whole = False
        return found

    async def _chunks(self, found: Answer) -> None:
        pieces: list[bytes] = []
        try:
            await self._read_chunks(pieces)
        finally:
            found.body = b"".join(pieces)

    async def _read_chunks(self, pieces: list[bytes]) -> None:
        while True:
            size = int((await self.reader.readuntil(b"\r\n"))[:-2], 16)
            piece = await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
            if size == 0:
                return
            pieces.append(piece)

    async def ended(self, *, within_s: float = 5.0) -> bytes:
        """Everything until the server closes."""
        async with asyncio.timeout(within_s):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except OSError:
            return

    def abort(self) -> None:
        self.writer.transport.abort()

    async def __aenter__(self) -> Wire:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


async def ask(
    port: int, method: str, target: str, body: bytes | dict[str, Any] | None = None, headers: str = ""
) -> Answer:
    """One request on a connection of its own."""
    if isinstance(body, dict):
        body = json.dumps(body).encode()
    async with await Wire.open(port) as wire:
        await wire.send(request(method, target, body, headers))
        return await wire.answer()


def request(method: str, target: str, body: bytes | None = None, headers: str = "") -> bytes:
    length = f"content-length: {len(body)}\r\n" if body is not None else ""
    return f"{method} {target} HTTP/1.1\r\nhost: test\r\n{length}{headers}\r\n".encode() + (body or b"")
