"""Chat messages to the text that a model was trained on, by the checkpoint's own jinja template, in a sandbox.

Templates see what they see in transformers: messages, tools, add_generation_prompt, the special tokens,
`raise_exception`, `strftime_now`, the `tojson` filter without HTML escapes, `break`/`continue`, `{% generation %}`.
Templates come from the checkpoint, never from a client. jinja2 is imported when the first template is compiled.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from splitserve.errors import RequestError, WeightsError

from .tokenizer import Templates

if TYPE_CHECKING:
    from jinja2 import Template

_RESERVED = ("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now")


class ChatTemplate:
    """Renders conversations for one model. Raises WeightsError when a template of the checkpoint is malformed."""

    def __init__(self, templates: Templates) -> None:
        self._variables = dict(templates.variables)
        self._default = _compile(templates.default) if templates.default else None
        self._tool_use = _compile(templates.tool_use) if templates.tool_use else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. `continue_final` leaves the last message open, so that the model goes on with it.

        Raises RequestError when there is no template, or when it refuses the conversation.
        """
        import jinja2

        template = self._tool_use if tools and self._tool_use is not None else self._default
        if template is None:
            raise RequestError(
                "this model has no chat template, so messages cannot become a prompt",
                field="messages",
                fix="send a prompt to /v1/completions, or put chat_template.jinja beside the model",
            )
        given = dict(variables or {})
        for name in given:
            if name in _RESERVED:
                raise RequestError(f"chat_template_kwargs may not set {name!r}", field="chat_template_kwargs")
        try:
            text = template.render(
                **{**self._variables, **given},
                messages=list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt and not continue_final,
                raise_exception=_raise_exception,
                strftime_now=_strftime_now,
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
        ) as e:
            # A template runs on the client's messages: what it trips over is in them.
            raise RequestError(f"the chat template refuses these messages: {e}", field="messages") from e
        return _open_last(text, messages) if continue_final else text


def _open_last(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Cut what the template has put behind the last message's content; templates may trim that content."""
    content = messages[-1].get("content")
    for last in (content, content.strip()) if isinstance(content, str) else ():
        at = text.rfind(last)
        if last.strip() and at >= 0:
            return text[: at + len(last)]
    raise RequestError(
        "continue_final_message needs a last message whose text the template shows",
        field="continue_final_message",
    )


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    """json.dumps with its own defaults, but characters as they are: jinja's filter would write < as \\u003c."""
    return json.dumps(value, **{"ensure_ascii": False, **options}, indent=indent)


def _compile(source: str) -> Template:
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training; for serving it is transparent."""

        tags = {"generation"}  # noqa: RUF012  (jinja's own interface)

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as e:
        raise WeightsError(f"the chat template is malformed at line {e.lineno}: {e.message}") from e
