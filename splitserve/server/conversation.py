"""From a chat body to the model's prompt, in the model's own way: a jinja template, or DeepSeek-V4's encoding.

    ChatBody ─▶ template ─▶ text ─▶ tokenizer ─▶ tokens               the answer is text
             └▶ DeepseekChat ──────────────────▶ tokens, Reader       the answer has reasoning, content, tool calls

What only one of the two understands is refused by the other, by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from splitserve import log
from splitserve.errors import RequestError, SplitserveError
from splitserve.text.chat import ChatTemplate
from splitserve.text.deepseek import Chat, DeepseekChat
from splitserve.text.desk import TEXTS
from splitserve.text.said import Reader
from splitserve.text.tokenizer import LONG_TEXT, Tokenizer
from splitserve.weights.locate import Source

from .openai import ChatBody, messages_of

_log = log.get(__name__)

ChatModel = ChatTemplate | DeepseekChat


@dataclass(frozen=True)
class ChatPrompt:
    tokens: list[int]
    reader: Callable[[], Reader] | None = None  # for each answer; None: its text is content


def chat_of(source: Source, tokenizer: Tokenizer) -> ChatModel:
    """How the model of a checkpoint is talked to. A template that comes with it is preferred.

    DeepSeek-V4 comes without one; where its encoding cannot be had, chat is refused and everything else is served.
    """
    if tokenizer.templates.default is None and _model_type(source) == "deepseek_v4":
        try:
            return DeepseekChat(source.path / "tokenizer.json")
        except SplitserveError as e:
            _log.warning("no chat with this model: %s%s", e.message, f" ({e.fix})" if e.fix else "")
    return ChatTemplate(tokenizer.templates)


def _model_type(source: Source) -> str:
    if source.format != "safetensors":
        return ""
    found = json.loads((source.path / "config.json").read_text(encoding="utf-8"))
    return str(found.get("model_type", ""))


async def prompt_of(body: ChatBody, chat: ChatModel, *, tokenizer: Tokenizer, guided: bool) -> ChatPrompt:
    """The messages as tokens. `guided` says that a grammar holds the answer. Raises RequestError."""
    if isinstance(chat, DeepseekChat):
        return await _encoded(body, chat, guided=guided)
    return await _rendered(body, chat, tokenizer)


async def _rendered(body: ChatBody, chat: ChatTemplate, tokenizer: Tokenizer) -> ChatPrompt:
    if body.tool_choice not in (None, "none", "auto"):
        raise RequestError(
            "tool_choice can only be none or auto: tools are shown to the model, its words come back as text",
            field="tool_choice",
        )
    if body.thinking is not None:
        raise RequestError(
            "this model's template decides about thinking",
            field="thinking",
            fix="templates that know of it take chat_template_kwargs",
        )
    text = chat.render(
        messages_of(body),
        tools=body.tools if body.tool_choice != "none" else None,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final=bool(body.continue_final_message),
        variables=body.chat_template_kwargs,
    )
    # The template writes the model's first token itself, where there is one.
    return ChatPrompt(await tokenizer.encode_async(text, add_special=False))


async def _encoded(body: ChatBody, chat: DeepseekChat, *, guided: bool) -> ChatPrompt:
    if body.add_generation_prompt is False and not body.continue_final_message:
        raise RequestError(
            "this model's prompts always end where the assistant begins", field="add_generation_prompt"
        )
    if body.tool_choice is not None and not isinstance(body.tool_choice, str):
        raise RequestError("tool_choice must be none, auto or required for this model", field="tool_choice")
    asked = _Wishes.of(body)
    if guided and asked.thinking:
        raise RequestError(
            "an answer that must follow a grammar from its first token cannot think first",
            field="thinking",
            fix='leave thinking out, or say {"type": "disabled"}',
        )
    conversation = Chat(
        messages=messages_of(body),
        tools=body.tools or (),
        tool_choice=body.tool_choice or "auto",
        thinking=_may_think(body, guided) if asked.thinking is None else asked.thinking,
        effort=asked.effort,
        continue_final=bool(body.continue_final_message),
        response_format=body.response_format,
    )
    # The package that encodes may hold the interpreter: what it costs grows with the text.
    size = sum(len(str(m)) for m in conversation.messages) + sum(len(str(t)) for t in conversation.tools)
    encoded = (
        chat.prompt(conversation)
        if size < LONG_TEXT
        else await TEXTS.do(size, lambda: chat.prompt(conversation))
    )
    return ChatPrompt(encoded.tokens, encoded.answer)


def _may_think(body: ChatBody, guided: bool) -> bool:
    """Whether the model thinks where nothing is said: not where its first token is decided already."""
    return not guided and body.tool_choice != "required"


@dataclass(frozen=True)
class _Wishes:
    """What a body says about thinking, in any of its three ways."""

    thinking: bool | None  # None: nothing
    effort: str | None

    @classmethod
    def of(cls, body: ChatBody) -> _Wishes:
        given = dict(body.chat_template_kwargs or {})
        thinking = _flag(given, "thinking", "enable_thinking")
        effort = given.pop("reasoning_effort", body.reasoning_effort)
        if given:
            name = next(iter(given))
            raise RequestError(
                f"chat_template_kwargs.{name} is not known to this model",
                field=f"chat_template_kwargs.{name}",
                fix="it takes thinking (true or false) and reasoning_effort",
            )
        if body.thinking is not None:
            said = _switch(body.thinking)
            if thinking not in (None, said):
                raise RequestError("thinking and chat_template_kwargs disagree", field="thinking")
            thinking = said
        if effort == "none":  # how OpenAI's clients say it
            thinking, effort = thinking or False, None
        return cls(thinking, effort)


def _flag(given: dict[str, Any], *names: str) -> bool | None:
    """Take the first of `names` out of `given`; it must be true or false."""
    for name in names:
        value = given.pop(name, None)
        if value is None:
            continue
        if not isinstance(value, bool):
            where = f"chat_template_kwargs.{name}"
            raise RequestError(f"{where} must be true or false", field=where)
        return value
    return None


def _switch(thinking: Mapping[str, Any]) -> bool:
    kind = thinking.get("type")
    if kind not in ("enabled", "disabled"):
        raise RequestError("thinking.type must be enabled or disabled", field="thinking.type")
    return bool(kind == "enabled")
