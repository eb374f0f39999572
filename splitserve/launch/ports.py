"""TCP ports that are free when chosen and still free when the child listens. It listens on none of them itself.

A chosen port is kept by two things, both held by the supervisor for its whole life and freed by the kernel however it
ends:

  claim   the abstract unix socket "splitserve/port/N": no second deployment of ours, of any user, takes N
          (abstract names live in the network namespace, exactly as ports do)
  hold    a TCP socket bound to N with SO_REUSEADDR and never listening: the kernel hands N to nobody who asks for any
          port, while a child that also sets SO_REUSEADDR may bind beside it and listen. Until the child listens, and
          after it has died, connections are refused at once, which a passed-on listening socket could not give.

Whether somebody else listens on a wished port is found by listening there for an instant.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from types import TracebackType

from splitserve.errors import PortTaken
from splitserve.launch.procs import ProcSpec

_TRIES = 64
"""Tries for a port that is free and unclaimed. Each fails only if another deployment claimed that port this instant."""


class Claims:
    """The ports of one deployment. Closed by `close()` or a `with` block."""

    def __init__(self) -> None:
        self.ports: dict[str, int] = {}
        self._kept: list[socket.socket] = []

    def claim(self, name: str, host: str, *, port: int = 0) -> int:
        """Choose (0) or check a port for "process.port" `name` and hold it. PortTaken says who may be there."""
        for _ in range(_TRIES if port == 0 else 1):
            kept = _claim(host, port)
            if kept is not None:
                self._kept += kept
                self.ports[name] = kept[1].getsockname()[1]
                return self.ports[name]
        if port == 0:
            raise PortTaken(f"no free port on {host} for {name}", fix="see `ss -ltn` for what holds them")
        raise PortTaken(
            f"port {port} on {host}, wanted for {name}, is taken",
            field="port",
            fix=f"stop what is there (`ss -ltnp 'sport = :{port}'`), or let a free one be chosen: "
            f"--set {_section(name)}.port=0",
        )

    def claim_all(self, specs: Sequence[ProcSpec]) -> dict[str, int]:
        """Claim what every process wishes: wished numbers first, so that a free choice never takes one of them."""
        wishes = [(f"{spec.name}.{w.key}", w.host, w.port) for spec in specs for w in spec.ports]
        for name, host, port in sorted(wishes, key=lambda w: w[2] == 0):
            self.claim(name, host, port=port)
        return dict(self.ports)

    def close(self) -> None:
        while self._kept:
            self._kept.pop().close()

    def __enter__(self) -> Claims:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def check_address(host: str, *, field: str) -> None:
    """PortTaken where `host` is no address of this host, so that nobody can listen there."""
    kept = _claim(host, 0, field=field)
    for each in kept or ():
        each.close()


def _claim(host: str, port: int, *, field: str = "host") -> tuple[socket.socket, socket.socket] | None:
    """(claim, hold) for one port, or None where somebody has it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    hold = socket.socket(family, socket.SOCK_STREAM)
    try:
        hold.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        hold.bind((host, port))
        claim.bind(f"\0splitserve/port/{hold.getsockname()[1]}")
        if port:
            _listen_for_an_instant(family, host, port)
    except OSError as e:
        claim.close()
        hold.close()
        if e.errno in _BAD_ADDRESS:
            raise PortTaken(
                f"cannot bind to {host!r}: {e.strerror}",
                field=field,
                fix=f"{field}: use an address of this host",
            ) from e
        return None
    return claim, hold


def _listen_for_an_instant(family: socket.AddressFamily, host: str, port: int) -> None:
    """OSError where somebody listens. A TIME_WAIT left by an earlier server does not count."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        probe.listen(1)


_BAD_ADDRESS = frozenset({99, 97, -2, -5, -8})
"""EADDRNOTAVAIL, EAFNOSUPPORT, and getaddrinfo's NONAME, NODATA and SERVICE: no try with another port can help."""


def _section(name: str) -> str:
    return "router" if name.startswith("router") else "server"
