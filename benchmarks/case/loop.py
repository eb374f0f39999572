"""A closed loop of c requests on engines whose step times are known. Pure; no queueing noise: everything is its mean.

unified   a prompt takes `prefill` seconds in which nobody decodes; c requests decode together
split     prompts are computed elsewhere, one after another; whoever is not there or on the way decodes
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Step = Callable[[float], float]
"""Batch -> seconds of a decode step."""


@dataclass(frozen=True)
class Reached:
    """Requests a second of all engines together, mean seconds to the first token and from token to token."""

    rate: float
    ttft_s: float
    tpot_s: float


def unified(step: Step, *, prefill_s: float, num_output: int, concurrency: int, engines: int = 1) -> Reached:
    """`engines` equal engines share the requests: as evenly as whole requests can, if there are enough for all."""
    used = min(engines, concurrency)
    batch = concurrency / used
    one_s = prefill_s + num_output * step(batch) / batch  # an engine's time that a request takes
    rate = used / one_s
    return Reached(rate, prefill_s + step(batch), (concurrency / rate - prefill_s) / num_output)


def split(step: Step, *, prefill_s: float, handoff_s: float, num_output: int, concurrency: int) -> Reached:
    """One engine of each role. Where prefill is the slower, requests wait before it."""

    def surplus(rate: float) -> float:
        """Requests that are neither at prefill nor on the way, less those that decode at this rate."""
        batch = concurrency - rate * (prefill_s + handoff_s)
        return batch - rate * num_output * step(max(batch, 1.0)) if batch > 0 else -1.0

    most = 1 / prefill_s
    low, high = 0.0, most
    if surplus(most) >= 0:
        low = most
    else:
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if surplus(middle) > 0 else (low, middle)
    rate = low
    batch = _decoding(step, rate, num_output, concurrency)
    waiting_s = max(prefill_s, (concurrency - batch) / rate - handoff_s)
    return Reached(rate, waiting_s + handoff_s + step(batch), step(batch))


def _decoding(step: Step, rate: float, num_output: int, most: float) -> float:
    """The batch that decodes `rate` requests a second; one request decodes with nobody at its side."""
    low, high = 0.0, float(most)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if middle < rate * num_output * step(max(middle, 1.0)) else (low, middle)
    return max(1.0, high)
