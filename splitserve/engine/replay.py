"""Steps of one token for each sequence, made ready once for every batch size and replayed: CUDA graphs of decoding.

    chunks ─▶ numbers of the step, in pinned memory ─▶ copied in ─▶ graph of the next larger size ─▶ tokens, copied out
              tokens of the step before stay on the device ──────────▲

A graph runs the forward pass and chooses the tokens. Nothing in it depends on the host: lengths, pages and random keys
are read on the device (Forward.capacity), and places of the batch that nobody has write nothing. On a CPU the same is
run without a graph; only tests do that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from splitserve.engine import sampler
from splitserve.engine.recording import BySize
from splitserve.engine.step import Chunk, Sampled, StepResult
from splitserve.layers.forward import Forward, Group, States
from splitserve.ops.choose import served
from splitserve.types import Rid

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Batches that graphs are made for; a step takes the next larger one."""

_TOKEN, _SOURCE, _POSITION, _SLOT, _PAGE, _ROW, _KEY, _TEMPERATURE = range(8)  # rows of the step's numbers
_EMPTY = np.array([0, -1, 0, -1, -1, 0, 0, 0], dtype=np.int64)[:, None]  # nobody's place
_STAGES = 3  # steps that may be under way before pinned memory is written again


class Model(Protocol):
    def forward(self, fwd: Forward) -> torch.Tensor: ...


def replayable(model: Any, device: torch.device) -> bool:
    """Whether a model's step reads nothing back from the device: it runs on the kernels of ops/triton."""
    return device.type == "cuda" and bool(getattr(model, "replayable", False))


def suits(chunks: Sequence[Chunk]) -> bool:
    """Whether a step is one token for each sequence, and nothing has to be kept on the way: before it is no matter."""
    return bool(chunks) and all(
        c.num_tokens == 1 and not c.prompt_next and all(border == c.start for border, _ in c.marks)
        for c in chunks
    )


def plain(chunk: Chunk) -> bool:
    """Whether the token can be chosen on the device: by temperature alone, and nobody asks how likely it was."""
    p = chunk.sampling
    return p is not None and not (
        p.top_k > 0
        or p.top_p < 1
        or p.min_p > 0
        or p.repetition_penalty != 1
        or p.presence_penalty
        or p.frequency_penalty
        or p.logit_bias
        or p.min_tokens
        or p.logprobs is not None
        or p.grammar is not None
    )


class Numbers:
    """What a step is told: on the host in pinned memory, a few steps deep, and on the device at fixed places."""

    def __init__(self, most: int, max_pages: int, device: torch.device) -> None:
        pin = device.type == "cuda"
        self._host = [
            (
                torch.empty(8, most, dtype=torch.int64, pin_memory=pin),
                torch.zeros(most, max_pages, dtype=torch.int64, pin_memory=pin),
            )
            for _ in range(_STAGES)
        ]
        self._copied: list[Any] = [None] * _STAGES
        self._next = 0
        self.head = torch.from_numpy(np.repeat(_EMPTY, most, axis=1)).to(device)
        self.pages = torch.zeros(most, max_pages, dtype=torch.int64, device=device)

    def copy_in(self, fill: Callable[[np.ndarray, np.ndarray], None], size: int) -> None:
        """`fill` writes head [8, size] and pages [size, max_pages]; both are then on their way to the device."""
        stage, self._next = self._next, (self._next + 1) % _STAGES
        if self._copied[stage] is not None:
            self._copied[stage].synchronize()
        head, pages = self._host[stage]
        fill(head.numpy()[:, :size], pages.numpy()[:size])
        self.head.copy_(head, non_blocking=True)  # whole: a part of it would not be contiguous
        self.pages[:size].copy_(pages[:size], non_blocking=True)
        if self.head.is_cuda:
            self._copied[stage] = torch.cuda.Event()
            self._copied[stage].record()


@dataclass(frozen=True)
class _Ready:
    """A batch size that can be run."""

    run: Callable[[], object]
    logits: torch.Tensor  # [size, vocab] float32, after a run


