"""What the router reads of a request body and what it puts into it. Pure; bytes in, bytes out.

The body is checked once (it must be a JSON object) and never encoded again: name, seed and rendezvous are appended
before its closing brace, so every number, escape and unknown field reaches the engines as the client wrote it.

    {"model": ..., "stream": true}
    {"model": ..., "stream": true,"rid":"cmpl-1f","seed":7,"bootstrap_host":"127.0.0.1","bootstrap_port":8998,...}

Both legs of a pair get this very body. A batch (n > 1, lists of prompts) has one room; its choices use room + i, so a
drawn room leaves space above it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from splitserve.errors import RequestError
from splitserve.net.request import AN_OBJECT

OURS = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "splitserve_resume", "kv_transfer_params")
ROOM_SPACE = 1 << 16  # rooms that one request may use, one for each choice

_NONE = msgspec.Raw(b"")


class Asked(msgspec.Struct):
    """The fields that routing looks at. Types are the engines' affair: they name the field in their 400."""

    stream: Any = None
    seed: Any = msgspec.UNSET
    rid: Any = None
    request_id: Any = None
    prompt: msgspec.Raw = _NONE
    messages: msgspec.Raw = _NONE
    text: msgspec.Raw = _NONE
    input_ids: msgspec.Raw = _NONE
    return_logprob: Any = None
    bootstrap_host: Any = msgspec.UNSET
    bootstrap_port: Any = msgspec.UNSET
    bootstrap_room: Any = msgspec.UNSET
    splitserve_resume: Any = msgspec.UNSET
    kv_transfer_params: Any = msgspec.UNSET

    @property
    def names_ours(self) -> bool:
        unset = msgspec.UNSET
        return not (
            self.seed is not None
            and self.bootstrap_room is unset
            and self.bootstrap_host is unset
            and self.bootstrap_port is unset
            and self.splitserve_resume is unset
            and self.kv_transfer_params is unset
        )

    @property
    def prompt_text(self) -> bytes:
        """The prompt as JSON text, whatever its form."""
        return bytes(self.messages) or bytes(self.prompt) or bytes(self.text) or bytes(self.input_ids)


_decode = msgspec.json.Decoder(Asked).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


class Prepared(msgspec.Struct, frozen=True):
    """A checked body, open at its end: add a rendezvous or nothing, then `}`."""

    open_body: bytes  # without the closing brace; ends in "," or "{"
    stream: bool
    wants_input_logprobs: bool
    prompt_text: bytes
    rid: str = ""  # what the engines' logs call the request, as far as it is known here

    def plain(self, more: bytes = b"") -> bytes:
        """For an engine that does both halves. `more`: fields to add, with a comma behind each."""
        return (self.open_body + more).removesuffix(b",") + b"}"

    def with_room(self, host: str, port: int | None, room: int, more: bytes = b"") -> bytes:
        """For both legs of a pair."""
        port_text = b"null" if port is None else b"%d" % port
        parts = (self.open_body, more, _encode(host), port_text, room)
        return b'%s%s"bootstrap_host":%s,"bootstrap_port":%s,"bootstrap_room":%d}' % parts


def prepare(
    body: bytes, *, seed: int | None, rid: Callable[[], str] | None = None, read_prompt: bool = False
) -> Prepared:
    """Check a body and open it. `seed`, and a drawn `rid`, go in where the client gave none; None: never.

    RequestError for what is no JSON object.
    """
    try:
        if not body.isascii():
            body.decode()  # values are passed on unread: what is not UTF-8 must be found here
        asked = _decode(body)
        if asked.names_ours:  # rare: fields that are ours to set must not stand there twice
            fields = _decode_fields(body)
            for name in (*OURS, "seed") if asked.seed is None else OURS:
                fields.pop(name, None)
            body = _encode(fields)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as e:
        raise RequestError(f"the body is no JSON object: {e}", fix=AN_OBJECT) from None
    opened = body.rstrip()[:-1].rstrip()
    more = b"" if opened.endswith(b"{") else b","
    if seed is not None and (asked.seed is msgspec.UNSET or asked.seed is None):
        more += b'"seed":%d,' % seed
    name = asked.rid or asked.request_id
    if rid is not None and not name:
        name = rid()
        more += b'"rid":%s,' % _encode(name)
    return Prepared(
        opened + more,
        stream=asked.stream is True,
        wants_input_logprobs=asked.return_logprob is True and asked.stream is not True,
        prompt_text=asked.prompt_text if read_prompt else b"",
        rid=name if isinstance(name, str) else "",
    )


def merge_input_logprobs(answer: bytes, prefill: bytes) -> bytes:
    """Put prefill's `input_token_logprobs` into a /generate answer that came without them.

    Our engines carry them with the first token, so that decode's answer is complete; SGLang's prefill keeps them.
    Returns `answer` itself when there is nothing to add.
    """
    try:
        ours, theirs = msgspec.json.decode(answer), msgspec.json.decode(prefill)
    except msgspec.DecodeError:
        return answer
    pairs = (
        zip(ours, theirs, strict=False)
        if isinstance(ours, list) and isinstance(theirs, list)
        else [(ours, theirs)]
    )
    changed = False
    for mine, other in pairs:
        into = mine.get("meta_info") if isinstance(mine, dict) else None
        found = other.get("meta_info") if isinstance(other, dict) else None
        if not isinstance(into, dict) or not isinstance(found, dict):
            continue
        for name in ("input_token_logprobs", "input_top_logprobs"):
            if found.get(name) and not into.get(name):
                into[name] = found[name]
                changed = True
    return _encode(ours) if changed else answer
