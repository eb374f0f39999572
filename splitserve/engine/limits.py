"""An engine's bounds and sums: the numbers that the scheduler keeps to, and those it keeps. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from splitserve.engine.request import Request
from splitserve.engine.step import PENDING
from splitserve.errors import Overloaded, RequestError, SplitserveError
from splitserve.types import FinishReason


@dataclass(frozen=True)
class Limits:
    """Bounds of one engine; see EngineConfig for their meaning."""

    max_len: int
    max_seqs: int = 64
    step_tokens: int = 256
    recompute_share: float = 0.25
    max_waiting: int = 4096

    def refusal(self, req: Request, *, num_waiting: int) -> SplitserveError | None:
        """Why a request that has just come in can never run here."""
        if not req.tokens:
            return RequestError("the prompt is empty", field="prompt")
        if len(req.tokens) >= self.max_len:
            return RequestError(
                f"the prompt has {len(req.tokens)} tokens; this engine holds {self.max_len} with the output",
                field="prompt",
            )
        if num_waiting >= self.max_waiting:
            return Overloaded(f"{num_waiting} requests wait already")
        return None

    def may_draft(self, req: Request) -> bool:
        """Whether a request's guess is worth a row: it has one, and a second token is wanted."""
        return (
            req.draft != PENDING
            and req.num_emitted + 1 < req.max_emitted
            and len(req.tokens) + 1 < self.max_len
        )

    def finish_reason(self, req: Request, token: int) -> tuple[FinishReason | None, int | None]:
        """(why `token`, its last one, ends a request, and the token id where it is that)."""
        s = req.sampling
        # Under a grammar an end token that comes early is the only one left (engine/constraint.py).
        if token in s.stop_token_ids and (req.num_emitted >= s.min_tokens or s.grammar is not None):
            return FinishReason.STOP, token
        if req.num_emitted >= req.max_emitted or len(req.tokens) >= self.max_len:
            return FinishReason.LENGTH, None
        return None, None


@dataclass
class Counters:
    """Sums since start; all appear in /metrics."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    drafted_tokens: int = 0  # guesses that were tried
    accepted_tokens: int = 0  # those that proved right: over drafted_tokens, the acceptance rate
    steps: int = 0
    preemptions: int = 0
    recomputations: int = 0
    recomputed_tokens: int = 0
    aborted: int = 0
    failed: int = 0
    finished: int = 0
