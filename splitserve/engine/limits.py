"""An engine's bounds and sums: the numbers that the scheduler keeps to, and those it keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of one engine; see EngineConfig for their meaning."""

    max_len: int
    max_seqs: int = 64
    step_tokens: int = 256
    recompute_share: float = 0.25
    max_waiting: int = 4096


@dataclass
class Counters:
    """Sums since start; all appear in /metrics."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    recomputations: int = 0
    recomputed_tokens: int = 0
    aborted: int = 0
    failed: int = 0
    finished: int = 0
