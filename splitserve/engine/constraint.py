"""Grammars in a step: which tokens each row may choose. Every rank follows them for itself, as it samples for itself.

    chunk.history[num_prompt:] ─▶ matcher (kept by rid, or made again) ─▶ bits ─▶ allowed: bool [rows, vocab]

What a rank remembers is a shortcut only: a matcher that is not there, or that has read something else, is made again
from the history, so preempted, recomputed and handed-over requests go on alike.

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

from splitserve.engine.step import Chunk
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
    refusals: dict[Rid, str] = field(default_factory=dict)  # rows whose grammar cannot be followed, and why


class Constraints:
    """`load` makes the vocabulary when the first grammar comes: most engines never see one."""

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._vocabulary: Vocabulary | None = None
        self._matchers: OrderedDict[Rid, Matcher] = OrderedDict()

    def narrow(self, chunks: Sequence[Chunk], *, width: int, device: torch.device) -> Narrowed:
        """What each of `chunks`, all of which sample, may choose among `width` tokens."""
        params = [c.sampling or SamplingParams() for c in chunks]
        guided = [i for i, p in enumerate(params) if p.grammar is not None]
        if not guided:
            return Narrowed(params)
        num_bytes = -(-width // 8)
        bits = np.full((len(chunks), num_bytes), 0xFF, dtype=np.uint8)
        refusals: dict[Rid, str] = {}
        for i in guided:
            try:
                row, params[i] = self._row(chunks[i], params[i])
                bits[i] = row[:num_bytes]  # llguidance rounds up to whole words
            except RequestError as e:
                refusals[chunks[i].rid] = e.message
                self._matchers.pop(chunks[i].rid, None)
        while len(self._matchers) > max(MIN_KEPT, 2 * len(guided)):
            self._matchers.popitem(last=False)
        allowed = np.unpackbits(bits, axis=1, count=width, bitorder="little").view(np.bool_)
        return Narrowed(params, torch.from_numpy(allowed).to(device), refusals)

    def chosen(self, rid: Rid, token: int) -> None:
        """A token was sampled: read it now, since the next step may be planned before anybody knows of it.

        Tokens that end the answer are not read; nothing follows them.
        """
        matcher = self._matchers.get(rid)
        if matcher is None or token in self._vocab().eos_ids:
            return
        try:
            matcher.read((token,))
        except RequestError:
            del self._matchers[rid]  # the next step makes it again, and tells what is wrong

    # ------------------------------------------------------------------ one row

    def _row(self, chunk: Chunk, params: SamplingParams) -> tuple[np.ndarray, SamplingParams]:
        assert params.grammar is not None
        matcher = self._matcher(chunk, params.grammar)
        bits = np.frombuffer(matcher.mask(), dtype=np.uint8)
        early = chunk.stop - chunk.num_prompt < params.min_tokens
        forbidden = {
            *(params.stop_token_ids if early else ()),
            *(self._vocab().eos_ids if params.ignore_eos else ()),
        }
        left = without(bits, forbidden)
        if left.any():
            return left, params
        return bits, msgspec.structs.replace(params, min_tokens=0)

    def _matcher(self, chunk: Chunk, grammar: Grammar) -> Matcher:
        """The matcher of a request, having read all tokens that it has emitted."""
        known = list((chunk.history or ())[chunk.num_prompt :])
        found = self._matchers.get(chunk.rid)
        num_emitted = (
            chunk.stop - chunk.num_prompt
        )  # some of them may still be pending: then only we know them
        follows = (
            found is not None
            and found.grammar == grammar
            and len(found.tokens) == num_emitted
            and found.tokens[: len(known)] == known
        )
        if found is None or not follows:
            found = self._vocab().matcher(grammar)
            found.read(known)
            self._matchers[chunk.rid] = found
        self._matchers.move_to_end(chunk.rid)
        return found

    def _vocab(self) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = self._load()
        return self._vocabulary


def without(bits: np.ndarray, tokens: Collection[int]) -> np.ndarray:
    """`bits` (token i is bit i % 8 of byte i // 8) with those of `tokens` cleared."""
    if not tokens:
        return bits
    left = bits.copy()
    for token in tokens:
        left[token // 8] &= ~(1 << token % 8) & 0xFF
    return left
