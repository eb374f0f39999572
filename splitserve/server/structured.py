"""Structured output as the three bodies ask for it, made into one Grammar and checked before anything is queued.

response_format        OpenAI: {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": ...}}
json_schema, regex, ebnf                            SGLang: in sampling_params, or beside OpenAI's fields
structured_outputs, guided_json, guided_regex ...   vLLM
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from splitserve.errors import RequestError
from splitserve.text import grammar
from splitserve.text.desk import GRAMMARS
from splitserve.types import Grammar, GrammarKind

from .params import SamplingFields

MAX_CHOICES = 1024


FIELDS = ("json_schema", "regex", "ebnf", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Fields whose value is a grammar's source; the last word of a name says of which kind."""


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's object of the same name."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


async def grammar_of(body: SamplingFields, prefix: str = "") -> Grammar | None:
    """The one grammar that a body asks for, compiled once to see that it can be.

    Raises RequestError, naming the field, for a grammar that is wrong and for two at a time.
    """
    given = _given(body, prefix)
    if not given:
        return None
    if len(given) > 1:
        names = " and ".join(name for name, _ in given)
        raise RequestError(f"{names} are given, an answer can follow only one", field=given[1][0])
    name, make = given[0]
    return await GRAMMARS.do(1, lambda: _checked(make, name))


def _checked(make: Callable[[], Grammar], name: str) -> Grammar:
    made = make()
    grammar.check(made, name)
    return made


def _given(body: SamplingFields, prefix: str) -> list[tuple[str, Callable[[], Grammar]]]:
    """(field, how to make its grammar) of all that are not null."""
    fields = {name: getattr(body, name, None) for name in FIELDS}
    fields |= _response_format(getattr(body, "response_format", None))
    whole: StructuredOutputs | None = getattr(body, "structured_outputs", None)
    if whole is not None:
        fields |= {
            f"structured_outputs.{name}": value for name, value in msgspec.structs.asdict(whole).items()
        }
    return [
        (f"{prefix}{name}", _maker(name.rpartition(".")[2].removeprefix("guided_"), value, f"{prefix}{name}"))
        for name, value in fields.items()
        if value is not None and value is not False
    ]


def _response_format(given: dict[str, Any] | None) -> dict[str, Any]:
    kind = "text" if given is None else given.get("type")
    match kind:
        case "text":
            return {}
        case "json_object":
            return {"response_format.json_object": True}
        case "json_schema":
            wanted = (given or {}).get("json_schema")
            if not isinstance(wanted, dict) or not isinstance(wanted.get("schema"), dict):
                raise RequestError(
                    "response_format.json_schema.schema must be an object",
                    field="response_format.json_schema.schema",
                )
            return {"response_format.json_schema.schema": wanted["schema"]}
    raise RequestError(
        f"response_format.type is {str(kind)[:40]!r}, must be text, json_object or json_schema",
        field="response_format.type",
    )


def _maker(kind: str, value: Any, name: str) -> Callable[[], Grammar]:
    match kind:
        case "json_object":
            return lambda: grammar.from_json_schema({"type": "object"}, name)
        case "regex":
            return lambda: Grammar(GrammarKind.REGEX, value)
        case "ebnf" | "grammar":
            return lambda: Grammar(GrammarKind.EBNF, value)
        case "choice":
            return lambda: _choices(value, name)
    return lambda: grammar.from_json_schema(value, name)


def _choices(choices: list[str], name: str) -> Grammar:
    if not 0 < len(choices) <= MAX_CHOICES or not all(choices):
        raise RequestError(f"{name} must have 1 to {MAX_CHOICES} texts, none of them empty", field=name)
    return grammar.from_choices(choices)
