"""Runs steps on the model of one rank: builds the batch, runs the forward pass, samples. Decides nothing.

On the CPU a step has been computed when `launch` returns. The engine still treats it as pending, as on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from splitserve.engine import batch
from splitserve.engine.constraint import Constraints
from splitserve.engine.sampler import log_softmax_rows, sample
from splitserve.engine.step import Chunk, Sampled, Step, StepResult
from splitserve.layers.forward import Forward, Group, States
from splitserve.types import Rid, TokenLogprobs

MAX_STEPS_IN_FLIGHT = 8


class Model(Protocol):
    def forward(self, fwd: Forward) -> torch.Tensor:
        """Logits [num_logits, vocab] in float32, the same on every rank."""
        ...


class Pending(Protocol):
    def result(self) -> StepResult: ...


@dataclass(frozen=True)
class Computed:
    """A step whose result is known already."""

    value: StepResult

    def result(self) -> StepResult:
        return self.value


class Runner:
    def __init__(
        self,
        model: Model,
        states: States,
        *,
        page_tokens: int,
        tp: Group,
        device: torch.device,
        between_layers: Callable[[], None],
        constraints: Constraints,
    ) -> None:
        self._model = model
        self._states = states
        self._page_tokens = page_tokens
        self._tp = tp
        self._device = device
        self._between_layers = between_layers
        self._constraints = constraints
        # Of requests in the last steps, for PENDING tokens of later ones.
        self._last_tokens: dict[Rid, int] = {}
        self._sampled_at: dict[Rid, int] = {}

    @torch.inference_mode()
    def launch(self, step: Step) -> Pending:
        """Compute a step. Every rank samples for itself: same logits and same keys give the same tokens."""
        begun = time.monotonic()
        chunks = batch.in_forward_order(step)
        fwd = batch.build(
            chunks,
            self._last_tokens,
            page_tokens=self._page_tokens,
            states=self._states,
            tp=self._tp,
            device=self._device,
            between_layers=self._between_layers,
        )
        logits = self._model.forward(fwd)
        sampled = self._sample(chunks, logits)
        self._remember(step.index, sampled)
        return Computed(StepResult(step.index, sampled, time.monotonic() - begun))

    def _remember(self, index: int, sampled: dict[Rid, Sampled]) -> None:
        """Keep last tokens while a step that waits for them may still come: a request can sit out steps in flight."""
        for rid, found in sampled.items():
            if found.tokens:
                self._last_tokens[rid], self._sampled_at[rid] = found.tokens[-1], index
        for rid in [r for r, at in self._sampled_at.items() if at < index - MAX_STEPS_IN_FLIGHT]:
            del self._last_tokens[rid], self._sampled_at[rid]

    def _sample(self, chunks: list[Chunk], logits: torch.Tensor) -> dict[Rid, Sampled]:
        """Split the logits' rows by chunk (see batch._logit_rows) and sample all sampling rows at once."""
        rated: dict[Rid, tuple[TokenLogprobs, ...]] = {}
        rows: list[int] = []
        sampling = []
        at = 0
        for chunk in chunks:
            if chunk.prompt_next:
                rated[chunk.rid] = rate(
                    logits[at : at + len(chunk.prompt_next)], chunk.prompt_next, chunk.prompt_logprobs or 0
                )
                at += len(chunk.prompt_next)
            if chunk.sample:
                rows.append(at)
                sampling.append(chunk)
                at += 1
        out = {rid: Sampled(prompt_logprobs=rating) for rid, rating in rated.items()}
        if not rows:
            return out
        picked = logits if len(rows) == len(logits) else logits[rows]
        finite = torch.isfinite(picked.sum(dim=-1)).tolist()
        narrowed = self._constraints.narrow(sampling, width=picked.shape[1], device=picked.device)
        tokens, logprobs = sample(
            picked,
            narrowed.params,
            [c.stop for c in sampling],
            num_prompts=[c.num_prompt for c in sampling],
            histories=[c.history for c in sampling],
            allowed=narrowed.allowed,
        )
        for i, chunk in enumerate(sampling):
            self._constraints.chosen(chunk.rid, tokens[i])
            out[chunk.rid] = Sampled(
                (tokens[i],),
                tuple(entry for entry in logprobs[i : i + 1] if entry is not None),
                rated.get(chunk.rid, ()),
                finite[i],
                narrowed.refusals.get(chunk.rid, ""),
            )
        return out


def rate(logits: torch.Tensor, tokens: tuple[int, ...], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Logprobs of `tokens` under rows of `logits` [n, vocab], with the `num_top` best ids of each row."""
    logprobs = log_softmax_rows(logits)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    if not num_top:
        return tuple(TokenLogprobs(c) for c in chosen)
    best, ids = logprobs.topk(num_top, dim=-1)
    return tuple(
        TokenLogprobs(c, tuple(i), tuple(b))
        for c, i, b in zip(chosen, ids.tolist(), best.tolist(), strict=True)
    )
