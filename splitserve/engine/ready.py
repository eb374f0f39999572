"""What an engine does on a GPU before it says that it is there: compile, and record prompts and decoding as graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from splitserve import log
from splitserve.config import EngineConfig
from splitserve.engine.channel import Sized
from splitserve.engine.pieces import Pieces
from splitserve.engine.replay import Replay, replayable
from splitserve.engine.runner import Runner
from splitserve.engine.warm import plans, warm_up, warn_of_compiling
from splitserve.kv.pool import Pool
from splitserve.layers.forward import Group

_log = log.get(__name__)


class Readiness:
    """All ranks of a group at once: they sum."""

    def __init__(
        self, config: EngineConfig, sized: Sized, *, model: Any, pool: Pool, tp: Group, device: torch.device
    ) -> None:
        self._config = config
        self._sized = sized
        self._model = model
        self._pool = pool
        self._tp = tp
        self._device = device

    def reach(self, runner: Runner, closing: ExitStack, say: Callable[[str, float], None]) -> None:
        """`runner` has what was recorded afterwards; nothing on a CPU, or for a model without kernels for this GPU."""
        if not replayable(self._model, self._device):
            return
        runner.pieces = self._record_prompts(closing, say)
        self._warm_up(runner.pieces, say)
        if self._config.role != "prefill" and self._config.speculative != "mtp":  # guesses do without
            runner.replay = self._record_decoding(closing, say)
        warn_of_compiling()

    def _record_prompts(self, closing: ExitStack, say: Callable[[str, float], None]) -> Pieces:
        pieces = Pieces(self._model, tp=self._tp, device=self._device, most=self._config.step_tokens)
        closing.callback(pieces.close)
        seconds = pieces.prepare(lambda done: say("graphs of prompts", done))
        _log.info("prompts are recorded for up to %d tokens a step, in %.1f s", pieces.most, seconds)
        return pieces

    def _warm_up(self, pieces: Pieces, say: Callable[[str, float], None]) -> None:
        """Passes of all kinds, as they will be run."""
        steps = plans(
            page_tokens=self._config.page_tokens,
            num_pages=self._sized.num_pages,
            max_len=self._sized.max_len,
            has_slots=self._sized.num_slots > 0,
            step_tokens=self._config.step_tokens,
        )
        seconds = warm_up(
            lambda fwd: (pieces if len(fwd.tokens) <= pieces.most else self._model).forward(fwd),
            self._pool,
            list(steps),
            tp=self._tp,
            device=self._device,
            page_tokens=self._config.page_tokens,
            progress=lambda done: say("kernels", done),
        )
        _log.info("kernels of prompts are ready, in %.1f s", seconds)

    def _record_decoding(self, closing: ExitStack, say: Callable[[str, float], None]) -> Replay:
        replay = Replay(
            self._model,
            self._pool,
            page_tokens=self._config.page_tokens,
            tp=self._tp,
            device=self._device,
            max_seqs=self._config.max_seqs,
            max_len=self._sized.max_len,
        )
        closing.callback(replay.close)
        seconds = replay.prepare(lambda done: say("graphs", done))
        _log.info("decoding is recorded for up to %d sequences, in %.1f s", replay.most, seconds)
        return replay
