"""Chat with DeepSeek-V4: messages to token ids, and the model's words back to reasoning, content and tool calls.

    messages, tools ──▶ <BOS>system<User>...<Assistant><think>  ──▶ token ids
    token texts     ──▶ reasoning </think> content  tool calls  ──▶ Said, Said, ...

The model has no jinja template. Its grammar is the package deepseek-recipe (its V4-Pro encoding is V4-Flash's too), and
this is a border around it: foreign types and errors stop here. Text of users is encoded apart from special tokens, so
that nobody can forge a turn by writing one out.

Without `reasoning_effort` no effort prefix is put before the prompt: the two generations of the encoding disagree on
its default, and it changes how long answers are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitserve.errors import ConfigError, RequestError, WeightsError

from .said import Said

_MODEL = "DeepSeek-V4-Pro"  # the encoding's name for itself
_NO_PREFIX = "low"  # the effort whose prefix is empty
_EFFORTS = ("low", "high", "max")
_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True)
class Chat:
    """What a request says about its prompt, beyond sampling."""

    messages: Sequence[Mapping[str, Any]]  # as in OpenAI's API; reasoning_content and tool results included
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    thinking: bool = True
    effort: str | None = None  # low, high or max
    continue_final: bool = False  # go on with the last message, which is the assistant's
    response_format: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    answer: Callable[[], Answer] = field(repr=False)  # a reader for each answer to it


class DeepseekChat:
    """Encodes conversations with one checkpoint's tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer_json: Path) -> None:
        """Raises ConfigError where deepseek-recipe is not installed, WeightsError for a tokenizer that cannot be read
        or is another model's.
        """
        self._recipe = _recipe()
        try:
            tokenizer = self._recipe.Tokenizer.from_file(str(tokenizer_json))
        except (RuntimeError, ValueError, OSError) as e:
            raise WeightsError(f"{tokenizer_json}: {e}") from e
        _check_special_tokens(self._recipe, tokenizer, tokenizer_json)
        self._encoding = self._recipe.DeepseekV4Encoding().with_tokenizer(tokenizer)

    def prompt(self, chat: Chat) -> Prompt:
        """Raises RequestError where the conversation is not one that the model knows."""
        request = self._convert(chat)
        try:
            tokens = self._encoding.encode(request.conversation)
        except RuntimeError as e:
            raise RequestError(f"these messages cannot be encoded: {e}", field="messages") from e
        return Prompt(list(tokens), lambda: Answer(self._recipe, request))

    def text(self, chat: Chat) -> str:
        """The prompt written out, special tokens included: for people to look at."""
        rendered = self._encoding.render_conversation(self._convert(chat).conversation)
        return str(rendered.prompt)

    def _convert(self, chat: Chat) -> Any:
        body = json.dumps(_body(chat), ensure_ascii=False)
        try:
            return self._recipe.ChatCompletionRequest(body).convert(self._recipe.ConversionOptions())
        except self._recipe.ConversionError as e:
            raise RequestError(_message(e.body), field="messages") from e
        except ValueError as e:  # a body of another shape than the API's, such as a role that does not exist
            raise RequestError(f"these messages are not understood: {e}", field="messages") from e


class Answer:
    """Reads one answer as its text comes. Text that may yet turn out to open a tool call is held back."""

    def __init__(self, recipe: Any, request: Any) -> None:
        self._recipe = recipe
        generator = recipe.ChatCompletionRequest.chunk_generator(request, "answer", _MODEL)
        self._stream = recipe.StreamProcessor(generator, request.parsing_options)

    def push(self, text: str) -> Said:
        return self._joined(self._stream.push(self._recipe.InferenceChunk.text(text)))

    def finish(self, *, length: bool = False) -> Said:
        """The end: by the model, or because the answer reached its most tokens (`length`)."""
        reasons = self._recipe.InferenceFinishReason
        last = self._recipe.InferenceChunk.finish(reasons.Length if length else reasons.Stop)
        return self._joined([*self._stream.push(last), *self._stream.finish()])

    @staticmethod
    def _joined(chunks: Sequence[Any]) -> Said:
        content, reasoning, finish = "", "", ""
        calls: list[dict[str, Any]] = []
        for chunk in chunks:
            for choice in json.loads(chunk.to_json())["choices"]:
                delta = choice["delta"]
                content += delta.get("content") or ""
                reasoning += delta.get("reasoning_content") or ""
                calls += delta.get("tool_calls") or ()
                finish = choice.get("finish_reason") or finish
        return Said(content, reasoning, tuple(calls), finish)


def _body(chat: Chat) -> dict[str, Any]:
    """The request as the encoding reads it; what concerns sampling stays with us."""
    if not chat.messages:
        raise RequestError("messages is missing or empty", field="messages")
    for name, value, known in (
        ("reasoning_effort", chat.effort or _NO_PREFIX, _EFFORTS),
        ("tool_choice", chat.tool_choice, _CHOICES),
    ):
        if value not in known:
            raise RequestError(f"{name} is {value!r}, must be one of {', '.join(known)}", field=name)
    messages = [dict(m) for m in chat.messages]
    if chat.continue_final:
        if messages[-1].get("role") != "assistant":
            raise RequestError(
                "continue_final_message needs a last message of the assistant", field="continue_final_message"
            )
        messages[-1]["prefix"] = True
    body: dict[str, Any] = {
        "model": _MODEL,
        "messages": messages,
        "thinking": {"type": "enabled" if chat.thinking else "disabled"},
    }
    if chat.thinking:
        body["reasoning_effort"] = chat.effort or _NO_PREFIX
    if chat.tools:
        body["tools"] = list(chat.tools)
        body["tool_choice"] = chat.tool_choice
    if chat.response_format is not None:
        body["response_format"] = dict(chat.response_format)
    return body


def _check_special_tokens(recipe: Any, tokenizer: Any, path: Path) -> None:
    """Each token that a turn is made of must be one, or turns could be written out by anybody."""
    kinds = recipe.SpecialToken
    for kind in (kinds.Bos, kinds.Eos, kinds.User, kinds.Assistant, kinds.ThinkingStart, kinds.ThinkingEnd):
        text = kind.default_str()
        if len(tokenizer.encode(text)) != 1:
            raise WeightsError(f"{path}: {text} is not a token, so this is not DeepSeek-V4's tokenizer")


def _message(body: str) -> str:
    """What the encoding says, out of its error body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"])
    except (ValueError, KeyError, TypeError):
        return body


def _recipe() -> Any:
    try:
        import deepseek_recipe
    except ImportError as e:
        raise ConfigError(
            "chat with DeepSeek-V4 needs the package deepseek-recipe",
            fix="pip install 'splitserve[deepseek]'",
        ) from e
    return deepseek_recipe
