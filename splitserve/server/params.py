"""Sampling settings of all APIs: one struct of shared fields, one place where their ranges are checked.

Nothing here is silently clamped: a value that cannot be honoured is a RequestError with the field and the range.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from splitserve.errors import RequestError
from splitserve.types import Grammar, SamplingParams

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 128
MAX_BIASES = 1024
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_REPETITION = 10.0
MAX_TEMPERATURE = 100.0
MIN_TEMPERATURE = 1e-5
"""Below it the best token is taken: logits divided by so little overflow, and no other token has a chance."""
MAX_PRIORITY = 2**31


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that mean the same in every body that has them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    n: int | None = None
    json_schema: str | dict[str, Any] | None = None  # structured.py reads these three
    regex: str | None = None
    ebnf: str | None = None


class TextRules(msgspec.Struct, frozen=True):
    """How tokens become the answer's text."""

    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    skip_special: bool = True


class ModelLimits(msgspec.Struct, frozen=True):
    """What the engine said about its model."""

    max_len: int
    vocab_size: int
    eos_ids: tuple[int, ...] = ()


def sampling(
    fields: SamplingFields,
    *,
    limits: ModelLimits,
    max_tokens: int,
    min_tokens: int = 0,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    grammar: Grammar | None = None,
    prefix: str = "",
) -> SamplingParams:
    """Checked SamplingParams without seed and choice, which differ between the choices of a request.

    `top_k` -1 keeps all, as 0 does. Raises RequestError; `prefix` comes before field names.
    """

    def number(name: str, default: float, *, low: float, high: float, open_low: bool = False) -> float:
        value = getattr(fields, name)
        return (
            default
            if value is None
            else in_range(value, f"{prefix}{name}", low=low, high=high, open_low=open_low)
        )

    if min_tokens > max_tokens > 0:
        raise RequestError(
            f"min_tokens is {min_tokens}, more than max_tokens {max_tokens}", field=f"{prefix}min_tokens"
        )
    ends = () if fields.ignore_eos and grammar is None else limits.eos_ids  # a grammar's end is the answer's
    top_k = int(number("top_k", 0, low=-1, high=2**31))
    temperature = number("temperature", 1.0, low=0, high=MAX_TEMPERATURE)
    return SamplingParams(
        temperature=0.0 if temperature < MIN_TEMPERATURE else temperature,
        top_k=max(0, top_k),
        top_p=number("top_p", 1.0, low=0, high=1, open_low=True),
        min_p=number("min_p", 0.0, low=0, high=1),
        repetition_penalty=number("repetition_penalty", 1.0, low=0, high=MAX_REPETITION, open_low=True),
        presence_penalty=number("presence_penalty", 0.0, low=-2, high=2),
        frequency_penalty=number("frequency_penalty", 0.0, low=-2, high=2),
        logit_bias=_biases(fields.logit_bias, f"{prefix}logit_bias", vocab_size=limits.vocab_size),
        max_tokens=max(1, max_tokens),
        min_tokens=min_tokens,
        stop_token_ids=tuple(dict.fromkeys([*_stop_tokens(fields, limits, prefix=prefix), *ends])),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )


def text_rules(fields: SamplingFields, *, keep_stop: bool | None = None, prefix: str = "") -> TextRules:
    """Stop strings and what the text shows of special tokens."""
    name = f"{prefix}stop"
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if len(stops) > MAX_STOPS:
        raise RequestError(f"{name} has {len(stops)} strings, at most {MAX_STOPS} are taken", field=name)
    for i, stop in enumerate(stops):
        if not stop or len(stop) > MAX_STOP_CHARS:
            raise RequestError(
                f"{name}[{i}] must have 1 to {MAX_STOP_CHARS} characters, not {len(stop)}", field=name
            )
    return TextRules(
        stops=tuple(stops),
        keep_stop=bool(fields.no_stop_trim or keep_stop),
        skip_special=fields.skip_special_tokens is not False,
    )


def num_choices(fields: SamplingFields, prefix: str = "") -> int:
    return 1 if fields.n is None else int(in_range(fields.n, f"{prefix}n", low=1, high=MAX_CHOICES))


def in_range(value: float, name: str, *, low: float, high: float, open_low: bool = False) -> float:
    """`value`, if it is a finite number in [low, high] (or (low, high]); RequestError otherwise."""
    # An integer of JSON may be too large for a float; isfinite would raise on it.
    fits = (low < value if open_low else low <= value) and value <= high
    if not fits or not math.isfinite(value):
        raise RequestError(
            f"{name} is {_shown(value)}, must be in {'(' if open_low else '['}{low:g}, {high:g}]", field=name
        )
    return value


def token_budget(
    given: int | None,
    *,
    name: str,
    num_prompt: int,
    limits: ModelLimits,
    default: int | None,
) -> int:
    """Tokens a choice may emit. A prompt or a wish that does not fit the model is a RequestError with both numbers.

    `default` None means: what is left of the model's length.
    """
    left = limits.max_len - num_prompt
    if left < 1:
        raise RequestError(
            f"the prompt has {num_prompt} tokens, this server takes {limits.max_len} in prompt and output together",
            field="prompt",
            fix="shorten the prompt, or start the engine with a larger max_len",
        )
    if given is None:
        return left if default is None else min(default, left)
    in_range(given, name, low=0, high=2**53)
    if given > left:
        raise RequestError(
            f"{name} is {given}, but the prompt has {num_prompt} tokens and this server takes {limits.max_len} in all",
            field=name,
            fix=f"ask for at most {left}",
        )
    return given


def check_text(size: int, name: str, *, limits: ModelLimits, most: int) -> None:
    """Refuse a text of `size` characters that cannot fit, before anybody reads it: `most` is all that ever could."""
    if size > most:
        raise RequestError(
            f"{name} has {size} characters, and no more than {most} can fit into the {limits.max_len} tokens that "
            "this server takes in prompt and output together",
            field=name,
            fix="shorten the prompt, or start the engine with a larger max_len",
        )


def check_tokens(tokens: list[Any], name: str, *, limits: ModelLimits) -> list[int]:
    """Token ids of a prompt: integers of the vocabulary, at least one."""
    if not tokens:
        raise RequestError(f"{name} is empty", field=name)
    for i, token in enumerate(tokens):
        if type(token) is not int:
            raise RequestError(f"{name}[{i}] must be a token id, not {_shown(token)}", field=name)
        if not 0 <= token < limits.vocab_size:
            raise RequestError(
                f"{name}[{i}] is {_shown(token)}, the vocabulary has {limits.vocab_size} tokens", field=name
            )
    return tokens


def _stop_tokens(fields: SamplingFields, limits: ModelLimits, *, prefix: str) -> list[int]:
    given, name = fields.stop_token_ids, f"{prefix}stop_token_ids"
    if not given:
        return []
    if len(given) > MAX_STOP_TOKENS:
        raise RequestError(f"{name} has {len(given)} ids, at most {MAX_STOP_TOKENS} are taken", field=name)
    return check_tokens(given, name, limits=limits)


def _biases(given: dict[str, float] | None, name: str, *, vocab_size: int) -> dict[int, float]:
    if not given:
        return {}
    if len(given) > MAX_BIASES:
        raise RequestError(f"{name} has {len(given)} entries, at most {MAX_BIASES} are taken", field=name)
    found: dict[int, float] = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab_size):
            raise RequestError(f"{name} key {key[:20]!r} is no token id below {vocab_size}", field=name)
        found[int(key)] = in_range(bias, f"{name}[{key}]", low=-100, high=100)
    return found


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
