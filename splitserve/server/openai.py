"""Bodies of OpenAI's /v1/chat/completions and /v1/completions: their fields and the checks that only they need.

What an answer looks like is in openai_answer.py; what all APIs share is in params.py.
"""

from __future__ import annotations

from typing import Any

import msgspec

from splitserve.errors import RequestError

from .params import MAX_LOGPROBS, SamplingFields, in_range
from .resumption import Resume
from .sequential import KvTransferParams
from .structured import StructuredOutputs


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM: usage in every chunk


class OpenAIFields(SamplingFields, kw_only=True):
    """Shared by both bodies. Below `stream_options` are extensions that SGLang's and vLLM's servers also take."""

    model: str | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    rid: str | list[str] | None = None
    request_id: str | None = None
    priority: int | None = None
    best_of: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int | None] | None = None
    kv_transfer_params: KvTransferParams | None = None
    splitserve_resume: Resume | None = None  # from our router only


class ChatBody(OpenAIFields, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None  # DeepSeek's API: {"type": "enabled"}
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None


class CompletionBody(OpenAIFields, kw_only=True):
    prompt: Any = None  # text, token ids, or a list of either: looked at by hand
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


def check_fixed(body: OpenAIFields) -> None:
    """Fields whose only supported values are those that ask for nothing."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError(f"best_of is {body.best_of}, must equal n ({body.n or 1})", field="best_of")
    if isinstance(body, ChatBody) and body.echo:
        raise RequestError("echo is not supported for chat", field="echo")


def chat_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None:
        in_range(body.top_logprobs, "top_logprobs", low=0, high=MAX_LOGPROBS)
        if not body.logprobs and body.top_logprobs:
            raise RequestError("top_logprobs needs logprobs: true", field="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def messages_of(body: ChatBody) -> list[dict[str, Any]]:
    """Messages in the form that templates know: content of text parts becomes one text."""
    if not body.messages:
        raise RequestError("messages is missing or empty", field="messages")
    return [_message(m, f"messages[{i}]") for i, m in enumerate(body.messages)]


def _message(message: dict[str, Any], name: str) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{name}.role must be a string", field=f"{name}.role")
    if isinstance(content, list):
        return {
            **message,
            "content": "\n".join(_part(p, f"{name}.content[{i}]") for i, p in enumerate(content)),
        }
    if content is None and not message.get("tool_calls"):
        raise RequestError(f"{name}.content is missing", field=f"{name}.content")
    if content is not None and not isinstance(content, str):
        raise RequestError(f"{name}.content must be a string or a list of parts", field=f"{name}.content")
    return {**message, "content": content or ""}


def _part(part: Any, name: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(text, str):
        raise RequestError(
            f'{name} must be {{"type": "text", "text": ...}}: this server takes text only', field=name
        )
    return text
