"""SGLang's engines: as sglang_router asks them. Both halves at once; for several sequences, lists of rooms.

    {..., "bootstrap_host": "h", "bootstrap_port": 8998, "bootstrap_room": 42}
    {"n": 2, ..., "bootstrap_host": ["h", "h"], "bootstrap_port": [8998, 8998], "bootstrap_room": [42, 43]}

Prefill ends its response once the state has been taken; decode gives up a room whose prefill failed only after its own
time (300 s by default), so a failure of prefill before decode's first byte ends the try.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from splitserve.net.client import ClientResponse

from ..fleet import LoadSnapshot, Route
from ..rewrite import Prepared
from . import Opening
from .ours import GENERATE, Ours

MOST_SEQUENCES = 1 << 16  # rooms below the next one that may be drawn (rewrite.ROOM_SPACE)

_NONE = msgspec.Raw(b"")


class _Sizes(msgspec.Struct):
    """What tells how many sequences a body asks for."""

    n: object = 1
    prompt: msgspec.Raw = _NONE
    text: msgspec.Raw = _NONE
    input_ids: msgspec.Raw = _NONE
    sampling_params: msgspec.Raw = _NONE


class _Load(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_waiting_uncached_tokens: int = 0
    num_used_tokens: int = 0
    max_total_num_tokens: int = 0
    total_prefill_uncached_tokens: int = 0
    gen_throughput: float = 0.0


class _Loads(msgspec.Struct):
    loads: list[_Load] = []


_loads = msgspec.json.Decoder(_Loads).decode
_sizes = msgspec.json.Decoder(_Sizes).decode
_encode = msgspec.json.Encoder().encode


class Sglang:
    """Implements Dialect."""

    name = "sglang"
    paths = Ours.paths
    probe = ("/generate", GENERATE)
    adds_seed = False  # its requests are seeded on demand, and slower then
    adds_rid = False  # refuses a name that a lost try may still hold
    decode_recovers = False
    serves_alone = False
    has_rendezvous = True
    own_lines: frozenset[bytes] = frozenset()
    load_path = "/v1/loads?include=core"

    def opening(self, prepared: Prepared, route: Route, room: Callable[[], int], more: bytes) -> Opening:
        if route.prefill is None:
            return Opening(b"", prepared.plain(more))
        host, port = route.prefill.origin.host, route.prefill.bootstrap_port
        first = room()
        count = num_sequences(prepared.plain())
        if count is None:
            body = prepared.with_room(host, port, first, more)
        else:
            fields = {
                "bootstrap_host": [host] * count,
                "bootstrap_port": [port] * count,
                "bootstrap_room": [first + i for i in range(count)],
            }
            body = prepared.plain(more + _encode(fields)[1:-1] + b",")
        return Opening(body, body, keeps=prepared.wants_input_logprobs)

    def after_prefill(self, prepared: Prepared, answer: bytes, *, must_cross: bool = False) -> bytes:  # noqa: ARG002
        raise AssertionError("both halves were asked at once")

    def load(self, answer: ClientResponse) -> LoadSnapshot:
        """Of /v1/loads: an entry for each data-parallel rank, tokens where we count pages."""
        try:
            loads = _loads(answer.body).loads if answer.status == 200 else []
        except msgspec.DecodeError:
            loads = []
        total = sum(e.max_total_num_tokens for e in loads)
        return LoadSnapshot(
            num_running=sum(e.num_running_reqs for e in loads),
            num_waiting=sum(e.num_waiting_reqs for e in loads),
            queued_tokens=sum(e.num_waiting_uncached_tokens for e in loads),
            free_pages=max(0, total - sum(e.num_used_tokens for e in loads)),
            total_pages=total,
            prompt_tokens=sum(e.total_prefill_uncached_tokens for e in loads),
            output_per_s=sum(e.gen_throughput for e in loads),
        )


def num_sequences(body: bytes) -> int | None:
    """How many rooms a body needs: None for a single one, which is then no list. Bad types are the engine's to name."""
    sizes = _sizes(body)
    prompts = max(_list_length(p) or 0 for p in (sizes.prompt, sizes.text, sizes.input_ids))
    n = sizes.n
    if sizes.sampling_params:
        n = _n_of(sizes.sampling_params)
    choices = n if isinstance(n, int) and not isinstance(n, bool) and 1 < n <= MOST_SEQUENCES else 1
    if not prompts and choices == 1:
        return None
    return min(max(1, prompts) * choices, MOST_SEQUENCES)


def _list_length(prompt: msgspec.Raw) -> int | None:
    """Of a list of prompts; None for one prompt, as text or as token ids."""
    if bytes(prompt)[:1] != b"[":
        return None
    items = msgspec.json.decode(prompt)
    return len(items) if items and isinstance(items[0], str | list) else None


def _n_of(params: msgspec.Raw) -> object:
    decoded = msgspec.json.decode(params)
    return decoded.get("n", 1) if isinstance(decoded, dict) else 1
