"""vllm-router's order of things: prefill answers before decode is called, and the answer says where to meet.

    router ── {..., kv_transfer_params: {do_remote_decode: true}} ─▶ prefill   draws a room, computes, holds the state
           ◀─ {..., kv_transfer_params: P} ─────────────────────────           answers with its first token
           ── {..., kv_transfer_params: P} ─────────────────────────▶ decode   meets prefill in P's room

P carries the bootstrap fields that other routers put into the body themselves (rooms.py), so from here on it is an
ordinary split request. Between the two calls prefill holds what it has computed for `hold_lease_s`; a decode that never
comes costs that long, and nothing else. Fields of P that only vLLM's own engines read are ignored.
"""

from __future__ import annotations

import secrets
from typing import Any, Protocol

import msgspec

from splitserve.errors import RequestError
from splitserve.types import Role

from .job import Job
from .rooms import Place, RoomFields


class KvTransferParams(msgspec.Struct, kw_only=True):
    """The part of `kv_transfer_params` that is read here."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int | None] | None = None


class SequentialFields(RoomFields, Protocol):
    """The part of a body that is about rooms, in either way of saying it."""

    kv_transfer_params: KvTransferParams | None
    stream: bool | None


def answers_first(fields: SequentialFields) -> bool:
    """Whether prefill has to answer with its first token, before decode has taken the state."""
    return fields.kv_transfer_params is not None and bool(fields.kv_transfer_params.do_remote_decode)


def meeting(fields: SequentialFields, place: Place) -> RoomFields:
    """The bootstrap fields that `fields` stand for: their own, or those of kv_transfer_params. Raises RequestError."""
    params = fields.kv_transfer_params
    if params is None or not (params.do_remote_decode or params.do_remote_prefill):
        return fields
    if fields.bootstrap_room is not None:
        raise RequestError(
            "bootstrap_room and kv_transfer_params both say where to meet; give one of them",
            field="kv_transfer_params",
        )
    if params.do_remote_decode:
        if place.role is not Role.PREFILL:
            raise RequestError(
                f"do_remote_decode is for prefill engines, this one is {place.role.value}",
                field="kv_transfer_params.do_remote_decode",
                fix="give this engine to the router as a decode or plain worker, or start it with --role prefill",
            )
        if fields.stream:
            raise RequestError("do_remote_decode answers whole, not as a stream", field="stream")
        return KvTransferParams(bootstrap_room=secrets.randbits(62))
    if params.bootstrap_room is None:
        raise RequestError(
            "kv_transfer_params has no bootstrap_room: it was not made by a prefill engine of splitserve",
            field="kv_transfer_params.bootstrap_room",
            fix="pass on unchanged what the prefill engine answered",
        )
    return params


def handed_over(job: Job) -> dict[str, Any]:
    """`kv_transfer_params` of prefill's answer: what decode needs to take the state of `job`."""
    room = job.rooms[0]
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "bootstrap_host": room.host,
        "bootstrap_port": room.port,
        "bootstrap_room": [r.id for r in job.rooms] if len(job.rooms) > 1 else room.id,
        "remote_host": room.host,
        "remote_port": room.port,
    }
