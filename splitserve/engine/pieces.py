"""Prompts in pieces: what depends on the number of tokens alone is recorded as CUDA graphs, the rest runs as it comes.

    tokens, positions ─▶ [graph 0] ─▶ state and attention of layer 0 ─▶ [graph 1] ─▶ state and attention of layer 1 ─▶
                         embedding,   of the real tokens, into the     rest of layer 0,
                         queries of   buffer that graph 1 reads        queries of layer 1
                         layer 0

A host starts some fifty kernels a layer for a prompt, one by one; for up to some 2,000 tokens that takes longer than
the kernels do. A pass takes the next larger size that is recorded. Rows beyond its tokens hold anything finite: no row
of a graph reads another's. All sizes share memory, so that one pass runs at a time. On a CPU the same is run without
graphs; only tests do that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from splitserve.engine.recording import BySize
from splitserve.layers.forward import Cut, Forward, Group

SIZES = (16, 64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048, 3072, 4096, 6144, 8192)
"""Numbers of tokens that passes are recorded for, as far as steps may be so long."""

Made = tuple[torch.Tensor | None, ...]
Work = Callable[[Any, Forward, Any, torch.Tensor], torch.Tensor]


class Model(Protocol):
    """A model that can be taken apart (models/deepseek_v4.py)."""

    def begin(self, fwd: Forward) -> Any:
        """What the layers of a pass share."""
        ...

    def trunk(self, tokens: torch.Tensor, positions: torch.Tensor, cut: Cut) -> torch.Tensor:
        """[T, ...]: the last layer's output."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, ...] -> [n, vocab] float32."""
        ...


@dataclass(frozen=True)
class _Stop:
    """Where a graph ends: what it has made, and the work that follows, whose result the next graph reads."""

    made: Made
    work: Work
    out: torch.Tensor  # [size, ...]

    def run(self, count: int, fwd: Forward, step: Any) -> None:
        made = tuple(None if t is None else t[:count] for t in self.made)
        out = self.out[:count]
        found = self.work(made, fwd, step, out)
        if found.data_ptr() != out.data_ptr():
            out.copy_(found.view_as(out))


class _Pass(Protocol):
    def run(self, count: int, fwd: Forward, step: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class _Walked:
    """A pass of one size without graphs."""

    trunk: Callable[[Cut], torch.Tensor]
    out: Callable[[torch.Tensor], torch.Tensor]

    def run(self, count: int, fwd: Forward, step: Any) -> torch.Tensor:
        def cut(made: Made, work: Work) -> torch.Tensor:
            assert made[0] is not None
            stop = _Stop(made, work, self.out(made[0]))
            stop.run(count, fwd, step)
            fwd.between_layers()
            return stop.out

        return self.trunk(cut)[:count]


@dataclass(frozen=True)
class _Recorded:
    """A pass of one size: graph, stop, graph, ... graph."""

    graphs: tuple[Any, ...]
    stops: tuple[_Stop, ...]
    hidden: torch.Tensor  # [size, ...], until the next pass

    def run(self, count: int, fwd: Forward, step: Any) -> torch.Tensor:
        for graph, stop in zip(self.graphs, self.stops, strict=False):
            graph.replay()
            stop.run(count, fwd, step)
            fwd.between_layers()
        self.graphs[-1].replay()
        return self.hidden[:count]


class Pieces(BySize[_Pass]):
    """`prepare` before `run`; sizes are tokens of a pass."""

    def __init__(self, model: Model, *, tp: Group, device: torch.device, most: int) -> None:
        """`most` tokens are the most of a step."""
        super().__init__(sizes_upto(most), "tokens", device=device, tp=tp)
        self._model = model
        self._tokens = torch.zeros(self._sizes[-1], dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._tokens)
        self._outs: dict[Any, torch.Tensor] = {}  # what work gives, by what a token's row is

    @torch.inference_mode()
    def run(self, fwd: Forward) -> torch.Tensor:
        """[T, ...]: the last layer's output, until the next pass. A pass has at most `most` tokens."""
        count = len(fwd.tokens)
        size = min(s for s in self._ready if s >= count)
        self._tokens[:count].copy_(fwd.tokens)
        self._positions[:count].copy_(fwd.positions)
        for out in self._outs.values():
            out[count:size].zero_()  # what a longer pass has left there may be anything
        return self._ready[size].run(count, fwd, self._model.begin(fwd))

    def forward(self, fwd: Forward) -> torch.Tensor:
        """Logits [num_logits, vocab] float32."""
        return self._model.logits(self.run(fwd)[fwd.logit_rows])

    def _record(self, size: int, pool: Any, stream: Any) -> _Pass:
        tokens, positions = self._tokens[:size], self._positions[:size]

        def trunk(cut: Cut) -> torch.Tensor:
            return self._model.trunk(tokens, positions, cut)

        def out(like: torch.Tensor) -> torch.Tensor:
            return self._out(like, size)

        if pool is None:
            return _Walked(trunk, out)
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream(self._device))
            trunk(lambda made, _: out(made[0]))
            torch.cuda.synchronize(self._device)
            tape = _Tape(pool, out)
            with tape:
                hidden = alias(trunk(tape.cut))
        torch.cuda.default_stream(self._device).wait_stream(stream)
        return _Recorded(tuple(tape.graphs), tuple(tape.stops), hidden)

    def _out(self, like: torch.Tensor, size: int) -> torch.Tensor:
        """Where the work of a stop leaves its result; one place for all of one shape."""
        shape, dtype = like.shape[1:], like.dtype
        if (shape, dtype) not in self._outs:
            self._outs[shape, dtype] = torch.zeros(self._sizes[-1], *shape, dtype=dtype, device=like.device)
        return self._outs[shape, dtype][:size]


class _Tape:
    """Records what is started inside `with` as graphs, one ending and the next beginning at each `cut`."""

    def __init__(self, pool: Any, out: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.graphs: list[Any] = []
        self.stops: list[_Stop] = []
        self._pool = pool
        self._out = out

    def __enter__(self) -> _Tape:
        self._begin()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.graphs[-1].capture_end()
        except RuntimeError:
            if kind is None:  # else what went wrong before says more
                raise

    def cut(self, made: Made, work: Work) -> torch.Tensor:
        assert made[0] is not None
        self.graphs[-1].capture_end()
        out = self._out(made[0])
        self.stops.append(_Stop(tuple(None if t is None else alias(t) for t in made), work, out))
        self._begin()
        return out

    def _begin(self) -> None:
        self.graphs.append(torch.cuda.CUDAGraph())
        self.graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")


class _Memory:
    """Bytes on a GPU by their address, for torch.as_tensor."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def alias(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, without keeping their memory: what comes behind `x` in a graph's pool may lie there later."""
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    flat = torch.as_tensor(_Memory(x.data_ptr(), (last + 1) * x.element_size()), device=x.device)
    return flat.view(x.dtype).as_strided(x.shape, x.stride())


def sizes_upto(most: int) -> tuple[int, ...]:
    """Sizes for steps of up to `most` tokens."""
    return (*(s for s in SIZES if s < most), most)
