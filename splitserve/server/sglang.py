"""SGLang's /generate: its body, and answers with text and output_ids so far and meta_info.

Streams repeat the whole text in every event, as that protocol wants; `index` tells choices apart.

    logprob entries are [logprob, token id, text or null], as clients of that protocol index them
"""

from __future__ import annotations

from typing import Any

import msgspec

from splitserve.errors import RequestError
from splitserve.text.tokenizer import Tokenizer
from splitserve.types import FinishReason, TokenLogprobs

from .answer import event
from .choice import Choice, Delta, Ending
from .job import Run
from .params import MAX_LOGPROBS, SamplingFields, in_range
from .resumption import Resume
from .sequential import KvTransferParams


class SglangSampling(SamplingFields, kw_only=True):
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    sampling_seed: int | None = None
    seed: int | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[Any] | None = None  # of one prompt, or of several
    sampling_params: dict[str, Any] | None = None
    stream: bool | None = None
    rid: str | list[str] | None = None
    priority: int | None = None
    model: str | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    seed: int | None = None  # a router adds it here, whatever the endpoint; sampling_params has precedence
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int | None] | None = None
    kv_transfer_params: KvTransferParams | None = None
    splitserve_resume: Resume | None = None  # from our router only


def logprobs_of(body: GenerateBody) -> tuple[int | None, int | None]:
    """How many best tokens to report for output and for the prompt; None is none at all.

    Prompt logprobs are given from token `logprob_start_len` on; -1, the default, is none.
    """
    best, start = body.top_logprobs_num or 0, body.logprob_start_len
    in_range(best, "top_logprobs_num", low=0, high=MAX_LOGPROBS)
    if start is not None:
        in_range(start, "logprob_start_len", low=-1, high=2**31)
    if not body.return_logprob:
        if best:
            raise RequestError("top_logprobs_num needs return_logprob: true", field="top_logprobs_num")
        return None, None
    return best, (best if start is not None and start >= 0 else None)


class GenerateStyle(msgspec.Struct, frozen=True):
    """What of the request decides the answer's form."""

    many: bool  # the body is an array even for one choice
    logprobs: bool = False
    best: int = 0
    start: int = -1  # first prompt token with logprobs
    with_text: bool = False
    finished_elsewhere: bool = False  # a foreign router puts prefill's prompt logprobs in front of ours


class SglangShape:
    def __init__(self, run: Run, style: GenerateStyle, *, tokenizer: Tokenizer) -> None:
        self._run = run
        self._style = style
        self._tokenizer = tokenizer

    def take(self, deltas: list[tuple[int, Delta]]) -> None:
        """Choices keep all that an answer needs."""

    def frames(self, deltas: list[tuple[int, Delta]]) -> bytes:
        newest = dict(deltas)  # every event is cumulative: the last one says all
        return b"".join(
            self._run.comment(delta) + event(self._answer(i, streamed=True)) for i, delta in newest.items()
        )

    def last(self) -> bytes:
        return b""

    def whole(self) -> Any:
        answers = [self._answer(i, streamed=False) for i in range(len(self._run.choices))]
        return answers if self._style.many or len(answers) > 1 else answers[0]

    def _answer(self, index: int, *, streamed: bool) -> dict[str, Any]:
        choice = self._run.choices[index]
        prompt = self._run.job.prompts[index // self._run.job.n]
        meta: dict[str, Any] = {
            "id": self._run.job.rids[index],
            "finish_reason": _finish_reason(choice.ending, len(choice.tokens)),
            "prompt_tokens": len(prompt.tokens),
            "completion_tokens": len(choice.tokens),
            "cached_tokens": choice.num_cached,
        }
        if self._style.logprobs:
            meta |= self._logprobs(choice, prompt.tokens)
        if not streamed or choice.ending is not None:
            meta["e2e_latency"] = self._run.age_s
        answer = {"text": choice.text, "output_ids": choice.tokens, "meta_info": meta}
        return {**answer, "index": index} if streamed and len(self._run.choices) > 1 else answer

    def _logprobs(self, choice: Choice, tokens: list[int]) -> dict[str, Any]:
        style = self._style
        first = max(0, style.start) if style.start >= 0 and not style.finished_elsewhere else len(tokens)
        asked = [*choice.prompt_logprobs, *([None] * (len(tokens) - len(choice.prompt_logprobs)))]
        prompt = list(zip(tokens, asked, strict=True))[first:]
        output = list(zip(choice.tokens, choice.logprobs, strict=False))
        found: dict[str, Any] = {
            "input_token_logprobs": [self._entry(t, p.logprob if p else None) for t, p in prompt],
            "output_token_logprobs": [self._entry(t, p.logprob) for t, p in output],
        }
        if style.best:
            found["input_top_logprobs"] = [self._best(p) for _, p in prompt]
            found["output_top_logprobs"] = [self._best(p) for _, p in output]
        return found

    def _best(self, found: TokenLogprobs | None) -> list[list[Any]] | None:
        if found is None:
            return None
        best = zip(found.top_ids, found.top_logprobs, strict=True)
        return [self._entry(t, p) for t, p in best][: self._style.best]

    def _entry(self, token: int, logprob: float | None) -> list[Any]:
        return [logprob, token, self._tokenizer.token_text(token) if self._style.with_text else None]


def _finish_reason(ending: Ending | None, num_tokens: int) -> dict[str, Any] | None:
    if ending is None:
        return None
    match ending.reason:
        case FinishReason.STOP:
            return {"type": "stop", "matched": ending.matched}
        case FinishReason.LENGTH:
            return {"type": "length", "length": num_tokens}
        case FinishReason.ABORT:
            return {"type": "abort", "message": "aborted"}
