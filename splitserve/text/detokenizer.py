"""Token ids to text while they come, never half a character. O(1) amortised a token: no text is decoded twice.

Invariant: the increments, with the last one from `finish`, join to what `Tokenizer.decode` gives for all ids. One
exception: an output continues a prompt, so the blank with which SentencePiece begins a text is kept here.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from .tokenizer import Tokenizer


class Detokenizer:
    """The state of one output: at most three bytes of an unfinished character."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Iterable[int]) -> str:
        """Text that these tokens complete; may be empty."""
        tokenizer, skip = self._tokenizer, self._skip_special
        raw = b"".join(tokenizer.token_bytes(t) for t in tokens if not (skip and tokenizer.is_special(t)))
        return self._utf8.decode(raw) if raw else ""

    def finish(self) -> str:
        """What is left when no more tokens come: U+FFFD for an unfinished character, else nothing."""
        return self._utf8.decode(b"", True)
