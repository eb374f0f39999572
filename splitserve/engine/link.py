"""Rank 0's line to its HTTP server: ZeroMQ PAIR, wire messages. Never blocks; the loop polls its descriptor."""

from __future__ import annotations

import zmq

from splitserve import log, wire
from splitserve.errors import ProtocolError

_log = log.get(__name__)

MAX_QUEUED = 100_000
"""Messages towards a server that does not read. It is then as good as dead, and the engine leaves."""


class ServerLink:
    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
        self.socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        self.socket.connect(endpoint)
        self._decoder = wire.decoder(wire.ToEngine)

    def send(self, message: wire.ToServer) -> None:
        """Queue one message. Raises ProtocolError when the server has stopped reading."""
        try:
            self.socket.send(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise ProtocolError(f"the server has left {MAX_QUEUED} messages unread") from None

    def receive(self) -> list[wire.ToEngine]:
        """All messages that are here now, in order. One that cannot be read is logged and dropped."""
        out: list[wire.ToEngine] = []
        while True:
            try:
                raw = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return out
            try:
                out.append(wire.decode(self._decoder, raw, "the server"))
            except ProtocolError as e:
                _log.error("%s", e.message)

    def close(self) -> None:
        self.socket.close()
        self._context.term()
