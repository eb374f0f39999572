"""What the two shapes of an answer share: their interface, and how values of the engine become JSON."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from splitserve.errors import SplitserveError
from splitserve.net import sse

from .choice import Delta

encode = msgspec.json.Encoder().encode


class Shape(Protocol):
    """Turns a Run into bytes of one API."""

    def take(self, deltas: list[tuple[int, Delta]]) -> None:
        """Called with every delta of an answer that is not streamed."""
        ...

    def frames(self, deltas: list[tuple[int, Delta]]) -> bytes:
        """Server-sent events for what has come; empty when nothing of it is to be seen yet."""
        ...

    def last(self) -> bytes:
        """Events between the last delta and [DONE]."""
        ...

    def whole(self) -> Any:
        """The body of an answer that is not streamed."""
        ...


def event(payload: Any) -> bytes:
    """One server-sent event holding JSON."""
    return b"data: " + encode(payload) + b"\n\n"


def error_events(error: SplitserveError) -> bytes:
    """How a stream ends that cannot be completed: the error in OpenAI's form, then [DONE]."""
    return event({"error": error.to_dict()}) + sse.DONE
