"""The nouns that every part shares: who asks, how to sample, what comes back. No behaviour, no torch, no I/O."""

from __future__ import annotations

from enum import StrEnum

import msgspec

Rid = str
"""Request id: unique within one engine; choice i of an n > 1 request has its own rid."""


class Role(StrEnum):
    """What an engine is for. It decides defaults only: every engine can do both halves."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"


class FinishReason(StrEnum):
    STOP = "stop"  # an end token, a stop token id or a stop string
    LENGTH = "length"  # max_tokens or the model's length
    ABORT = "abort"  # the client left or asked for it


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"  # GBNF (root ::= ...) or Lark (start: ...)


class Grammar(msgspec.Struct, frozen=True):
    """What an answer must look like. See text/grammar.py; checked by the server before anything is queued."""

    kind: GrammarKind
    source: str


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to choose tokens. Validated where it is parsed (server); an engine may rely on the ranges given here."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0  # 64 bit; the server or the router has filled it in by now
    choice: int = 0  # index of this choice in an n > 1 request: part of the random key
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # end tokens of the model are added by the server unless ignore_eos
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: of the chosen token and the k best
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None  # its end ends the answer, whatever ignore_eos and min_tokens say


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural logarithms under the model's own distribution (before temperature and filters)."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class TokenEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one step did for one request: new tokens, or its end, or both."""

    rid: Rid
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    matched_stop: int | None = None  # the token id that ended it
    num_cached: int = 0  # prompt tokens that came from the prefix cache; set on the first event
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # first event only, when asked for
