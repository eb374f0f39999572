"""vllm-router's order: which room a request gets from kv_transfer_params, and what prefill's answer says."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from splitserve.errors import RequestError
from splitserve.server.rooms import Place, rooms
from splitserve.server.sequential import KvTransferParams, answers_first, meeting
from splitserve.types import Role


class Fields(msgspec.Struct):
    kv_transfer_params: KvTransferParams | None = None
    stream: bool | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None


def place(role: Role, **more: Any) -> Place:
    return Place(role, "127.0.0.1", 8998, ("127.0.0.1",), **more)


def fields(**params: Any) -> Fields:
    return Fields(kv_transfer_params=msgspec.convert(params, KvTransferParams))


def test_prefill_draws_a_room_and_decode_meets_it_there() -> None:
    ask = fields(do_remote_decode=True, do_remote_prefill=False, remote_engine_id=None, remote_host=None)
    drawn = [
        rooms(meeting(ask, place(Role.PREFILL)), place(Role.PREFILL), num_prompts=1, n=2) for _ in range(2)
    ]
    assert drawn[0][1].id == drawn[0][0].id + 1
    assert drawn[0][0].id != drawn[1][0].id, "each attempt needs a room of its own"
    assert answers_first(ask)

    ids = [r.id for r in drawn[0]]
    told = fields(do_remote_prefill=True, bootstrap_host="127.0.0.1", bootstrap_port=8998, bootstrap_room=ids)
    met = rooms(meeting(told, place(Role.DECODE)), place(Role.DECODE), num_prompts=1, n=2)
    assert met == drawn[0]
    assert not answers_first(told)


@pytest.mark.parametrize(
    ("role", "given", "field"),
    [
        (Role.DECODE, fields(do_remote_decode=True), "kv_transfer_params.do_remote_decode"),
        (Role.UNIFIED, fields(do_remote_decode=True), "kv_transfer_params.do_remote_decode"),
        (Role.DECODE, fields(do_remote_prefill=True), "kv_transfer_params.bootstrap_room"),
        (
            Role.DECODE,
            fields(do_remote_prefill=True, bootstrap_room=1, bootstrap_host="evil.example", bootstrap_port=1),
            "bootstrap_host",
        ),
        (Role.UNIFIED, fields(do_remote_prefill=True, bootstrap_room=1), "bootstrap_room"),
    ],
)
def test_what_does_not_fit_is_a_400_that_names_the_field(role: Role, given: Fields, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        rooms(meeting(given, place(role)), place(role), num_prompts=1, n=1)
    assert caught.value.field == field


def test_two_meeting_places_and_streams_are_refused() -> None:
    both = fields(do_remote_decode=True)
    both.bootstrap_room = 5
    with pytest.raises(RequestError, match="one of them"):
        meeting(both, place(Role.PREFILL))
    streamed = fields(do_remote_decode=True)
    streamed.stream = True
    with pytest.raises(RequestError, match="not as a stream"):
        meeting(streamed, place(Role.PREFILL))


def test_params_that_ask_for_nothing_change_nothing() -> None:
    given = fields(do_remote_decode=False, do_remote_prefill=False)
    assert meeting(given, place(Role.UNIFIED)) is given
    assert not answers_first(given)


def test_a_null_port_on_decode_means_the_peer_port() -> None:
    given = Fields(bootstrap_host="127.0.0.1", bootstrap_room=3)
    at = place(Role.DECODE, peer_port=7777)
    assert rooms(given, at, num_prompts=1, n=1)[0].port == 7777
    with pytest.raises(RequestError, match="must know where prefill listens"):
        rooms(given, place(Role.DECODE), num_prompts=1, n=1)
