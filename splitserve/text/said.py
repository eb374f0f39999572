"""What an answer says, taken apart: content, reasoning and calls of tools. Pure; knows no model and no API.

    text of a choice ─▶ Reader.push ─▶ Said, Said, ... ─▶ Reader.finish ─▶ the last Said

A model whose answers have a grammar of their own brings its Reader (text/deepseek.py). Others need none: their text is
content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Said:
    """What some more text has added to an answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()  # OpenAI's pieces: index, id and name first, then arguments
    finish: str = ""  # with the last, where the reader knows better than the engine: tool_calls

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls or self.finish)


class Reader(Protocol):
    """The state of one answer."""

    def push(self, text: str) -> Said: ...

    def finish(self, *, length: bool = False) -> Said:
        """The end: by the model, or because the answer was cut (`length`). Nothing may follow."""
        ...


def joined(said: Sequence[Said]) -> Said:
    """Several in a row as one; pieces of a tool call stay pieces."""
    return Said(
        "".join(s.content for s in said),
        "".join(s.reasoning for s in said),
        tuple(piece for s in said for piece in s.tool_calls),
        next((s.finish for s in reversed(said) if s.finish), ""),
    )


def whole_calls(pieces: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls of tools as a message has them, from the pieces of a stream: arguments joined, no index."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        function = piece.get("function") or {}
        call = calls.setdefault(
            piece.get("index", 0), {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["id"] = piece.get("id") or call["id"]
        call["function"]["name"] = function.get("name") or call["function"]["name"]
        call["function"]["arguments"] += function.get("arguments") or ""
    return [calls[i] for i in sorted(calls)]
