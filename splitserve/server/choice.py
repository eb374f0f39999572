"""The text side of one choice: tokens of the engine in, text that may be shown out. Pure; knows no API.

    tokens ─▶ Detokenizer (whole characters) ─▶ StopStrings (nothing of a stop) ─▶ Delta.text ─▶ Reader ─▶ Delta.said
       └────▶ Entry (logprobs, place in the text) ── held until its text is shown ─▶ Delta.entries

The token of an end (matched_stop) counts as output but has no text, unless the client wants it kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from splitserve.text.detokenizer import Detokenizer
from splitserve.text.said import Reader, Said, joined
from splitserve.text.stops import StopStrings
from splitserve.text.tokenizer import Tokenizer
from splitserve.types import FinishReason, TokenEvent, TokenLogprobs

from .params import TextRules


@dataclass(frozen=True, slots=True)
class Ending:
    reason: FinishReason
    matched: int | str | None = None  # the token id or the string that ended it


@dataclass(frozen=True, slots=True)
class Entry:
    """One shown token. `start` and `end` are characters of the answer's text."""

    token: int
    logprobs: TokenLogprobs | None
    start: int
    end: int


@dataclass(slots=True)
class Delta:
    """What one event adds to an answer."""

    text: str = ""
    said: Said | None = None  # what the text says, where the model's answers have a grammar
    entries: list[Entry] = field(default_factory=list)
    ending: Ending | None = None
    num_tokens: int = 0  # of the choice, with those of this event

    @property
    def shows(self) -> bool:
        """Whether a client sees anything of it but logprobs."""
        return bool(self.text if self.said is None else self.said) or self.ending is not None


class Choice:
    """The state of one answer.

    `entries` says whether deltas carry them. `discard` computes without showing: the engine has to make one token
    even for none. `reader` takes the text apart; without one text is all there is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        rules: TextRules,
        *,
        min_tokens: int = 0,
        entries: bool = True,
        discard: bool = False,
        reader: Reader | None = None,
    ) -> None:
        self._reader = reader
        self._detokenizer = Detokenizer(tokenizer, skip_special=rules.skip_special)
        self._stops = StopStrings(rules.stops, keep=rules.keep_stop)
        self._keep_stop = rules.keep_stop
        self._min_tokens = min_tokens
        self._entries = entries
        self._discard = discard
        self._matched_token: int | None = None
        self._partial: list[tuple[int, TokenLogprobs | None]] = []  # of a character that is not complete
        self._waiting: deque[Entry] = deque()
        self._num_decoded = 0  # characters
        self._num_shown = 0
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []  # beside `tokens`, where asked for
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        self.num_cached = 0
        self.text = ""
        self.said: list[Said] = []  # of all deltas, where there is a reader
        self.ending: Ending | None = None

    def feed(self, event: TokenEvent) -> Delta:
        """Take one event of the engine. After a Delta with an ending nothing more must be fed."""
        self.num_cached = event.num_cached or self.num_cached
        self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs
        if event.matched_stop is not None:
            self._matched_token = event.matched_stop
        delta = Delta()
        if not self._discard:
            for i, token in enumerate(event.tokens):
                self._add(token, event.logprobs[i] if i < len(event.logprobs) else None, delta)
                if delta.ending is not None:
                    break
        if event.finish is not None and delta.ending is None:
            self._finish(event.finish, delta)
        if delta.ending is not None:
            self.ending = delta.ending
        self.text += delta.text
        self._read(delta)
        delta.num_tokens = len(self.tokens)
        return delta

    def replay(self, tokens: Sequence[int]) -> bool:
        """Take tokens that were shown elsewhere, as far as they can be. True when they end the answer."""
        delta = Delta()
        for token in tokens:
            self._add(token, None, delta)
            if delta.ending is not None:
                return True
        self.text = delta.text
        self._read(delta)
        return False

    def _add(self, token: int, logprobs: TokenLogprobs | None, delta: Delta) -> None:
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if token == self._matched_token and not self._keep_stop:
            return  # the token that ends the text, and the last one
        piece = self._detokenizer.feed((token,))
        if self._entries:
            self._partial.append((token, logprobs))
            if piece:
                self._place(len(piece))
        if len(self.tokens) <= self._min_tokens:
            self._show(piece, delta)  # too early for a stop
            return
        released = self._stops.feed(piece)
        self._show(released.text, delta)
        if released.matched is not None:
            self._cut(released.matched, delta)

    def _read(self, delta: Delta) -> None:
        """Take the delta's text apart; at the end nothing stays held back."""
        if self._reader is None:
            return
        said = [self._reader.push(delta.text)] if delta.text else []
        if delta.ending is not None:
            said.append(self._reader.finish(length=delta.ending.reason is not FinishReason.STOP))
        delta.said = joined(said)
        self.said.append(delta.said)

    def _place(self, length: int) -> None:
        """`length` characters are complete: all tokens since the last complete one share in them."""
        start, self._num_decoded = self._num_decoded, self._num_decoded + length
        self._waiting += [
            Entry(token, logprobs, start, self._num_decoded) for token, logprobs in self._partial
        ]
        self._partial.clear()

    def _show(self, text: str, delta: Delta) -> None:
        delta.text += text
        if not self._entries:
            return
        self._num_shown += len(text)
        while self._waiting and self._waiting[0].end <= self._num_shown:
            delta.entries.append(self._waiting.popleft())

    def _cut(self, stop: str, delta: Delta) -> None:
        """A stop string is complete: tokens that begin behind the cut are not shown."""
        delta.entries += [e for e in self._waiting if e.start < self._num_shown]
        self._waiting.clear()
        delta.ending = Ending(FinishReason.STOP, stop)

    def _finish(self, reason: FinishReason, delta: Delta) -> None:
        rest = self._detokenizer.finish()
        self._place(len(rest))
        released = self._stops.feed(rest)
        self._show(released.text, delta)
        if released.matched is not None:
            self._cut(released.matched, delta)
            return
        self._show(self._stops.finish(), delta)
        delta.entries += self._waiting
        self._waiting.clear()
        delta.ending = Ending(reason, self._matched_token if reason is FinishReason.STOP else None)
