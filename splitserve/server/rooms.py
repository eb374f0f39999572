"""The bootstrap fields of a split request: which half this engine does, and where the halves meet.

    bootstrap_room   63 bits; one for each choice, or one for all: choice i then meets in room + i
    bootstrap_host   where prefill's rendezvous listens; decode connects there, so it must be on an allow-list
    bootstrap_port   likewise; null means on prefill its own, on decode the setting peer_port

A request without a room is served whole, whatever the engine's role.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from splitserve.errors import RequestError
from splitserve.types import Role
from splitserve.wire import Room

_ROOMS = 2**63


class RoomFields(Protocol):
    """The part of a body that is about rooms."""

    bootstrap_host: str | list[str | None] | None
    bootstrap_port: int | list[int | None] | None
    bootstrap_room: int | list[int | None] | None


class Place(msgspec.Struct, frozen=True):
    """This engine as seen by split requests.

    `host` and `port` are its own rendezvous, `peer_port` that of prefill for requests which do not name it. 0: none.
    """

    role: Role
    host: str
    port: int
    allow_hosts: tuple[str, ...]
    peer_port: int = 0


def rooms(fields: RoomFields, place: Place, *, num_prompts: int, n: int) -> tuple[Room, ...]:
    """One room for each choice, prompts outermost; () when the request is not split. Raises RequestError."""
    if fields.bootstrap_room is None:
        if fields.bootstrap_host is not None and place.role is not Role.UNIFIED:
            raise RequestError(
                "bootstrap_host is given without bootstrap_room",
                field="bootstrap_room",
                fix="give a fresh 63-bit number to both halves, or leave all bootstrap fields out",
            )
        return ()
    if place.role is Role.UNIFIED:
        raise RequestError(
            "this engine is unified and takes no half of a split request",
            field="bootstrap_room",
            fix="leave the bootstrap fields out, or start the engine with --role prefill or decode",
        )
    ids = _room_ids(fields.bootstrap_room, num_prompts=num_prompts, n=n)
    hosts = _spread(fields.bootstrap_host, "bootstrap_host", num_prompts=num_prompts, n=n)
    ports = _spread(fields.bootstrap_port, "bootstrap_port", num_prompts=num_prompts, n=n)
    if place.role is Role.PREFILL:
        return tuple(
            Room(i, place.host, p if p is not None else place.port) for i, p in zip(ids, ports, strict=True)
        )
    return tuple(_at_decode(*one, place=place) for one in zip(ids, hosts, ports, strict=True))


def derived_seed(room: int) -> int:
    """A seed that both halves find alike: the room, mixed (splitmix64's finaliser), since rooms may be consecutive."""
    x = (room + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def _room_ids(given: int | list[int | None], *, num_prompts: int, n: int) -> list[int]:
    num_choices = num_prompts * n
    if isinstance(given, int):
        ids = [(_checked(given) + i) % _ROOMS for i in range(num_choices)]
    elif len(given) == num_choices:
        ids = [_checked(room) for room in given]
    else:
        ids = [
            (_checked(r) + i) % _ROOMS
            for r in _spread(given, "bootstrap_room", num_prompts=num_prompts, n=1)
            for i in range(n)
        ]
    if len(set(ids)) < num_choices:
        raise RequestError(
            "two choices of this request share a bootstrap_room",
            field="bootstrap_room",
            fix="give each its own",
        )
    return ids


def _checked(room: Any) -> int:
    if type(room) is not int or not 0 <= room < _ROOMS:
        raise RequestError(
            f"bootstrap_room must be a 63-bit number, not {str(room)[:40]}", field="bootstrap_room"
        )
    return room


def _spread(given: Any, name: str, *, num_prompts: int, n: int) -> list[Any]:
    """One value for each choice, from one for all, one for each prompt, or one for each choice."""
    if not isinstance(given, list):
        return [given] * (num_prompts * n)
    if len(given) == num_prompts * n:
        return given
    if len(given) == num_prompts:
        return [value for value in given for _ in range(n)]
    raise RequestError(
        f"{name} has {len(given)} entries for {num_prompts} prompts with {n} choices each", field=name
    )


def _at_decode(room: int, host: str | None, port: int | None, *, place: Place) -> Room:
    if not host:
        raise RequestError(
            "bootstrap_host is missing: decode must know where prefill listens",
            field="bootstrap_host",
            fix="give the prefill server's host, as the router does",
        )
    if host.strip("[]").lower() not in {h.strip("[]").lower() for h in place.allow_hosts}:
        raise RequestError(
            f"bootstrap_host {host[:80]!r} is not allowed here",
            field="bootstrap_host",
            fix=f"allowed are {', '.join(place.allow_hosts)}; the setting is allow_hosts in [transfer]",
        )
    port = port if port is not None else place.peer_port or None
    if port is None:
        raise RequestError(
            "bootstrap_port is null: decode must know where prefill listens",
            field="bootstrap_port",
            fix="with sglang_router give it behind the URL: --prefill http://HOST:PORT BOOTSTRAP_PORT; "
            "prefill's /server_info shows it; or start decode with --peer-port PORT",
        )
    if not 0 < port < 65536:
        raise RequestError(f"bootstrap_port is {port}, must be 1 to 65535", field="bootstrap_port")
    return Room(room, host.strip("[]"), port)
