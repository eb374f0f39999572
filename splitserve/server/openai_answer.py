"""Answers of OpenAI's endpoints: chat.completion, text_completion and their chunks.

A chat stream's first chunk carries the role together with the first text, so that its first event is its first token.
Deltas without text, ending or logprobs make no event.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from splitserve.text.said import Said, joined, whole_calls
from splitserve.text.tokenizer import Tokenizer
from splitserve.types import FinishReason, TokenLogprobs

from .answer import event
from .choice import Choice, Delta, Entry
from .job import Run


class Style(msgspec.Struct, frozen=True):
    """What of the request decides the answer's form."""

    model: str
    created: int  # seconds since 1970
    answer_id: str
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None
    echo: bool = False


class Form(Protocol):
    """The difference between chat and completion."""

    name: str
    chunk_name: str

    def chunk(self, index: int, delta: Delta, *, first: bool) -> dict[str, Any]: ...

    def whole(self, index: int, choice: Choice, *, entries: Sequence[Entry]) -> dict[str, Any]: ...


class OpenAIShape:
    """One answer: ids, usage and order of events; the form fills in the choices."""

    def __init__(self, run: Run, style: Style, *, form: Form) -> None:
        self._run = run
        self._style = style
        self._form = form
        self._begun: set[int] = set() if run.job.emitted is None else {0}
        self._entries: list[list[Entry]] = [[] for _ in run.choices]
        self._head = {
            "id": style.answer_id,
            "object": form.chunk_name if run.job.stream else form.name,
            "created": style.created,
            "model": style.model,
        }

    def take(self, deltas: list[tuple[int, Delta]]) -> None:
        """Remember what a whole answer needs and the choices do not keep."""
        if self._style.logprobs is not None:
            for index, delta in deltas:
                self._entries[index] += delta.entries

    def frames(self, deltas: list[tuple[int, Delta]]) -> bytes:
        out = []
        for index, delta in deltas:
            seen = delta.shows or (delta.entries and self._style.logprobs is not None)
            first = index not in self._begun
            if not seen and not (first and self._style.echo):
                continue
            self._begun.add(index)
            chunk: dict[str, Any] = {**self._head, "choices": [self._form.chunk(index, delta, first=first)]}
            if self._style.include_usage:
                chunk["usage"] = self._usage() if self._style.continuous_usage else None
            out.append(self._run.comment(delta) + event(chunk))
        return b"".join(out)

    def last(self) -> bytes:
        if not self._style.include_usage:
            return b""
        return event({**self._head, "choices": [], "usage": self._usage()})

    def whole(self) -> dict[str, Any]:
        choices = [self._form.whole(i, c, entries=self._entries[i]) for i, c in enumerate(self._run.choices)]
        return {**self._head, "choices": choices, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        prompt, output = self._run.job.num_prompt_tokens, self._run.num_output
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": self._run.num_cached},
        }


class ChatForm:
    name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, style: Style, tokenizer: Tokenizer) -> None:
        self._style = style
        self._tokenizer = tokenizer

    def chunk(self, index: int, delta: Delta, *, first: bool) -> dict[str, Any]:
        said: dict[str, Any] = {"role": "assistant"} if first else {}
        if delta.said is None:
            said |= {"content": delta.text} if delta.text or first else {}
        else:
            said |= _parts(delta.said)
        return {
            "index": index,
            "delta": said,
            "logprobs": self._logprobs(delta.entries),
            "finish_reason": _chat_reason(delta, delta.said),
        }

    def whole(self, index: int, choice: Choice, *, entries: Sequence[Entry]) -> dict[str, Any]:
        said = joined(choice.said) if choice.said else None
        message = {"content": choice.text} if said is None else _message(said)
        return {
            "index": index,
            "message": {"role": "assistant", **message},
            "logprobs": self._logprobs(entries),
            "finish_reason": _chat_reason(choice, said),
        }

    def _logprobs(self, entries: Sequence[Entry]) -> dict[str, Any] | None:
        if self._style.logprobs is None:
            return None
        return {"content": [self._token(e) for e in entries if e.logprobs is not None]}

    def _token(self, entry: Entry) -> dict[str, Any]:
        found = entry.logprobs or TokenLogprobs(0.0)
        best = zip(found.top_ids, found.top_logprobs, strict=True)
        wanted = self._style.logprobs or 0
        return {
            **self._named(entry.token, found.logprob),
            "top_logprobs": [self._named(t, p) for t, p in best][:wanted],
        }

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


