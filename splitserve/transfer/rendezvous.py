"""Where the two halves of a request find each other: a ROUTER on the prefill side, a DEALER for each door at decode.

    decode  Dial ── Offer, Cancel, Ping ─────────────────────────▶ Rendezvous  prefill
                 ◀── Accepted, HandoffFailed, Drained, Pong ──────

Control only: no state and no note of a write travels here. It carries messages of wire.py and decides nothing about
them. Whatever else comes in (garbage, another protocol, another program) is counted and dropped.
"""

from __future__ import annotations

import zmq

from splitserve import wire
from splitserve.errors import PortTaken, ProtocolError, RequestError
from splitserve.wire import ToDecode, ToPrefill

MAX_QUEUED = 10_000
"""Messages towards one peer that does not read; more are dropped and counted, as if the network had lost them."""

MAX_MESSAGE = 32 << 20
MAX_BATCH = 1_000
"""Messages taken in one poll, so that a flood cannot keep the engine from its work."""


class Rendezvous:
    """The prefill side's door. `peer` is ZeroMQ's routing id of one decode connection."""

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen. Port 0 takes any free one; raises PortTaken where somebody else listens."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        address = f"[{host}]" if ":" in host else host
        try:
            self._socket.bind(f"tcp://{address}:{port or '*'}")
        except zmq.ZMQError as e:
            self._socket.close()
            self._context.term()
            raise PortTaken(
                f"the rendezvous cannot listen on {host}:{port}: {e}",
                field="bootstrap_port",
                fix="choose another bootstrap_port, or 0 for any free one",
            ) from e
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.host = host
        self.port = int(endpoint.decode().rpartition(":")[2])
        self.num_garbage = 0
        self.num_dropped = 0
        self._decoder = wire.decoder(ToPrefill)

    def poll(self) -> list[tuple[bytes, ToPrefill]]:
        """Messages that are here now, with the connection each came by."""
        out: list[tuple[bytes, ToPrefill]] = []
        for _ in range(MAX_BATCH):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                if len(parts) != 2:
                    raise ProtocolError(f"{len(parts)} parts, expected 2")
                out.append((parts[0], wire.decode(self._decoder, parts[1], "a decode engine")))
            except ProtocolError:
                self.num_garbage += 1
        return out

    def send(self, peer: bytes, message: ToDecode) -> None:
        """Queue a message; it is dropped and counted where the peer has gone or does not read."""
        try:
            self._socket.send_multipart([peer, wire.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as e:
            if e.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.num_dropped += 1

    def waiting(self) -> bool:
        """Whether messages are here. Ask before sleeping: the descriptor only tells of news since the last look."""
        return _readable(self._socket)

    def fds(self) -> list[int]:
        return [self._socket.fileno()]

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class Dial:
    """Decode's connections to doors, one for each (host, port), made when first used."""

    def __init__(self, *, allow_hosts: tuple[str, ...]) -> None:
        self._allowed = set(allow_hosts)
        self._context = zmq.Context()
        self._sockets: dict[tuple[str, int], zmq.Socket[bytes]] = {}
        self.num_garbage = 0
        self.num_dropped = 0
        self._decoder = wire.decoder(ToDecode)

    def check_address(self, host: str, port: int) -> None:
        """Raise RequestError, naming the field, unless a request may send us there."""
        if host not in self._allowed:
            raise RequestError(
                f"bootstrap_host {host!r} is not one that this engine may be sent to",
                field="bootstrap_host",
                fix=f"allowed: {', '.join(sorted(self._allowed))} (allow_hosts in [transfer])",
            )
        if not 0 < port < 65536:
            raise RequestError(f"bootstrap_port {port} is no port", field="bootstrap_port")

    def send(self, door: tuple[str, int], message: ToPrefill) -> bool:
        """Queue a message to a door; False when the queue is full (the door has not read for long)."""
        try:
            self._open(door).send(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self.num_dropped += 1
            return False
        return True

    def poll(self) -> list[tuple[tuple[str, int], ToDecode]]:
        """Messages that are here now, with the door each came from."""
        out: list[tuple[tuple[str, int], ToDecode]] = []
        for door, sock in self._sockets.items():
            for _ in range(MAX_BATCH):
                try:
                    raw = sock.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                try:
                    out.append((door, wire.decode(self._decoder, raw, f"{door[0]}:{door[1]}")))
                except ProtocolError:
                    self.num_garbage += 1
        return out

    def hang_up(self, door: tuple[str, int]) -> None:
        """Close the connection to a door; what is queued for it is dropped."""
        sock = self._sockets.pop(door, None)
        if sock is not None:
            sock.close()

    def waiting(self) -> bool:
        """Whether messages are here; as Rendezvous.waiting."""
        return any(map(_readable, self._sockets.values()))

    def fds(self) -> list[int]:
        return [sock.fileno() for sock in self._sockets.values()]

    def close(self) -> None:
        for door in list(self._sockets):
            self.hang_up(door)
        self._context.term()

    def _open(self, door: tuple[str, int]) -> zmq.Socket[bytes]:
        if door not in self._sockets:
            sock: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
            _configure(sock)
            host, port = door
            sock.setsockopt(zmq.IPV6, int(":" in host))
            sock.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
            self._sockets[door] = sock
        return self._sockets[door]


def _readable(sock: zmq.Socket[bytes]) -> bool:
    return bool(int(sock.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _configure(sock: zmq.Socket[bytes]) -> None:
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, MAX_QUEUED)
    sock.setsockopt(zmq.RCVHWM, MAX_QUEUED)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
    if sock.type == zmq.ROUTER:
        sock.setsockopt(
            zmq.ROUTER_MANDATORY, 1
        )  # say so when a peer has gone, instead of dropping in silence
