"""What one step computes. Plain data, self-contained, so that every rank can run it from the message alone.

A chunk is tokens [start, stop) of one request: there is no prefill or decode, only chunks.

    tokens of the request   |---- in the state ----|==== this chunk ====|---- later ----|
                            0                    start                stop
"""

from __future__ import annotations

import msgspec

from splitserve.types import Rid, SamplingParams, TokenLogprobs

PENDING = -1
"""Stands for a token that an earlier, not yet applied step samples; each rank knows it by then."""


class Chunk(msgspec.Struct, frozen=True):
    rid: Rid
    start: int
    stop: int
    tokens: tuple[int, ...]  # of [start, stop)
    pages: tuple[int, ...]  # page units of tokens [0, stop)
    slot: int = -1
    sample: bool = False  # the last token's logits choose the next token
    num_draft: int = 0  # so many of the last tokens are guesses, tried after a known one (engine/drafting.py)
    next_token: int = PENDING  # the token at `stop`, where it is known
    marks: tuple[
        tuple[int, int], ...
    ] = ()  # (tokens, slot unit): keep the slot's state at that page border there
    sampling: SamplingParams | None = None  # when sample
    history: tuple[int, ...] | None = None  # all known tokens, only where a penalty or a grammar needs them
    num_prompt: int = 0
    prompt_logprobs: int | None = None  # of `prompt_next`, with this many best ones each
    prompt_next: tuple[
        int, ...
    ] = ()  # prompt tokens [start + 1, stop + 1): row i of the logits predicts entry i

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def drafts(self) -> tuple[int, ...]:
        return self.tokens[self.num_tokens - self.num_draft :]

    @property
    def waits(self) -> bool:
        """Its last token is one that an earlier step samples."""
        return self.tokens[-1] == PENDING

    @property
    def decodes(self) -> bool:
        """Whether it computes one token behind the prompt, and guesses of what follows."""
        return self.num_tokens - self.num_draft == 1 and self.start >= self.num_prompt


class Row(msgspec.Struct, frozen=True):
    """One row of logits that chooses a token of a chunk's request: the one behind `ahead`."""

    chunk: Chunk
    ahead: tuple[int, ...] = ()  # behind the chunk's last known token: guesses, or what this step has chosen

    @property
    def position(self) -> int:
        """Of the token to choose."""
        return self.chunk.stop - self.chunk.num_draft + len(self.ahead)

    @property
    def history(self) -> tuple[int, ...] | None:
        """All known tokens before it, where they are needed."""
        known = self.chunk.history
        return (*known, *self.ahead) if known and self.ahead else known


class Step(msgspec.Struct, frozen=True, tag=True):
    index: int
    chunks: tuple[Chunk, ...]
    loads: tuple[tuple[int, int], ...] = ()  # (snapshot, slot): slot units to copy before anything else

    @property
    def num_tokens(self) -> int:
        return sum(c.num_tokens for c in self.chunks)


class Sampled(msgspec.Struct, frozen=True):
    """What a step found for one request. `tokens` is empty unless the chunk sampled; right drafts make it several."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finite: bool = True  # False: the logits held NaN or infinity, so no token is to be trusted
    refusal: str = ""  # why the request's grammar cannot be followed, where it cannot
    draft: int = PENDING  # a guess of the token after the last of `tokens`


class StepResult(msgspec.Struct, frozen=True):
    index: int
    sampled: dict[Rid, Sampled]
    seconds: float = 0.0
