"""From a request's bytes to a Job: parse, check the model's name, make prompts into tokens, check every number.

Everything that can be refused is refused here, before a byte of an answer is sent, with a RequestError.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from splitserve.errors import ModelNotFound, RequestError
from splitserve.text.said import Reader
from splitserve.text.tokenizer import Tokenizer
from splitserve.types import Grammar, Role
from splitserve.wire import Room

from . import fields, params, resumption, rooms, sequential, structured
from .body import read_object, typed
from .conversation import ChatModel, ChatPrompt, prompt_of
from .job import Job, Prompt
from .openai import ChatBody, CompletionBody, OpenAIFields, chat_logprobs, check_fixed
from .openai_answer import Style
from .params import ModelLimits, SamplingFields, TextRules
from .resumption import FIELD, OWN_ROUTER, Resume, Ticket
from .sglang import GenerateBody, GenerateStyle, SglangSampling, logprobs_of

ANY_MODEL = ("", "unknown", "default")
"""Names that ask for no model in particular; sglang_router writes "unknown" when its client named none."""

COMPLETION_TOKENS, GENERATE_TOKENS = 16, 128
"""Output where the client names no number: what the two protocols promise."""

MAX_PROMPTS = 1024
MAX_RID_CHARS = 512


@dataclass(frozen=True)
class Intake:
    """What has to be known of a model to accept requests for it."""

    names: tuple[str, ...]  # the first is shown
    tokenizer: Tokenizer
    chat: ChatModel
    limits: ModelLimits
    place: rooms.Place

    async def chat_job(self, raw: bytes, headers: Mapping[str, str]) -> tuple[Job, Style]:
        """A body of /v1/chat/completions."""
        body = typed(read_object(raw), ChatBody, ignored=fields.IGNORED_OPENAI, neutral=fields.NEUTRAL_OPENAI)
        self.check_model(body.model)
        check_fixed(body)
        best = chat_logprobs(body)
        grammar = await structured.grammar_of(body)
        chat = await self.chat_prompt(body, guided=grammar is not None)
        if body.max_completion_tokens is not None and body.max_tokens is not None:
            raise RequestError("give max_tokens or max_completion_tokens, not both", field="max_tokens")
        name = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
        style = self._style(body, headers, prefix="chatcmpl", logprobs=best, echo=False)
        wish = _Wish(
            endpoint="chat",
            prompts=(Prompt(chat.tokens),),
            reader=chat.reader,
            max_tokens=body.max_tokens if body.max_tokens is not None else body.max_completion_tokens,
            max_name=name,
            default_tokens=None,
            min_tokens=body.min_tokens,
            seed=body.seed,
            logprobs=best,
            rid=body.rid or body.request_id or headers.get("x-request-id") or style.answer_id,
            grammar=grammar,
            answer_id=style.answer_id,
            created=style.created,
            resume=body.splitserve_resume,
            traced=OWN_ROUTER in headers,
        )
        return self._job(body, wish, stream=body.stream, priority=body.priority, place=body), style

    async def completion_job(self, raw: bytes, headers: Mapping[str, str]) -> tuple[Job, Style]:
        """A body of /v1/completions."""
        body = typed(
            read_object(raw), CompletionBody, ignored=fields.IGNORED_OPENAI, neutral=fields.NEUTRAL_OPENAI
        )
        self.check_model(body.model)
        check_fixed(body)
        if body.logprobs is not None:
            params.in_range(body.logprobs, "logprobs", low=0, high=params.MAX_LOGPROBS)
        echo = bool(body.echo)
        special = body.add_special_tokens is not False
        style = self._style(body, headers, prefix="cmpl", logprobs=body.logprobs, echo=echo)
        wish = _Wish(
            endpoint="completions",
            prompts=await self._prompts(body.prompt, "prompt", add_special=special),
            max_tokens=body.max_tokens,
            max_name="max_tokens",
            default_tokens=COMPLETION_TOKENS,
            min_tokens=body.min_tokens,
            seed=body.seed,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if echo else None,
            rid=body.rid or body.request_id or headers.get("x-request-id") or style.answer_id,
            grammar=await structured.grammar_of(body),
            answer_id=style.answer_id,
            created=style.created,
            resume=body.splitserve_resume,
            traced=OWN_ROUTER in headers,
        )
        return self._job(body, wish, stream=body.stream, priority=body.priority, place=body), style

    async def generate_job(self, raw: bytes, headers: Mapping[str, str]) -> tuple[Job, GenerateStyle]:
        """A body of /generate."""
        body = typed(
            read_object(raw), GenerateBody, ignored=fields.IGNORED_SGLANG, neutral=fields.NEUTRAL_SGLANG
        )
        self.check_model(body.model)
        prefix = "sampling_params."
        sampling = typed(
            body.sampling_params or {},
            SglangSampling,
            ignored=("spaces_between_special_tokens",),
            neutral=fields.NEUTRAL_SGLANG_SAMPLING,
            prefix=prefix,
        )
        if (body.text is None) == (body.input_ids is None):
            raise RequestError("give exactly one of text and input_ids", field="text")
        best, prompt_best = logprobs_of(body)
        given: Any = body.text if body.text is not None else body.input_ids
        resume = resumption.taken(body.splitserve_resume, headers)
        made_up = resume.ticket.answer_id if resume else secrets.token_hex(12)
        wish = _Wish(
            endpoint="generate",
            prompts=await self._prompts(given, "text" if body.text is not None else "input_ids"),
            max_tokens=sampling.max_new_tokens,
            max_name=f"{prefix}max_new_tokens",
            default_tokens=GENERATE_TOKENS,
            min_tokens=sampling.min_new_tokens,
            seed=next((s for s in (sampling.sampling_seed, sampling.seed, body.seed) if s is not None), None),
            logprobs=best,
            prompt_logprobs=prompt_best,
            rid=body.rid or headers.get("x-request-id") or made_up,
            grammar=await structured.grammar_of(sampling, prefix),
            prefix=prefix,
            answer_id=made_up,
            resume=resume,
            traced=OWN_ROUTER in headers,
        )
        job = self._job(sampling, wish, stream=body.stream, priority=body.priority, place=body)
        many = isinstance(given, list) and isinstance(given[0], list | str)
        return job, GenerateStyle(
            many=many or job.n > 1,
            logprobs=best is not None,
            best=best or 0,
            start=body.logprob_start_len if body.logprob_start_len is not None else -1,
            with_text=bool(body.return_text_in_logprobs),
            finished_elsewhere=job.half == "decode" and not job.stream and OWN_ROUTER not in headers,
        )

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in ANY_MODEL and name not in self.names:
            raise ModelNotFound(
                f"model {name[:200]!r} is not served here",
                field="model",
                fix=f"this server has {self.names[0]!r}",
            )

    async def chat_prompt(self, body: ChatBody, *, guided: bool = False) -> ChatPrompt:
        """The messages in the model's own form, as tokens, and what reads the answers to them."""
        self.check_text(sum(len(str(m)) for m in body.messages or ()), "messages")
        prompt = await prompt_of(body, self.chat, tokenizer=self.tokenizer, guided=guided)
        params.check_tokens(prompt.tokens, "messages", limits=self.limits)
        return prompt

    def check_text(self, size: int, name: str) -> None:
        """Raises RequestError for so many characters that no tokens of theirs could fit."""
        most = self.tokenizer.most_chars(self.limits.max_len)
        params.check_text(size, name, limits=self.limits, most=most)

    # ------------------------------------------------------------------ parts

    async def _prompts(self, given: Any, name: str, *, add_special: bool = True) -> tuple[Prompt, ...]:
        """A text, token ids, or a list of either."""
        if given is None:
            raise RequestError(f"{name} is missing", field=name)
        if not isinstance(given, list):
            return (await self._prompt(given, name, add_special=add_special),)
        if not given:
            raise RequestError(f"{name} is empty", field=name)
        if not isinstance(given[0], list | str):
            return (Prompt(params.check_tokens(given, name, limits=self.limits)),)
        if len(given) > MAX_PROMPTS:
            raise RequestError(
                f"{name} has {len(given)} prompts, at most {MAX_PROMPTS} are taken", field=name
            )
        return tuple(
            [await self._prompt(p, f"{name}[{i}]", add_special=add_special) for i, p in enumerate(given)]
        )

    async def _prompt(self, given: Any, name: str, *, add_special: bool) -> Prompt:
        if isinstance(given, list):
            return Prompt(params.check_tokens(given, name, limits=self.limits))
        if not isinstance(given, str):
            raise RequestError(f"{name} must be a text or a list of token ids", field=name)
        if not given:
            raise RequestError(f"{name} is empty", field=name)
        self.check_text(len(given), name)
        tokens = await self.tokenizer.encode_async(given, add_special=add_special)
        return Prompt(params.check_tokens(tokens, name, limits=self.limits), given)

    def _job(
        self,
        body: SamplingFields,
        wish: _Wish,
        *,
        stream: bool | None,
        priority: int | None,
        place: sequential.SequentialFields,
    ) -> Job:
        n = params.num_choices(body, wish.prefix)
        budgets = self._budgets(wish)
        min_tokens = int(
            params.in_range(wish.min_tokens or 0, f"{wish.prefix}min_tokens", low=0, high=self.limits.max_len)
        )
        sampling = params.sampling(
            body,
            limits=self.limits,
            max_tokens=max(budgets),
            min_tokens=min_tokens,
            logprobs=wish.logprobs,
            prompt_logprobs=wish.prompt_logprobs,
            grammar=wish.grammar,
            prefix=wish.prefix,
        )
        met = rooms.rooms(
            sequential.meeting(place, self.place), self.place, num_prompts=len(wish.prompts), n=n
        )
        half = self.place.role.value if met else ""
        seeds = _seeds(wish, num_prompts=len(wish.prompts), n=n, met=met)
        ticket, emitted = self._continuing(
            wish, seeds, budgets=budgets, n=n, told=bool(stream) and half != Role.PREFILL
        )
        keep_stop = isinstance(body, OpenAIFields) and bool(body.include_stop_str_in_output)
        rules = params.text_rules(body, keep_stop=keep_stop, prefix=wish.prefix)
        return Job(
            endpoint=wish.endpoint,
            rids=_rids(wish, len(wish.prompts) * n),
            prompts=wish.prompts,
            n=n,
            sampling=sampling,
            seeds=seeds,
            # Prefill's one token ends nothing there: a stop would take the handoff back.
            rules=rules if half != Role.PREFILL else TextRules(skip_special=rules.skip_special),
            rooms=met,
            half=half,
            priority=int(
                params.in_range(priority or 0, "priority", low=-params.MAX_PRIORITY, high=params.MAX_PRIORITY)
            ),
            stream=bool(stream),
            answers_first=sequential.answers_first(place),
            discard=max(budgets) == 0,
            reader=wish.reader,
            emitted=emitted,
            ticket=ticket,
        )

    def _budgets(self, wish: _Wish) -> list[int]:
        """Tokens that a choice of each prompt may emit."""
        return [
            params.token_budget(
                wish.max_tokens,
                name=wish.max_name,
                num_prompt=len(p.tokens),
                limits=self.limits,
                default=wish.default_tokens,
            )
            for p in wish.prompts
        ]

    def _continuing(
        self, wish: _Wish, seeds: tuple[int, ...], *, budgets: list[int], n: int, told: bool
    ) -> tuple[Ticket | None, tuple[int, ...] | None]:
        """(what our router needs to continue this answer elsewhere, tokens that were emitted elsewhere already)."""
        single = len(budgets) * n == 1 and wish.logprobs is None and wish.prompt_logprobs is None
        if wish.resume is None:
            wanted = wish.traced and told and single and budgets[0] > 0
            answer_id = wish.answer_id if wish.answer_id.isascii() else ""  # it goes into a header
            return Ticket(0, seeds[0], answer_id, wish.created) if wanted else None, None
        tokens = wish.resume.tokens
        if tokens:
            params.check_tokens(tokens, f"{FIELD}.tokens", limits=self.limits)
        if not single or len(tokens) >= budgets[0]:
            raise RequestError("no stream of this request can be continued from these tokens", field=FIELD)
        ticket = msgspec.structs.replace(wish.resume.ticket, num_tokens=len(tokens))
        return ticket if told else None, tuple(tokens)

    def _style(
        self,
        body: OpenAIFields,
        headers: Mapping[str, str],
        *,
        prefix: str,
        logprobs: int | None,
        echo: bool,
    ) -> Style:
        resume = resumption.taken(body.splitserve_resume, headers)
        options = body.stream_options
        if options is not None and not body.stream:
            raise RequestError("stream_options needs stream: true", field="stream_options")
        given = body.rid or body.request_id
        made_up = resume.ticket.answer_id if resume else f"{prefix}-{secrets.token_hex(12)}"
        return Style(
            model=self.names[0],
            created=resume.ticket.created if resume else int(time.time()),
            answer_id=given if isinstance(given, str) and given else made_up,
            include_usage=bool(options and (options.include_usage or options.continuous_usage_stats)),
            continuous_usage=bool(options and options.continuous_usage_stats),
            logprobs=logprobs,
            echo=echo,
        )


