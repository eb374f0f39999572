"""How engines of one kind are asked: which paths they serve, what each half of a pair gets and when. Pure.

    ours     both halves at once, the same bytes, one room                            ours.py
    sglang   both halves at once, rooms as lists for batches                          sglang.py
    vllm     prefill first, for one token; its kv_transfer_params then go to decode   vllm.py

A router speaks one dialect to all its engines: halves of different kinds could not hand state to each other. The relay
does what the dialect says and decides about failures, tries and time itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from splitserve.config import ENGINES
from splitserve.net.client import ClientResponse

from ..fleet import LoadSnapshot, Route
from ..rewrite import Prepared


class Opening(NamedTuple):
    """What a try begins with."""

    to_prefill: bytes  # body; empty: prefill takes no part
    to_answer: bytes  # body for decode or a unified engine; empty: `after_prefill` will say it
    lines: bytes = b""  # header lines for both
    keeps: bool = False  # prefill's answer is needed to the end


class Dialect(Protocol):
    """One kind of engine. Attributes are constants; methods are pure."""

    name: str
    paths: frozenset[str]  # of proxy.GENERATING, those that its engines serve
    probe: tuple[str, bytes]  # path and body of a request for one token
    adds_seed: bool  # a request without a seed gets one
    adds_rid: bool  # a request without a name gets one, which both halves' logs and the answer have
    decode_recovers: bool  # decode may compute the prompt itself when prefill is lost before its first byte
    serves_alone: bool  # a prefill or decode engine computes all of a request that names no room
    has_rendezvous: bool  # a prefill engine has a bootstrap port
    own_lines: frozenset[bytes]  # headers of the client that it replaces by its own
    load_path: str

    def opening(self, prepared: Prepared, route: Route, room: Callable[[], int], more: bytes) -> Opening:
        """What both halves of `route` are sent. `more`: fields to add, with a comma behind each."""

    def after_prefill(self, prepared: Prepared, answer: bytes, *, must_cross: bool = False) -> bytes:
        """Decode's body from prefill's answer, where `opening` left it open.

        `must_cross`: ConfigError if no state would move, though decode could answer without it.
        """

    def load(self, answer: ClientResponse) -> LoadSnapshot:
        """What `load_path` tells; zeros where it is silent."""


def dialect(name: str) -> Dialect:
    """The dialect of the engine `name`, one of config.ENGINES."""
    from .ours import Ours
    from .sglang import Sglang
    from .vllm import Vllm

    known: tuple[Dialect, ...] = (Ours(), Sglang(), Vllm())
    return known[ENGINES.index(name)]
