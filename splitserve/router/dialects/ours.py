"""Our own engines: both halves get the same bytes at once; a batch has one room and its choices use room + i."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from splitserve.net.client import ClientResponse

from ..fleet import LoadSnapshot, Route
from ..rewrite import Prepared
from . import Opening

_SUMMED = (
    "num_reqs",
    "num_waiting_reqs",
    "queued_tokens",
    "free_pages",
    "total_pages",
    "prompt_tokens",
    "output_tokens",
)
"""Of /get_load; from the third on as in LoadSnapshot."""

GENERATE = b'{"text":"Hello","sampling_params":{"max_new_tokens":1,"temperature":0}}'


class Ours:
    """Implements Dialect."""

    name = "splitserve"
    paths = frozenset(("/generate", "/v1/completions", "/v1/chat/completions"))
    probe = ("/generate", GENERATE)
    adds_seed = True
    adds_rid = True
    decode_recovers = True
    serves_alone = True
    has_rendezvous = True
    own_lines: frozenset[bytes] = frozenset()
    load_path = "/get_load"

    def opening(self, prepared: Prepared, route: Route, room: Callable[[], int], more: bytes) -> Opening:
        if route.prefill is None:
            return Opening(b"", prepared.plain(more))
        host, port = route.prefill.origin.host, route.prefill.bootstrap_port
        body = prepared.with_room(host, port, room(), more)
        return Opening(body, body, keeps=prepared.wants_input_logprobs)

    def after_prefill(self, prepared: Prepared, answer: bytes, *, must_cross: bool = False) -> bytes:  # noqa: ARG002
        raise AssertionError("both halves were asked at once")

    def load(self, answer: ClientResponse) -> LoadSnapshot:
        return read_load(answer)


def read_load(answer: ClientResponse) -> LoadSnapshot:
    """/get_load as a list of one entry a data-parallel rank (SGLang) or as one object; zeros where it is silent."""
    try:
        decoded = msgspec.json.decode(answer.body) if answer.status == 200 else None
    except msgspec.DecodeError:
        decoded = None
    entries = [e for e in (decoded if isinstance(decoded, list) else [decoded]) if isinstance(e, dict)]
    sums = dict.fromkeys(_SUMMED, 0)
    for entry in entries:
        for name in sums:
            value = entry.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15:
                sums[name] += int(value)
    waiting = sums["num_waiting_reqs"]
    running = max(0, sums["num_reqs"] - waiting)
    lanes = {lane for e in entries if isinstance(told := e.get("lanes"), list) for lane in map(str, told)}
    rest = {name: sums[name] for name in _SUMMED[2:]}
    return LoadSnapshot(running, waiting, **rest, lane=", ".join(sorted(lanes)))
