"""Structured output: which tokens a grammar lets follow, a pure function of the grammar and the tokens so far.

    JSON Schema ─┐                       tokens of the answer ─▶ follow ─┐
    regex ───────┼─▶ Grammar ─▶ compile (llguidance) ─▶ Matcher ◀────────┘──▶ mask: one bit a token
    EBNF, Lark ──┘

A matcher only remembers how far it has read; one that is lost is made again from the tokens, so a request may go on in
another engine. All foreign behaviour of llguidance stops here: callers see Grammar, ids, bytes and RequestError.

It knows no model and no logits: engine/constraint.py applies the mask.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from splitserve.errors import RequestError
from splitserve.text.tokenizer import Tokenizer
from splitserve.types import Grammar, GrammarKind

if TYPE_CHECKING:
    import llguidance

MAX_SOURCE_CHARS = 1 << 16

WHITESPACE = r"[ \t\n\r]{0,32}"
"""Between the parts of a JSON text. Bounded, or a model that likes blanks would never come to its end."""

MAX_COMPILED = 64
"""Grammars kept ready by one engine: clients repeat theirs, and the choices of a request share one."""


def from_json_schema(schema: Any, field: str) -> Grammar:
    """A schema as JSON text or as its object; properties keep their order. Raises RequestError naming `field`."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as e:
            raise RequestError(f"{field} is no JSON: {e}", field=field) from None
    if not isinstance(schema, dict):
        raise RequestError(f"{field} must be a JSON Schema: an object", field=field)
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))


def from_choices(choices: Sequence[str]) -> Grammar:
    """One of these texts."""
    words = (json.dumps(c, ensure_ascii=False) for c in choices)
    return Grammar(GrammarKind.EBNF, f"start: {' | '.join(words)}")


def check(grammar: Grammar, field: str) -> None:
    """Raise RequestError naming `field` for a grammar that cannot be compiled. Takes milliseconds; no tokenizer."""
    import llguidance

    _check_size(grammar.source, field)
    try:
        wrong, messages = llguidance.LLMatcher.validate_grammar_with_warnings(_compiled(grammar))
    except ValueError as e:  # no GBNF; or what only Python takes for JSON, such as NaN
        wrong, messages = True, [str(e)]
    if wrong:
        raise RequestError(f"{field}: {_first_words(messages[0])}", field=field)


class Vocabulary:
    """A model's tokens as llguidance wants them, and the grammars compiled for them.

    `size` is the width of the logits; ids beyond the tokenizer's have no text and are never allowed. Making one takes
    about half a second for 50,000 tokens.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        import llguidance

        self.size = size
        self.eos_ids = tuple(i for i in tokenizer.eos_ids if i < size)
        self._lexicon = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Lexicon(tokenizer, size)), n_vocab=size, eos_token=list(self.eos_ids)
        )
        self._fresh: OrderedDict[Grammar, llguidance.LLMatcher] = OrderedDict()

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher that has read nothing. Raises RequestError for a grammar that is too much to compile."""
        import llguidance

        if grammar not in self._fresh:
            check(grammar, grammar.kind.value)
            fresh = llguidance.LLMatcher(self._lexicon, _compiled(grammar), log_level=0)
            if fresh.is_error():
                raise RequestError(
                    f"the grammar: {_first_words(fresh.get_error())}", field=grammar.kind.value
                )
            self._fresh[grammar] = fresh
            if len(self._fresh) > MAX_COMPILED:
                self._fresh.popitem(last=False)
        self._fresh.move_to_end(grammar)
        return Matcher(self._fresh[grammar].deep_copy(), grammar)


class Matcher:
    """How far one answer has come in its grammar."""

    def __init__(self, state: llguidance.LLMatcher, grammar: Grammar) -> None:
        self._state = state
        self._mask: bytes | None = None  # of where it stands, once asked for
        self.grammar = grammar
        self.tokens: list[int] = []  # read so far

    def read(self, tokens: Sequence[int]) -> None:
        """Go on by `tokens` of the answer. Raises RequestError where the grammar does not allow them."""
        self._mask = None
        if not self._state.consume_tokens(list(tokens)):
            raise self._error()
        self.tokens += tokens

    def mask(self) -> bytes:
        """Bit i % 8 of byte i // 8: token i may come next. End tokens may where the text is a whole one.

        Raises RequestError where this takes more work than a step may spend.
        """
        if self._mask is None:
            self._mask = self._compute()
        return self._mask

    def mask_after(self, tokens: Sequence[int]) -> bytes:
        """The mask behind further tokens, which are not read for that.

        Raises RequestError where the grammar does not allow them, and as `mask` does, which ends the matcher's use.
        """
        ahead = list(tokens)
        if self._state.validate_tokens(ahead) < len(ahead) or not self._state.consume_tokens(ahead):
            raise RequestError("the grammar does not allow these tokens", field=self.grammar.kind.value)
        mask = self._compute()
        self._state.rollback(len(ahead))
        return mask

    def _compute(self) -> bytes:
        mask = self._state.compute_bitmask()
        if self._state.is_error():
            raise self._error()
        return mask

    @property
    def complete(self) -> bool:
        """Nothing but an end token may follow."""
        return self._state.is_stopped()

    def _error(self) -> RequestError:
        return RequestError(
            f"the grammar cannot be followed after {len(self.tokens)} tokens: {_first_words(self._state.get_error())}",
            field=self.grammar.kind.value,
        )


class _Lexicon:
    """What llguidance.TokenizerWrapper asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(i) for i in range(size)]
        self.special_token_ids = [i for i in range(size) if tokenizer.is_special(i)]

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special=False)


def _compiled(grammar: Grammar) -> str:
    """llguidance's own notation of a grammar. Raises ValueError where it cannot be read at all."""
    import llguidance

    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return llguidance.LLMatcher.grammar_from_json_schema(
                grammar.source, overrides={"whitespace_pattern": WHITESPACE}
            )
        case GrammarKind.REGEX:
            return llguidance.LLMatcher.grammar_from_regex(grammar.source)
        case GrammarKind.EBNF:
            return llguidance.grammar_from("ebnf", grammar.source)


def _check_size(source: str, field: str) -> None:
    if not 0 < len(source) <= MAX_SOURCE_CHARS:
        raise RequestError(
            f"{field} has {len(source)} characters, must have 1 to {MAX_SOURCE_CHARS}", field=field
        )


def _first_words(message: str) -> str:
    """The beginning of a foreign message, on one line."""
    words = " ".join(message.split())
    return words if len(words) <= 300 else f"{words[:297]}..."
