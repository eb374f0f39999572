"""What the kernel still holds for this process from processes that are gone. Reads /proc and descriptors; no state.

A one-sided write over TCP is carried out by the *receiving* process, when it reads its socket. So bytes that a
process had sent before it was killed change our memory after its death, whenever we next poll:

    sender, dead    kernel: send queue ──▶ receive queue ──▶ our next poll writes them into our memory
                            (its end has no owner)  (unread bytes)

Measured over loopback: 14 MiB landed after the sender had been killed and reaped.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import termios
from dataclasses import dataclass
from pathlib import Path

ESTABLISHED = 1  # linux/tcp_states.h
LISTEN = 10
_NOT_YET = (2, 3)  # SYN_SENT, SYN_RECV: nothing can have come


@dataclass(frozen=True)
class _Socket:
    state: int
    unread: int
    far: str  # the other end as /proc/net/tcp would list it: "its address:port our address:port", hexadecimal


def unfinished() -> int:
    """How many TCP sockets of ours may still deliver bytes of a process that is gone.

    Counted are sockets whose other side has closed and that hold unread bytes, and open ones whose other end is in
    this network namespace and belongs to no process any more: its kernel side is still sending.
    """
    ours = [s for s in map(_describe, _socket_fds()) if s is not None]
    table = _connections() if any(s.state == ESTABLISHED for s in ours) else ""
    return sum(_may_deliver(s, table) for s in ours)


def _may_deliver(ours: _Socket, table: str) -> bool:
    if ours.state == ESTABLISHED:
        at = table.find(ours.far)
        # state, queues, timer, retransmits, uid, timeout, inode: 0 where no process owns the socket
        return at >= 0 and table[at + len(ours.far) :].split(None, 7)[6] == "0"
    return ours.state != LISTEN and ours.state not in _NOT_YET and ours.unread > 0


def _socket_fds() -> list[int]:
    """Descriptors of every socket of this process."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, such as the listing's own
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
    return found


def _describe(fd: int) -> _Socket | None:
    """None where it is no TCP socket."""
    try:
        view = socket.socket(fileno=os.dup(fd))
    except OSError:
        return None
    with view:
        if view.family not in (socket.AF_INET, socket.AF_INET6) or view.type != socket.SOCK_STREAM:
            return None
        try:
            state = view.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
            if state == LISTEN:
                return _Socket(state, 0, "")
            (unread,) = struct.unpack("i", fcntl.ioctl(view, termios.FIONREAD, b"\0" * 4))
            far = f"{_end(view.getpeername())} {_end(view.getsockname())}" if state == ESTABLISHED else ""
        except OSError:  # not connected any more
            return None
    return _Socket(state, unread, far)


def _end(address: tuple[str, int]) -> str:
    """As in /proc/net/tcp: the address as 32-bit words in the host's byte order, then the port."""
    host, port = address[:2]
    raw = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    words = struct.unpack(f"={len(raw) // 4}I", raw)
    return "".join(f"{w:08X}" for w in words) + f":{port:04X}"


def _connections() -> str:
    """Every TCP connection of this network namespace, one a line."""
    return "".join(
        Path(f"/proc/self/net/{t}").read_text()
        for t in ("tcp", "tcp6")
        if os.path.exists(f"/proc/self/net/{t}")
    )