class CompletionForm:
    name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, style: Style, tokenizer: Tokenizer, run: Run) -> None:
        self._style = style
        self._tokenizer = tokenizer
        self._run = run

    def chunk(self, index: int, delta: Delta, *, first: bool) -> dict[str, Any]:
        echoed = self._echoed(index) if first else ""
        return {
            "index": index,
            "text": echoed + delta.text,
            "logprobs": self._logprobs(index, delta.entries, prompt=first),
            "finish_reason": _reason(delta),
        }

    def whole(self, index: int, choice: Choice, *, entries: Sequence[Entry]) -> dict[str, Any]:
        return {
            "index": index,
            "text": self._echoed(index) + choice.text,
            "logprobs": self._logprobs(index, entries, prompt=True),
            "finish_reason": _reason(choice),
        }

    def _echoed(self, index: int) -> str:
        if not self._style.echo:
            return ""
        prompt = self._run.job.prompts[index // self._run.job.n]
        return prompt.text if prompt.text is not None else self._tokenizer.decode(prompt.tokens)

    def _logprobs(self, index: int, entries: Sequence[Entry], *, prompt: bool) -> dict[str, Any] | None:
        if self._style.logprobs is None:
            return None
        out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if prompt and self._style.echo:
            self._add_prompt(index, out)
        base = len(self._echoed(index))
        for entry in entries:
            if entry.logprobs is not None:
                self._add(out, entry.token, found=entry.logprobs, offset=base + entry.start)
        return out

    def _add_prompt(self, index: int, out: dict[str, Any]) -> None:
        """Prompt tokens come first; nothing precedes the first one, so its logprob is null."""
        tokens = self._run.job.prompts[index // self._run.job.n].tokens
        found = self._run.choices[index].prompt_logprobs
        offset = 0
        for i, token in enumerate(tokens):
            self._add(out, token, found=found[i] if i < len(found) else None, offset=offset)
            offset += 0 if self._tokenizer.is_special(token) else len(self._tokenizer.token_text(token))

    def _add(self, out: dict[str, Any], token: int, *, found: TokenLogprobs | None, offset: int) -> None:
        text = self._tokenizer.token_text
        out["tokens"].append(text(token))
        out["text_offset"].append(offset)
        out["token_logprobs"].append(found.logprob if found else None)
        if found is None:
            out["top_logprobs"].append(None)
            return
        best = {text(t): p for t, p in zip(found.top_ids, found.top_logprobs, strict=True)}
        out["top_logprobs"].append({**best, text(token): found.logprob} if self._style.logprobs else {})


def _parts(said: Said) -> dict[str, Any]:
    """The fields of a chunk's delta: those that have something new."""
    given = {
        "reasoning_content": said.reasoning,
        "content": said.content,
        "tool_calls": list(said.tool_calls),
    }
    return {name: value for name, value in given.items() if value}


def _message(said: Said) -> dict[str, Any]:
    """The fields of a whole message. Content is null where the answer only thinks or calls tools."""
    calls = whole_calls(said.tool_calls)
    return {
        "content": said.content or ("" if not (calls or said.reasoning) else None),
        **({"reasoning_content": said.reasoning} if said.reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _chat_reason(ended: Delta | Choice, said: Said | None) -> str | None:
    """As `_reason`, but an answer that calls tools waits for what they say."""
    reason = _reason(ended)
    return said.finish if said is not None and said.finish and reason == FinishReason.STOP.value else reason


def _reason(ended: Delta | Choice) -> str | None:
    return ended.ending.reason.value if ended.ending else None
