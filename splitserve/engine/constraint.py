"""Grammars in a step: which tokens each row may choose. Every rank follows them for itself, as it samples for itself.

    row.history[num_prompt:] ─▶ matcher (kept by rid, or made again) ─▶ bits ─▶ allowed: bool [rows, vocab]

What a rank remembers is a shortcut only: a matcher that is not there, or that has read something else, is made again
from the history, so preempted, recomputed and handed-over requests go on alike.

A matcher stands where the answer does. Rows behind guesses are asked for from there, so a wrong guess leaves nothing
to take back; a row behind a guess that the grammar forbids is never reached, and is left as it is.

A grammar's end is the answer's end. `min_tokens` and `ignore_eos` forbid end tokens only while anything else may
follow; where nothing may, the end token is chosen all the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from splitserve.engine.step import Row
from splitserve.errors import RequestError
from splitserve.text.grammar import Matcher, Vocabulary
from splitserve.types import Grammar, Rid, SamplingParams

MIN_KEPT = 256
"""Matchers kept at least; twice as many as a step's rows otherwise. The least recently used go first."""


@dataclass(frozen=True)
class Narrowed:
    """The rows of a step as their grammars leave them."""

    params: list[SamplingParams]
    allowed: torch.Tensor | None = None  # bool [rows, vocab]; None: no row has a grammar
    refusals: dict[int, str] = field(default_factory=dict)  # rows whose grammar cannot be followed, and why


class Constraints:
    """`load` makes the vocabulary when the first grammar comes: most engines never see one."""

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._vocabulary: Vocabulary | None = None
        self._matchers: OrderedDict[Rid, Matcher] = OrderedDict()

    def narrow(self, rows: Sequence[Row], *, width: int, device: torch.device) -> Narrowed:
        """What each of `rows` may choose among `width` tokens."""
        params = [row.chunk.sampling or SamplingParams() for row in rows]
        guided = [i for i, p in enumerate(params) if p.grammar is not None and not self._ended(rows[i].ahead)]
        if not guided:
            return Narrowed(params)
        num_bytes = -(-width // 8)
        bits = np.full((len(rows), num_bytes), 0xFF, dtype=np.uint8)
        refusals: dict[int, str] = {}
        for i in guided:
            try:
                mask, params[i] = self._row(rows[i], params[i])
                bits[i] = mask[:num_bytes]  # llguidance rounds up to whole words
            except RequestError as e:
                refusals[i] = e.message
        while len(self._matchers) > max(MIN_KEPT, 2 * len(guided)):
            self._matchers.popitem(last=False)
        allowed = np.unpackbits(bits, axis=1, count=width, bitorder="little").view(np.bool_)
        return Narrowed(params, torch.from_numpy(allowed).to(device), refusals)

    def chosen(self, rid: Rid, tokens: Sequence[int]) -> None:
        """Tokens were sampled: read them now, since the next step may be planned before anybody knows of them.

        Where one of them ends the answer nothing is read; nothing follows.
        """
        matcher = self._matchers.get(rid)
        if matcher is None or self._ended(tokens):
            return
        try:
            matcher.read(tokens)
        except RequestError:
            del self._matchers[rid]  # the next step makes it again, and tells what is wrong

    # ------------------------------------------------------------------ one row

    def _row(self, row: Row, params: SamplingParams) -> tuple[np.ndarray, SamplingParams]:
        assert params.grammar is not None
        num_emitted = row.position - row.chunk.num_prompt
        bits = np.frombuffer(self._mask(row, params.grammar), dtype=np.uint8)
        forbidden = {
            *(params.stop_token_ids if num_emitted < params.min_tokens else ()),
            *(self._vocab().eos_ids if params.ignore_eos else ()),
        }
        left = without(bits, forbidden)
        if left.any():
            return left, params
        return bits, msgspec.structs.replace(params, min_tokens=0)

    def _mask(self, row: Row, grammar: Grammar) -> bytes:
        try:
            matcher = self._matcher(row, grammar)
            unread = row.ahead[max(0, len(matcher.tokens) - _num_known(row)) :]
            return matcher.mask_after(unread) if unread else matcher.mask()
        except RequestError:
            self._matchers.pop(row.chunk.rid, None)
            raise

    def _matcher(self, row: Row, grammar: Grammar) -> Matcher:
        """The matcher of a request, having read all tokens that it has emitted, and no others than the row's."""
        rid, known = row.chunk.rid, list((row.chunk.history or ())[row.chunk.num_prompt :])
        found = self._matchers.get(rid)
        if found is None or found.grammar != grammar or not _leads_to(found.tokens, known, row):
            found = self._vocab().matcher(grammar)
            found.read(known)
            self._matchers[rid] = found
        self._matchers.move_to_end(rid)
        return found

    def _ended(self, tokens: Sequence[int]) -> bool:
        return bool(tokens) and any(token in self._vocab().eos_ids for token in tokens)

    def _vocab(self) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = self._load()
        return self._vocabulary


def _num_known(row: Row) -> int:
    """Tokens of the answer that the row's chunk begins with or follows; not all may be in its history."""
    return row.chunk.stop - row.chunk.num_draft - row.chunk.num_prompt


def _leads_to(read: list[int], known: list[int], row: Row) -> bool:
    """Whether a matcher that has read `read` is on the way to `row`; of tokens still pending only it knows."""
    ahead = tuple(read[_num_known(row) :])
    return len(read) >= _num_known(row) and read[: len(known)] == known and ahead == row.ahead[: len(ahead)]


def without(bits: np.ndarray, tokens: Collection[int]) -> np.ndarray:
    """`bits` (token i is bit i % 8 of byte i // 8) with those of `tokens` cleared."""
    if not tokens:
        return bits
    left = bits.copy()
    for token in tokens:
        left[token // 8] &= ~(1 << token % 8) & 0xFF
    return left