class Replay(BySize[_Ready]):
    """`prepare` before `start`; sizes are sequences of a step."""

    def __init__(
        self,
        model: Model,
        states: States,
        *,
        page_tokens: int,
        tp: Group,
        device: torch.device,
        max_seqs: int,
        max_len: int,
    ) -> None:
        """`max_len` tokens are the most that a sequence may hold, `max_seqs` the most in a step."""
        super().__init__(sizes_upto(max_seqs), "sequences", device=device, tp=tp)
        self._model = model
        self._states = states
        self._page_tokens = page_tokens
        self._max_pages = -(-max_len // page_tokens)
        self._numbers = Numbers(self._sizes[-1], self._max_pages, device)
        self._tokens = torch.zeros(self._sizes[-1], dtype=torch.int64, device=device)  # of the last step
        self._told = torch.zeros(self._sizes[-1], dtype=torch.int64, device=device)

    @torch.inference_mode()
    def start(self, chunks: Sequence[Chunk], sources: Sequence[int], known: Mapping[Rid, int]) -> Started:
        """Run a step. `sources[i]` is the place in the step before that chose chunk i's token; -1: the host knows it.

        `known` has the tokens that earlier steps chose for chunks that wait and have no source.
        """
        size = next(s for s in self._sizes if s >= len(chunks) and s in self._ready)
        self._numbers.copy_in(lambda head, pages: self._fill(chunks, sources, known, head, pages), size)
        ready = self._ready[size]
        ready.run()
        return Started(self._told[: len(chunks)], ready.logits[: len(chunks)])

    def _fill(
        self,
        chunks: Sequence[Chunk],
        sources: Sequence[int],
        known: Mapping[Rid, int],
        head: np.ndarray,
        pages: np.ndarray,
    ) -> None:
        head[:] = _EMPTY
        pt, n = self._page_tokens, len(chunks)
        tokens = [
            known[c.rid] if c.waits and s < 0 else c.tokens[0] for c, s in zip(chunks, sources, strict=True)
        ]
        head[_TOKEN, :n] = tokens
        head[_SOURCE, :n] = sources
        head[_POSITION, :n] = [c.start for c in chunks]
        head[_SLOT, :n] = [c.slot for c in chunks]
        head[_PAGE, :n] = [c.pages[c.start // pt] for c in chunks]
        head[_ROW, :n] = [c.start % pt for c in chunks]
        temperatures = head[_TEMPERATURE].view(np.float64)
        for i, chunk in enumerate(chunks):
            pages[i, : len(chunk.pages)] = chunk.pages
            p = chunk.sampling
            if p is not None and p.temperature > 0:
                temperatures[i] = p.temperature
                head[_KEY, i] = sampler.signed_key(p.seed, p.choice, chunk.stop)
        head[_TOKEN, :n].clip(0, out=head[_TOKEN, :n])

    def _record(self, size: int, pool: Any, stream: Any) -> _Ready:
        if pool is None:
            logits = self._step(size)
            return _Ready(lambda: logits.copy_(self._step(size)), logits)
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream(self._device))
            self._step(size)
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                logits = self._step(size)
        torch.cuda.default_stream(self._device).wait_stream(stream)
        return _Ready(graph.replay, logits)

    def _step(self, size: int) -> torch.Tensor:
        """The forward pass and the choice of tokens, from the numbers to `_tokens` and `_told`; returns the logits."""
        head = self._numbers.head[:, :size]
        source = head[_SOURCE]
        tokens = torch.where(source >= 0, self._tokens[source.clamp(min=0)], head[_TOKEN])
        logits = self._model.forward(self._forward(tokens, size))
        temperatures = head[_TEMPERATURE].view(torch.float64).float()
        if served(self._device):
            from splitserve.ops.triton import draw  # Triton is imported where it is used

            chosen = draw(logits, temperatures, head[_KEY])
        else:
            chosen = sampler.draw(logits, temperatures, head[_KEY])
        self._tokens[:size] = chosen
        finite = torch.isfinite(logits.unflatten(-1, (self._parts(logits.shape[-1]), -1)).sum(-1).sum(-1))
        self._told[:size] = torch.where(finite, chosen, -1 - chosen)
        return logits

    @staticmethod
    def _parts(vocab: int) -> int:
        """How many sums of a row of logits run beside each other; one alone takes as long as a layer's product."""
        return next(n for n in range(256, 0, -1) if vocab % n == 0)

    def _forward(self, tokens: torch.Tensor, size: int) -> Forward:
        head = self._numbers.head[:, :size]
        every = torch.arange(size, device=self._device)
        return Forward(
            tokens=tokens,
            positions=head[_POSITION],
            logit_rows=every,
            q_start=torch.arange(size + 1, device=self._device),
            q_lens=(1,) * size,
            kv_lens=(),
            num_decode=size,
            pages=self._numbers.pages[:size],
            slots=head[_SLOT],
            write_page=head[_PAGE],
            write_row=head[_ROW],
            page_tokens=self._page_tokens,
            states=self._states,
            tp=self._tp,
            capacity=self._max_pages * self._page_tokens,
        )


@dataclass(frozen=True)
class Started:
    """A step under way."""

    told: torch.Tensor  # [n] int64: the tokens; -1 - token where the logits were not finite
    logits: torch.Tensor  # [n, vocab] float32: until the next step of this size


class Replayed:
    """The result of a step, copied out behind it. Whoever waits for it does something useful meanwhile."""

    def __init__(
        self,
        index: int,
        chunks: Sequence[Chunk],
        told: torch.Tensor,
        *,
        meanwhile: Callable[[], None],
        settled: Callable[[StepResult], None],
        since: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`settled` is told the result once; `since` says when the result of the last step before this one came."""
        self.places = {c.rid: i for i, c in enumerate(chunks)}
        self.index = index
        self._chunks = chunks
        self._meanwhile = meanwhile
        self._settled = settled
        self._since = since
        self._begun = time.monotonic()
        self._value: StepResult | None = None
        self._out = torch.empty(len(told), dtype=torch.int64, pin_memory=told.is_cuda)
        self._out.copy_(told, non_blocking=True)
        self._event = torch.cuda.Event() if told.is_cuda else None
        if self._event is not None:
            self._event.record()

    def result(self) -> StepResult:
        """Waits for the step; the same each time it is asked."""
        if self._value is None:
            while self._event is not None and not self._event.query():
                self._meanwhile()
            sampled = {}
            for chunk, token in zip(self._chunks, self._out.tolist(), strict=True):
                if chunk.sample:
                    finite = token >= 0
                    sampled[chunk.rid] = Sampled((token if finite else -1 - token,), finite=finite)
            # Steps overlap: what the one before took is not this one's too, or a device would seem busy twice over.
            begun = max(self._begun, self._since())
            self._value = StepResult(self.index, sampled, time.monotonic() - begun)
            self._settled(self._value)
        return self._value


def sizes_upto(most: int) -> tuple[int, ...]:
    """Batch sizes for steps of up to `most` sequences."""
    return (*(s for s in SIZES if s < most), most)
