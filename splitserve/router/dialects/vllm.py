"""vLLM's engines: as vllm-router asks them. Prefill first, for one token; then decode, with what prefill said.

    prefill  {..., "stream": false, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": true, ...}}
             -> {..., "kv_transfer_params": {"remote_engine_id": ..., "remote_block_ids": ..., ...}}
    decode   the client's body and exactly those kv_transfer_params

Decode computes the last prompt token again and draws the first token itself; prefill's is thrown away. Decode can also
do all of it: a body that kv_transfer_params cannot describe (several prompts or choices, whose blocks would all be
those of the first; logprobs of the prompt, which are no part of the state) goes to decode alone.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from splitserve.errors import ConfigError
from splitserve.net.client import ClientResponse

from ..fleet import LoadSnapshot, Route
from ..rewrite import Prepared
from . import Opening

_NONE = msgspec.Raw(b"")
_ASKS = msgspec.Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)


class _Shape(msgspec.Struct):
    """What decides whether a body can be split."""

    n: Any = None
    best_of: Any = None
    use_beam_search: Any = None
    prompt: Any = None
    prompt_logprobs: Any = None
    echo: Any = None
    logprobs: Any = None


class _Prefilled(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = _NONE


_shape = msgspec.json.Decoder(_Shape).decode
_prefilled = msgspec.json.Decoder(_Prefilled).decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


class Vllm:
    """Implements Dialect."""

    name = "vllm"
    paths = frozenset(("/v1/completions", "/v1/chat/completions"))
    probe = ("/v1/completions", b'{"prompt":"Hello","max_tokens":1,"temperature":0}')
    adds_seed = False  # a seeded request takes a slower way through its sampler
    adds_rid = False  # has no such field
    decode_recovers = False
    serves_alone = False
    has_rendezvous = False
    own_lines = frozenset((b"x-request-id",))
    load_path = "/metrics"

    def opening(
        self,
        prepared: Prepared,
        route: Route,
        room: Callable[[], int],  # noqa: ARG002
        more: bytes,
    ) -> Opening:
        if route.prefill is None or not splittable(prepared.plain()):
            return Opening(b"", prepared.plain(more))
        return Opening(prefill_body(prepared.plain()), b"", request_id(route), keeps=True)

    def after_prefill(self, prepared: Prepared, answer: bytes, *, must_cross: bool = False) -> bytes:
        try:
            params = bytes(_prefilled(answer).kv_transfer_params)
        except msgspec.DecodeError:
            params = b""
        if params not in (b"", b"null"):
            return prepared.plain(b'"kv_transfer_params":' + params + b",")
        if must_cross:
            raise ConfigError(
                "prefill answered without kv_transfer_params: it runs without a KV connector, or is no prefill",
                fix="give both vLLM servers --kv-transfer-config, as docs/engines.md shows",
            )
        return prepared.plain()  # decode computes the prompt itself

    def load(self, answer: ClientResponse) -> LoadSnapshot:
        return read_metrics(answer.body if answer.status == 200 else b"")


def splittable(body: bytes) -> bool:
    """Whether one set of kv_transfer_params describes what this body asks for."""
    shape = _shape(body)
    prompts = shape.prompt if isinstance(shape.prompt, list) else []
    several = len(prompts) > 1 and isinstance(prompts[0], str | list)
    choices = shape.n not in (None, 1) or shape.best_of not in (None, 1) or shape.use_beam_search is True
    of_prompt = shape.prompt_logprobs is not None or (
        shape.echo is True and shape.logprobs not in (None, False)
    )
    return not (several or choices or of_prompt)


def prefill_body(body: bytes) -> bytes:
    """The client's body for prefill: one token, no stream, and the wish that its blocks be kept for decode."""
    fields = _fields(body)
    fields.pop("stream_options", None)
    fields |= {"stream": msgspec.Raw(b"false"), "min_tokens": msgspec.Raw(b"1")}
    fields["max_tokens"] = msgspec.Raw(b"1")
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = msgspec.Raw(b"1")
    fields["kv_transfer_params"] = _ASKS
    return _encode(fields)


def request_id(route: Route) -> bytes:
    """The header line of both halves: some of vLLM's connectors read the peers' addresses out of it."""
    assert route.prefill is not None
    prefill, decode = route.prefill.origin.authority, route.answer.origin.authority
    return f"x-request-id: ___prefill_addr_{prefill}___decode_addr_{decode}_{uuid.uuid4().hex}\r\n".encode()


_SUMMED = {
    b"vllm:num_requests_running": "running",
    b"vllm:num_requests_waiting": "waiting",
    b"vllm:prompt_tokens_total": "prompt",
    b"vllm:generation_tokens_total": "output",
}
_BY_SOURCE = b"vllm:prompt_tokens_by_source_total"
_COMPUTED = b'source="local_compute"'
"""Of all prompt tokens those that it computed itself: decode counts the others, too."""

_MOST = 1e15

_USAGE = b"vllm:kv_cache_usage_perc"
_PER_MILLE = 1000
"""vLLM tells which share of its blocks is taken, not how many there are."""


def read_metrics(text: bytes) -> LoadSnapshot:
    """The load in vLLM's Prometheus text, summed over its engines; zeros where it is silent."""
    sums = dict.fromkeys((*_SUMMED.values(), "computed"), 0.0)
    usage: list[float] = []
    knows_sources = False
    for line in text.splitlines():
        name = line.partition(b"{")[0].partition(b" ")[0]
        if name not in _SUMMED and name not in (_USAGE, _BY_SOURCE):
            continue
        value = _number(line.rpartition(b" ")[2])
        if name == _USAGE:
            usage.append(value)
        elif name in _SUMMED:
            sums[_SUMMED[name]] += value
        elif _COMPUTED in line:
            knows_sources = True
            sums["computed"] += value
    free = round(_PER_MILLE * (1 - sum(usage) / len(usage))) if usage else 0
    return LoadSnapshot(
        num_running=int(sums["running"]),
        num_waiting=int(sums["waiting"]),
        free_pages=max(0, free),
        total_pages=_PER_MILLE if usage else 0,
        prompt_tokens=int(sums["computed" if knows_sources else "prompt"]),
        output_tokens=int(sums["output"]),
    )


def _number(word: bytes) -> float:
    """0.0 for what is none, or none that could be counted."""
    try:
        value = float(word)
    except ValueError:
        return 0.0
    return value if 0.0 <= value < _MOST else 0.0
