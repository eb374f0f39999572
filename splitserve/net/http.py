"""HTTP/1.1 server on asyncio protocols and httptools: `serve(app, host=, port=, limits=)`.

This module owns the listening socket, the set of connections with their deadlines, and the running of the app;
connection.py speaks to one client, responder.py writes one answer, request.py holds what was read.

An app is `(Request, Responder) -> Awaitable | None`. What it raises becomes the answer: a SplitserveError its own
status and body, anything else a 500 without details (the traceback goes to the log). It knows no API.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable

from splitserve import log
from splitserve.errors import PortTaken, SplitserveError

from .connection import Connection
from .known import KnownHeads
from .request import Limits, Request, RequestHead
from .responder import Responder

App = Callable[[Request, Responder], Awaitable[None] | None]

__all__ = ["App", "HttpServer", "Limits", "Request", "Responder", "serve"]

_log = log.get(__name__)


class HttpServer:
    """A listening socket and its connections. Made by `serve`; ended by `close`."""

    def __init__(self, app: App, limits: Limits) -> None:
        self._app = app
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.draining = False
        self.known: KnownHeads[RequestHead] = KnownHeads()
        self.port = 0
        self._listener: asyncio.Server | None = None
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        timeouts = (
            limits.head_timeout_s,
            limits.body_timeout_s,
            limits.idle_timeout_s,
            limits.write_timeout_s,
        )
        self._sweep_every_s = min(1.0, max(0.02, min(timeouts) / 4))
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    @property
    def num_busy(self) -> int:
        """Connections with a request read in part or being answered."""
        return sum(not c.idle for c in self._connections)

    def listen(self, listener: asyncio.Server) -> None:
        self._listener = listener
        self.port = listener.sockets[0].getsockname()[1]
        self._sweep()

    def _sweep(self) -> None:
        """Deadlines of all connections by one timer: a timer for each request would cost more than the request."""
        now = self.loop.time()
        for connection in list(self._connections):
            connection.check_deadline(now)
        self._sweeper = self.loop.call_later(self._sweep_every_s, self._sweep)

    # -------------------------------------------------------------- told by connections

    def admit(self, connection: Connection) -> bool:
        """Take a new connection; when full, close the one that has been idle longest. False when none is idle."""
        if len(self._connections) >= self.limits.max_connections:
            idle = min((c for c in self._connections if c.idle), key=lambda c: c.deadline, default=None)
            if idle is None:
                return False
            idle.abort()
            self._connections.discard(idle)
        self._connections.add(connection)
        return True

    def forget(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def start(self, request: Request, responder: Responder) -> None:
        """Give one request to the app."""
        try:
            work = self._app(request, responder)
        except Exception as e:  # the boundary of the app: whatever it raises becomes an answer
            self._settle(request, responder, e)
            return
        if work is not None:
            task = self.loop.create_task(self._run(request, responder, work))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, request: Request, responder: Responder, work: Awaitable[None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            responder.abort()
            raise
        except Exception as e:  # as in start
            self._settle(request, responder, e)
        else:
            if responder.started:
                responder.end()
            elif not responder.gone:
                self._settle(request, responder, RuntimeError("the app returned without an answer"))

    @staticmethod
    def _settle(request: Request, responder: Responder, error: Exception) -> None:
        if responder.gone or responder.ended:
            if not isinstance(error, SplitserveError):
                _log.error(
                    "%s %s, after its answer or its client's leaving",
                    request.method,
                    request.path,
                    exc_info=error,
                )
            return
        if not isinstance(error, SplitserveError):
            _log.error("%s %s failed", request.method, request.path, exc_info=error)
            error = SplitserveError("internal error; the log of this process has the traceback")
        if responder.started:
            responder.abort()
        else:
            responder.fail(error)

    # -------------------------------------------------------------- the end

    def stop_listening(self) -> None:
        """Take no new connections; requests on those there are close them when they end."""
        self.draining = True
        if self._listener is not None:
            self._listener.close()

    async def close(self, drain_s: float = 0.0) -> None:
        """Stop listening, close idle connections, give running requests `drain_s` to end, then cut them."""
        self.stop_listening()
        for connection in list(self._connections):
            if connection.idle:
                connection.abort()
        end = self.loop.time() + drain_s
        while self._connections and self.loop.time() < end:
            await asyncio.sleep(min(0.02, drain_s))
        if self._sweeper is not None:
            self._sweeper.cancel()
        for task in list(self._tasks):
            task.cancel()
        for connection in list(self._connections):
            connection.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._connections:  # connection_lost of each follows within one turn of the loop
            await asyncio.sleep(0)


async def serve(
    app: App, *, host: str, port: int, limits: Limits | None = None, sock: socket.socket | None = None
) -> HttpServer:
    """Listen and answer with `app`. Port 0 takes any free one; `server.port` tells which.

    PortTaken names the port and, where the system shows it, the process that has it.
    """
    server = HttpServer(app, limits or Limits())
    loop = server.loop
    try:
        if sock is not None:
            listener = await loop.create_server(lambda: Connection(server), sock=sock, backlog=4096)
        else:
            listener = await loop.create_server(lambda: Connection(server), host, port, backlog=4096)
    except OSError as e:
        if e.errno != errno.EADDRINUSE:
            raise
        raise port_taken(host, port) from None
    server.listen(listener)
    return server


def port_taken(host: str, port: int) -> PortTaken:
    """The error for a port that somebody else listens on."""
    owner = port_owner(port)
    message = f"port {port} on {host} is taken" + (f" by {owner}" if owner else "")
    return PortTaken(
        message, field="port", fix="stop that process, choose another port, or 0 for any free one"
    )


def port_owner(port: int) -> str:
    """`name (pid 123)` of the process that listens on a TCP port of this host; empty when it cannot be seen."""
    import psutil

    try:
        found = [
            c.pid for c in psutil.net_connections(kind="tcp") if c.status == "LISTEN" and c.laddr.port == port
        ]
        pid = next((p for p in found if p), None)
        return f"{psutil.Process(pid).name()} (pid {pid})" if pid else ""
    except (psutil.Error, OSError):
        return ""
