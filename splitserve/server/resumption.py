"""How a stream goes on at another engine when its own dies: what our router is told, and what it says then.

    router ─ request, x-splitserve-router ──────▶ A   head: x-splitserve-resume: {"num_tokens":0,"seed":7,...}  (Ticket)
           ◀─ :12,13 / data: {...} / data: ... ──     before each event, as an SSE comment, the tokens that it shows
                                                A   dies
           ─ the same body, splitserve_resume ──▶ B   {"ticket": as A gave it, "tokens": all that came}
           ◀─ head: {"num_tokens":2,...}, events ─    from where A stopped

B replays the tokens through its own text side, so that held back stop strings, halves of characters, usage and
max_tokens are as they were at A; the engine takes them as emitted already (wire.Generate), so that penalties, grammars
and the random numbers of each position are too. Only streams of one choice without logprobs are told of: the logprobs
of tokens whose text is held back would be lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from splitserve.errors import RequestError
from splitserve.net.request import Headers

from .choice import Choice

OWN_ROUTER = "x-splitserve-router"
"""Header by which our router says that it passes decode's answer on as it is, and can continue it elsewhere."""

HEADER = "x-splitserve-resume"
FIELD = "splitserve_resume"


class Ticket(msgspec.Struct, frozen=True):
    """What an answer was made with besides the request's body."""

    num_tokens: int  # emitted elsewhere before this engine's first
    seed: int
    answer_id: str  # ASCII; empty where the client chose it, since the request says it again
    created: int  # seconds since 1970


class Resume(msgspec.Struct, kw_only=True):
    """The field of a body that continues a stream."""

    ticket: Ticket
    tokens: list[Any]


def ticket_header(ticket: Ticket | None) -> Headers:
    """The header line of a stream that can be continued elsewhere; none for others."""
    if ticket is None:
        return ()
    return ((HEADER, msgspec.json.encode(ticket).decode()),)


def taken(resume: Resume | None, headers: Mapping[str, str]) -> Resume | None:
    """The field of a body, which is only for our router to send. RequestError for others."""
    if resume is not None and OWN_ROUTER not in headers:
        raise RequestError(
            f"{FIELD} is for splitserve's own router",
            field=FIELD,
            fix="leave it out and send the request anew",
        )
    return resume


def replay(choice: Choice, tokens: tuple[int, ...]) -> None:
    """Bring a fresh choice to where it was after `tokens`. RequestError when they end it."""
    if choice.replay(tokens):
        raise RequestError("the tokens to continue from hold a complete answer", field=f"{FIELD}.tokens")


class Trail:
    """Tells the router which tokens each event shows."""

    def __init__(self, choice: Choice) -> None:
        self._tokens = choice.tokens
        self._num_told = len(choice.tokens)

    def upto(self, num_tokens: int) -> bytes:
        """The comment to put before an event that shows all tokens below `num_tokens`."""
        fresh = self._tokens[self._num_told : num_tokens]
        self._num_told += len(fresh)
        return b":%s\n" % ",".join(map(str, fresh)).encode() if fresh else b""
