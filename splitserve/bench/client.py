"""Sends asks to an OpenAI-style server and marks what comes back, closed loop or open loop.

Times are taken when bytes arrive (in the connection's callback), not when a waiting task gets its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from splitserve.errors import SplitserveError
from splitserve.net.client import Client
from splitserve.net.keys import bearer
from splitserve.net.request import RawHeaders
from splitserve.net.sse import SseParser
from splitserve.net.upstream import Lost

from .metrics import Marks
from .workload import Ask


class _Usage(msgspec.Struct):
    prompt_tokens: int = -1
    completion_tokens: int = -1


class _Choice(msgspec.Struct):
    text: str | None = ""
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, object] | None = None


_decode = msgspec.json.Decoder(_Event).decode
_encode = msgspec.json.Encoder().encode


class Asking:
    """One request on the wire (a net.upstream.Exchange): fills its Marks."""

    def __init__(self, marks: Marks, now: Callable[[], float]) -> None:
        self.marks = marks
        self._now = now
        self._parser = SseParser()
        self._status = 0
        self._refusal = b""
        self._last_s = 0.0
        self._told_end = False
        self.unheard = False  # the server had closed the connection, as some do after each answer: ask again
        self.over = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, headers: RawHeaders) -> None:  # noqa: ARG002
        self._status = status

    def on_body(self, piece: bytes) -> None:
        if self._status != 200:
            self._refusal = (self._refusal + piece)[:2000]
            return
        now = self._now()
        try:
            for payload in self._parser.feed(piece):
                self._event(payload, now)
        except (ValueError, msgspec.DecodeError, msgspec.ValidationError) as e:
            self._fail(f"no completion event: {e}")

    def _event(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self._told_end = True
            return
        event = _decode(payload)
        if event.error is not None:
            self._fail(f"error event: {event.error.get('message')}")
            return
        if event.usage is not None:
            self.marks.usage_input = event.usage.prompt_tokens
            self.marks.usage_output = event.usage.completion_tokens
        if not event.choices or (event.choices[0].finish_reason and not event.choices[0].text):
            return
        self.marks.num_events += 1
        if self.marks.first_s < 0:
            self.marks.first_s = now
        else:
            self.marks.gaps_s.append(now - self._last_s)
        self._last_s = now

    def on_end(self) -> None:
        if self._status != 200:
            self._fail(f"HTTP {self._status}: {_message(self._refusal)}")
        elif not self._told_end:
            self._fail("the stream ended without [DONE]")
        else:
            self.marks.end_s = self._last_s if self._last_s else self._now()
        self._done()

    def on_lost(self, lost: Lost) -> None:
        self.unheard = lost.unheard
        if not lost.unheard:
            self._fail(lost.reason)
        self._done()

    def _fail(self, why: str) -> None:
        self.marks.error = self.marks.error or why

    def _done(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


class LoadClient:
    """Sends asks to one server. `timeout_s` is for each request."""

    def __init__(
        self,
        client: Client,
        url: str,
        *,
        model: str,
        now: Callable[[], float],
        timeout_s: float = 600.0,
        api_key: str = "",
    ) -> None:
        self._client = client
        self._url = f"{url}/v1/completions"
        self._model = model
        self._now = now
        self._timeout_s = timeout_s
        self._headers = [("content-type", "application/json"), *bearer(api_key)]

    async def ask(self, ask: Ask) -> Marks:
        """One request; whatever happens to it stands in the marks."""
        marks = Marks(len(ask.prompt), ask.output_len)
        body = _encode(
            {
                "model": self._model,
                "prompt": ask.prompt,
                "max_tokens": ask.output_len,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        marks.sent_s = self._now()
        while await self._unheard(Asking(marks, self._now), body):
            pass
        return marks

    async def _unheard(self, asking: Asking, body: bytes) -> bool:
        """Send once and wait for the end. Whether it met a connection that was closed already: the next is another."""
        marks = asking.marks
        try:
            upstream = await self._client.send("POST", self._url, asking, body=body, headers=self._headers)
        except SplitserveError as e:
            marks.error = e.message
            return False
        try:
            async with asyncio.timeout(self._timeout_s):
                await asking.over
        except TimeoutError:
            marks.error = marks.error or f"no complete answer within {self._timeout_s:g} s"
        finally:
            if not asking.over.done() or asking.over.cancelled():
                upstream.abort()
        return asking.unheard

    async def closed_loop(
        self, asks: Sequence[Ask], concurrency: int, told: Callable[[Marks], None] = lambda _: None
    ) -> tuple[list[Marks], float]:
        """Keep `concurrency` requests running until all are done. (marks in order, duration in seconds)."""
        results: list[Marks | None] = [None] * len(asks)
        waiting = iter(range(len(asks)))

        async def lane() -> None:
            for i in waiting:
                results[i] = marks = await self.ask(asks[i])
                told(marks)

        start = self._now()
        async with asyncio.TaskGroup() as lanes:
            for _ in range(min(concurrency, len(asks))):
                lanes.create_task(lane())
        return [m for m in results if m is not None], self._now() - start

    async def open_loop(
        self, asks: Sequence[Ask], told: Callable[[Marks], None] = lambda _: None
    ) -> tuple[list[Marks], float]:
        """Send each ask at its time, however many are running. (marks in order, duration in seconds)."""
        start = self._now()

        async def one(ask: Ask) -> Marks:
            await asyncio.sleep(max(0.0, start + ask.at_s - self._now()))
            marks = await self.ask(ask)
            told(marks)
            return marks

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(ask)) for ask in asks]
        return [task.result() for task in tasks], self._now() - start


def _message(body: bytes) -> str:
    """The message of an error body, or the body."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace")
    error = found.get("error") if isinstance(found, dict) else None
    return str(error.get("message")) if isinstance(error, dict) else str(found)[:200]