class _Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What the three bodies say in different words."""

    endpoint: str
    prompts: tuple[Prompt, ...]
    max_tokens: int | None
    max_name: str
    default_tokens: int | None  # None: what fits
    min_tokens: int | None
    seed: int | None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    rid: str | list[str] | None = None
    grammar: Grammar | None = None
    reader: Callable[[], Reader] | None = None
    prefix: str = ""
    answer_id: str = ""  # as the answer will show it
    created: int = 0
    resume: Resume | None = None
    traced: bool = False  # our router can continue the answer elsewhere


def _rids(wish: _Wish, num_choices: int) -> tuple[str, ...]:
    given = wish.rid if wish.rid else secrets.token_hex(12)
    if isinstance(given, list):
        if len(given) != num_choices:
            raise RequestError(f"rid has {len(given)} entries for {num_choices} choices", field="rid")
        rids = tuple(given)
    else:
        rids = (given,) if num_choices == 1 else tuple(f"{given}_{i}" for i in range(num_choices))
    if any(not 0 < len(r) <= MAX_RID_CHARS for r in rids):
        raise RequestError(f"rid must have 1 to {MAX_RID_CHARS} characters", field="rid")
    return rids


def _seeds(wish: _Wish, *, num_prompts: int, n: int, met: Sequence[Room]) -> tuple[int, ...]:
    """One for each prompt. Without a seed the halves of a split request find the same one from their room."""
    given = wish.seed if wish.resume is None else wish.resume.ticket.seed
    if given is not None:
        params.in_range(given, f"{wish.prefix}seed", low=-(2**63), high=2**64 - 1)
        return (given % 2**64,) * num_prompts
    if met:
        return tuple(rooms.derived_seed(met[p * n].id) for p in range(num_prompts))
    return tuple(secrets.randbits(64) for _ in range(num_prompts))
