"""Free TCP ports, and whether somebody answers on one. A port found free can be taken before it is used:
bind to 0 where that is possible, or keep the bound socket (`bound_socket`) and hand it on.
"""

from __future__ import annotations

import errno
import socket

from splitserve.errors import ConfigError

from .http import port_taken


def bound_socket(host: str, port: int = 0) -> socket.socket:
    """A listening-ready TCP socket bound to `host:port` (0: any free port). PortTaken when somebody has it.

    SO_REUSEADDR is set, so that connections in TIME_WAIT do not block a restart.
    """
    family, _, _, _, address = _resolve(host, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as e:
        sock.close()
        if e.errno == errno.EADDRINUSE:
            raise port_taken(host, port) from None
        raise ConfigError(f"cannot bind {host}:{port}: {e.strerror}", field="host") from None
    return sock


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different ports that were free at the same moment."""
    socks = [bound_socket(host) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in socks]
    for sock in socks:
        sock.close()
    return ports


def is_listening(host: str, port: int, *, timeout_s: float = 0.5) -> bool:
    """Whether a TCP connection to `host:port` is accepted."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def _resolve(host: str, port: int) -> tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as e:
        raise ConfigError(
            f"host {host!r} is not an address of this machine: {e.strerror}", field="host"
        ) from None
    return found[0]  # type: ignore[return-value]
