"""Runs steps on the model of one rank: builds the batch, runs the forward pass, samples. Decides nothing.

On the CPU a step has been computed when `launch` returns. The engine still treats it as pending, as on a GPU, where
steps of one token for each sequence are replayed (replay.py) and awaited when their result is asked for. All other
steps wait for the one before: their tokens come from the host.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch

from splitserve.engine import batch, drafting
from splitserve.engine.constraint import Constraints
from splitserve.engine.pieces import Pieces
from splitserve.engine.replay import Replay, Replayed, plain, suits
from splitserve.engine.sampler import log_softmax_rows, sample
from splitserve.engine.step import Chunk, Row, Sampled, Step, StepResult
from splitserve.layers.forward import Forward, Group, States
from splitserve.types import Rid, TokenLogprobs

MAX_STEPS_IN_FLIGHT = 8


class Model(Protocol):
    def forward(self, fwd: Forward) -> torch.Tensor:
        """Logits [num_logits, vocab] in float32, the same on every rank."""
        ...


class Slabs(States, Protocol):
    """The state of this rank (kv/pool.py)."""

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slot units whole: (from, to), one after the other."""
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
        states: Slabs,
        *,
        page_tokens: int,
        tp: Group,
        device: torch.device,
        between_layers: Callable[[], None],
        constraints: Constraints,
        drafter: drafting.DraftingModel | None = None,
    ) -> None:
        """`drafter` is the model once more, where it is to guess tokens ahead."""
        self.replay: Replay | None = None
        self.pieces: Pieces | None = None
        self._under_way: Replayed | None = None
        self._settled_at = 0.0
        self._model = model
        self._states = states
        self._page_tokens = page_tokens
        self._tp = tp
        self._device = device
        self._between_layers = between_layers
        self._constraints = constraints
        self._drafter = drafter
        # Of requests in the last steps, for PENDING tokens of later ones.
        self._last_tokens: dict[Rid, int] = {}
        self._recent: dict[Rid, deque[int]] = {}  # the same, and those before it
        self._sampled_at: dict[Rid, int] = {}

    @torch.inference_mode()
    def launch(self, step: Step) -> Pending:
        """Compute a step. Every rank samples for itself: same logits and same keys give the same tokens."""
        chunks = batch.in_forward_order(step)
        if self.replay is not None and len(chunks) <= self.replay.most and suits(chunks):
            self._copy_slots(step, chunks)
            return self._start(self.replay, step, chunks)
        self._settle()
        return self._compute(step, [self._with_history(c) for c in chunks])

    def _start(self, replay: Replay, step: Step, chunks: list[Chunk]) -> Pending:
        """A step that is replayed. Where tokens must be chosen with the host's help, it is awaited here."""
        begun = time.monotonic()
        if not all(plain(c) for c in chunks if c.sample):
            self._settle()
            chunks = [self._with_history(c) for c in chunks]
            started = replay.start(chunks, [-1] * len(chunks), self._last_tokens)
            sampled = self._sample(chunks, started.logits)
            self._remember(step.index, sampled)
            return Computed(StepResult(step.index, sampled, time.monotonic() - begun))
        before = {} if self._under_way is None else self._under_way.places
        sources = [before.get(c.rid, -1) if c.waits else -1 for c in chunks]
        started = replay.start(chunks, sources, self._last_tokens)
        self._under_way = Replayed(
            step.index,
            chunks,
            started.told,
            meanwhile=self._between_layers,
            settled=self._settled,
            since=lambda: self._settled_at,
        )
        self._between_layers()
        return self._under_way

    def _settle(self) -> None:
        """Wait for the step that is under way, if one is."""
        if self._under_way is not None:
            self._under_way.result()

    def _settled(self, result: StepResult) -> None:
        self._settled_at = time.monotonic()
        self._remember(result.index, result.sampled)
        if self._under_way is not None and self._under_way.index == result.index:
            self._under_way = None

    def _compute(self, step: Step, chunks: list[Chunk]) -> Pending:
        begun = time.monotonic()
        self._copy_slots(step, chunks)
        fwd = batch.build(
            chunks,
            self._last_tokens,
            page_tokens=self._page_tokens,
            states=self._states,
            tp=self._tp,
            device=self._device,
            between_layers=self._between_layers,
        )
        pieces = self.pieces if self.pieces and len(fwd.tokens) <= self.pieces.most else None
        if self._drafter is None:
            sampled = self._sample(chunks, (pieces or self._model).forward(fwd))
        else:
            streams = pieces.run(fwd) if pieces else self._drafter.streams(fwd)
            sampled = self._sample(chunks, self._drafter.logits(streams[fwd.logit_rows]))
            sampled = drafting.propose(
                self._drafter, chunks, fwd, streams, sampled, constraints=self._constraints
            )
        self._remember(step.index, sampled)
        return Computed(StepResult(step.index, sampled, time.monotonic() - begun))

    def _copy_slots(self, step: Step, chunks: Sequence[Chunk]) -> None:
        """Snapshots into slots, then slots as they are into snapshots: the model adds what comes up to the border."""
        if step.loads:
            self._states.copy_slots(step.loads)
        if marks := [(c.slot, unit) for c in chunks for _, unit in c.marks]:
            self._states.copy_slots(marks)

    def _with_history(self, chunk: Chunk) -> Chunk:
        """The plan could not know the tokens in flight; penalties and grammars must."""
        if chunk.history is None or not chunk.waits:
            return chunk
        num_unknown = chunk.stop - chunk.num_draft - len(chunk.history)
        recent = list(self._recent[chunk.rid])[-num_unknown:]
        return msgspec.structs.replace(chunk, history=(*chunk.history, *recent))

    def _remember(self, index: int, sampled: dict[Rid, Sampled]) -> None:
        """Keep last tokens while a step that waits for them may still come: a request can sit out steps in flight."""
        for rid, found in sampled.items():
            if found.tokens:
                self._last_tokens[rid], self._sampled_at[rid] = found.tokens[-1], index
                self._recent.setdefault(rid, deque(maxlen=MAX_STEPS_IN_FLIGHT)).extend(found.tokens)
        for rid in [r for r, at in self._sampled_at.items() if at < index - MAX_STEPS_IN_FLIGHT]:
            del self._last_tokens[rid], self._sampled_at[rid], self._recent[rid]

    def _sample(self, chunks: list[Chunk], logits: torch.Tensor) -> dict[Rid, Sampled]:
        """Split the logits' rows by chunk (see batch._logit_rows) and sample all sampling rows at once."""
        rated: dict[Rid, tuple[TokenLogprobs, ...]] = {}
        rows: list[int] = []
        sampling: list[Row] = []
        at = 0
        for chunk in chunks:
            if chunk.prompt_next:
                rated[chunk.rid] = rate(
                    logits[at : at + len(chunk.prompt_next)], chunk.prompt_next, chunk.prompt_logprobs or 0
                )
                at += len(chunk.prompt_next)
            for i in range(chunk.num_draft + 1 if chunk.sample else 0):
                rows.append(at)
                sampling.append(Row(chunk, chunk.drafts[:i]))
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
            [row.position for row in sampling],
            num_prompts=[row.chunk.num_prompt for row in sampling],
            histories=[row.history for row in sampling],
            allowed=narrowed.allowed,
        )
        for i, row in enumerate(sampling):
            if row.ahead:
                continue
            chunk = row.chunk
            refused = [at - i for at in narrowed.refusals]
            taken = drafting.accepted(chunk, tokens[i : i + 1 + chunk.num_draft], refused)
            self._constraints.chosen(chunk.rid, taken)
            out[chunk.rid] = Sampled(
                taken,
                tuple(entry for entry in logprobs[i : i + len(taken)] if entry is not None),
                rated.get(chunk.rid, ()),
                all(finite[i : i + len(taken)]),
                narrowed.refusals.get(i, ""),
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
