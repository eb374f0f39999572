"""Drafts: a cheap guess of the token after next, tried in the next step beside the token before it.

    a step's rows       t5            d6 = the draft for place 6
    its logits       choose 6        choose 7
                     6 is d6?  ─ yes ─▶ both are taken: the second row saw the right token
                               └ no ──▶ the first is taken; what d6 left in the state is written again by the next step

A guess can cost time and never changes a token: each row is sampled as it would be in a step of its own. The guesses
come from the model's own MTP layer, which also has state, so it runs over every token of every step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import msgspec
import torch

from splitserve.engine.constraint import Constraints
from splitserve.engine.sampler import sample
from splitserve.engine.step import Chunk, Row, Sampled
from splitserve.layers.forward import Forward
from splitserve.types import Rid, SamplingParams


class DraftingModel(Protocol):
    """A model that says what it thinks of the token after next."""

    def streams(self, fwd: Forward) -> torch.Tensor:
        """[T, ...]: what `logits` and `draft` are made from, the rows of the step's tokens."""
        ...

    def logits(self, streams: torch.Tensor) -> torch.Tensor:
        """[n, ...] -> [n, vocab] float32."""
        ...

    def draft(self, streams: torch.Tensor, fwd: Forward) -> torch.Tensor:
        """[num_logits, vocab] float32; each token of `fwd` is the one AFTER its position."""
        ...


def accepted(chunk: Chunk, tokens: Sequence[int], refused: Collection[int] = ()) -> tuple[int, ...]:
    """Of the tokens chosen in a chunk's rows, those that follow from tokens that were right, up to a `refused` row."""
    right = 0
    while right < chunk.num_draft and tokens[right] == chunk.drafts[right] and right + 1 not in refused:
        right += 1
    return tuple(tokens[: right + 1])


def propose(
    model: DraftingModel,
    chunks: Sequence[Chunk],
    fwd: Forward,
    streams: torch.Tensor,
    sampled: Mapping[Rid, Sampled],
    *,
    constraints: Constraints,
) -> dict[Rid, Sampled]:
    """Run the drafting layer over the step; `sampled` with a draft for each request that got a token.

    A draft is drawn with the random numbers of its place, so that under a temperature it is as often right as its
    distribution is, and among what its grammar allows. Penalties are not asked: the check will.
    """
    places: list[int] = []  # rows whose next token is not simply the next row's
    after: list[int] = []
    rows: list[int] = []
    drawn: list[Row] = []
    end = 0
    for chunk in chunks:
        end += chunk.num_tokens
        found = sampled.get(chunk.rid)
        if not chunk.sample or found is None or not found.tokens:
            places.append(end - 1)
            after.append(chunk.next_token)
            continue
        first = end - 1 - chunk.num_draft
        places += range(first, end)
        after += found.tokens
        # Rows of rejected drafts: any token, they are written again.
        after += found.tokens[-1:] * (end - first - len(found.tokens))
        rows.append(first + len(found.tokens) - 1)
        drawn.append(Row(chunk, found.tokens))
    logits = model.draft(streams, _shifted(fwd, places, after, rows))
    if not drawn:
        return dict(sampled)
    narrowed = constraints.narrow(drawn, width=logits.shape[1], device=logits.device)
    tokens, _ = sample(
        logits,
        [_plain(params) for params in narrowed.params],
        [row.position for row in drawn],
        num_prompts=[row.chunk.num_prompt for row in drawn],
        histories=[None] * len(drawn),
        allowed=narrowed.allowed,
    )
    out = dict(sampled)
    for row, token in zip(drawn, tokens, strict=True):
        out[row.chunk.rid] = msgspec.structs.replace(out[row.chunk.rid], draft=token)
    return out


def _shifted(fwd: Forward, places: list[int], after: list[int], rows: list[int]) -> Forward:
    """The step with each token replaced by the one after it: `after` at `places`, elsewhere the next row's."""
    device = fwd.tokens.device
    tokens = fwd.tokens.roll(-1)
    tokens[torch.tensor(places, device=device)] = torch.tensor(after, device=device)
    return replace(fwd, tokens=tokens, logit_rows=torch.tensor(rows, dtype=torch.int64, device=device))


def _plain(params: SamplingParams) -> SamplingParams:
    """How a draft is drawn: temperature, filters and seed of the request."""
    return msgspec.structs.replace(
        params,
        logprobs=None,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
    )
