"""The server's end of the line to rank 0: requests out, events in, each to the inbox of the request it belongs to.

    submit ─▶ Generate ─┐                      ┌─ Outputs, Failed ─▶ Inbox of the request
    abort  ─▶ Abort ────┼──▶ ZeroMQ PAIR ──────┼─ Reply ───────────▶ Future of `control`
    control ▶ Control ──┘    (ipc, rank 0      └─ Loading, Hello, Load ─▶ attributes
                              connects)

Nothing here starts or watches processes (ranks.py) and nothing reads clocks but to stamp the last sign of life.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from splitserve import log, wire
from splitserve.errors import EngineLost, Overloaded, ProtocolError, SplitserveError, by_code
from splitserve.types import Rid, TokenEvent

_log = log.get(__name__)

Item = TokenEvent | Exception


class Inbox:
    """What the engine has said about the choices of one HTTP request, in order, until it is taken."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[tuple[int, Item]] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, index: int, item: Item) -> None:
        """Add an item of choice `index`."""
        self._items.append((index, item))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[tuple[int, Item]]:
        """All items that are there; waits for the first."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        items = list(self._items)
        self._items.clear()
        return items


class EngineLink:
    """One engine, from the start of its processes to their end. Belongs to one event loop."""

    def __init__(self, endpoint: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.endpoint = endpoint
        self.loading = wire.Loading("starting", 0.0)
        self.hello: wire.Hello | None = None
        self.load: wire.Load | None = None
        self.lost: SplitserveError | None = None
        self.last_heard = clock()
        self.on_loading: Callable[[wire.Loading], None] | None = None
        self._clock = clock
        self._calls: dict[Rid, tuple[Inbox, int]] = {}
        self._replies: dict[int, asyncio.Future[wire.Reply]] = {}
        self._num_serials = 0
        self._decoder = wire.decoder(wire.ToServer)
        self._loop = asyncio.get_running_loop()
        self._greeted: asyncio.Future[wire.Hello] = self._loop.create_future()
        self._greeted.add_done_callback(
            lambda f: f.cancelled() or f.exception()
        )  # may fail with nobody waiting
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # bounded by max_requests instead
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(endpoint)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._receive)

    @property
    def num_open(self) -> int:
        """Choices that the engine works on."""
        return len(self._calls)

    def next_serial(self) -> int:
        """1, 2, 3 ...: what makes the rids of this engine unique."""
        self._num_serials += 1
        return self._num_serials

    async def greeting(self) -> wire.Hello:
        """Wait until the engine can serve; raises what `fail` was given when it never will."""
        return await asyncio.shield(self._greeted)

    def check(self) -> wire.Hello:
        """The engine's Hello, or the error that says why there is none: EngineLost, or Overloaded while it loads."""
        if self.lost is not None:
            raise self.lost.with_traceback(None)  # raised again and again; it must not collect tracebacks
        if self.hello is None:
            stage = f"{self.loading.stage}, {self.loading.done:.0%}"
            raise Overloaded(f"the engine is still loading: {stage}", retry_after_s=2)
        return self.hello

    # ------------------------------------------------------------------ out

    def submit(self, request: wire.Generate, inbox: Inbox, *, index: int) -> None:
        """Start one choice; its events come to `inbox` as choice `index`."""
        self.check()
        self._send(request)
        self._calls[request.rid] = (inbox, index)

    def abort(self, rid: Rid, reason: str) -> None:
        """End one choice; what the engine still says about it is dropped. Harmless when it has ended."""
        if self._calls.pop(rid, None) is not None and self.lost is None:
            with contextlib.suppress(EngineLost):  # then there is nothing left to abort
                self._send(wire.Abort(rid, reason))

    async def control(
        self, op: str, args: dict[str, Any] | None = None, *, timeout_s: float = 30.0
    ) -> wire.Reply:
        """An operator's call. Raises EngineLost, or Overloaded when the engine does not answer in time."""
        self.check()
        number = self.next_serial()
        future: asyncio.Future[wire.Reply] = self._loop.create_future()
        self._send(wire.Control(number, op, args or {}))
        self._replies[number] = future
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise Overloaded(f"the engine has not answered {op!r} in {timeout_s:g} s") from None
        finally:
            self._replies.pop(number, None)

    # ------------------------------------------------------------------ ends

    def fail(self, error: SplitserveError) -> None:
        """The engine is gone: every open request and call ends with `error`, and so does every later one."""
        if self.lost is not None:
            return
        self.lost = error
        for inbox, index in self._calls.values():
            inbox.put(index, error)
        self._calls.clear()
        for future in self._replies.values():
            if not future.done():
                future.set_exception(error)
        if not self._greeted.done():
            self._greeted.set_exception(error)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._socket.close()
        self._context.term()

    # ------------------------------------------------------------------ inside

    def _send(self, message: wire.ToEngine) -> None:
        try:
            self._socket.send(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:  # there is no limit on what is queued: nobody is at the other end
            raise engine_lost("it has closed its line") from None
        # ZeroMQ's descriptor tells edges only, and sending may swallow one: look for input now.
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        while not self._socket.closed:
            try:
                raw = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(wire.decode(self._decoder, raw, "the engine"))
            except ProtocolError as e:
                _log.error("%s", e.message)
                self.fail(e)

    def _take(self, message: wire.ToServer) -> None:
        self.last_heard = self._clock()
        match message:
            case wire.Outputs(events=events):
                for event in events:
                    self._deliver(event)
            case wire.Failed(rid=rid):
                if not rid:  # the engine could not start
                    self.fail(_error(message))
                call = self._calls.pop(rid, None)
                if call is not None:
                    call[0].put(call[1], _error(message))
            case wire.Load():
                self.load = message
            case wire.Reply(id=number):
                future = self._replies.get(number)
                if future is not None and not future.done():
                    future.set_result(message)
            case wire.Loading():
                self.loading = message
                if self.on_loading is not None:
                    self.on_loading(message)
            case wire.Hello(protocol=protocol):
                wire.check_protocol(protocol, "the engine")
                self.hello = message
                if not self._greeted.done():
                    self._greeted.set_result(message)

    def _deliver(self, event: TokenEvent) -> None:
        call = self._calls.get(event.rid)
        if call is None:
            return  # aborted here, and the engine did not know yet
        if event.finish is not None:
            del self._calls[event.rid]
        call[0].put(call[1], event)


def engine_lost(why: str) -> EngineLost:
    return EngineLost(
        f"the engine of this server has died: {why}", fix="its log says why; the supervisor restarts it"
    )


def _error(failed: wire.Failed) -> SplitserveError:
    error = by_code(failed.code, failed.message)
    error.field, error.fix = failed.field or None, failed.fix or None
    if isinstance(error, Overloaded):
        error.retry_after_s = failed.retry_after_s or error.retry_after_s
    return error
