"""Step times and what follows from them for a split pair and two unified engines on the same devices. Pure.

With a decode step of a + c * batch seconds, prefill t a prompt, n output tokens, b requests in flight on two devices:

    split     min( 1 / t,  b / (n (a + c b)),  link / bytes )       one device prefills, the other decodes all b
    unified   2 / ( t + n (2 a / b + c) )                           two devices, each prefills and decodes b / 2

Both follow from counting a request's device seconds at saturation. At perfect balance of the pair their ratio is
1 + n a / (2 b t), and never above 1.5: the fixed part a of a step is all that two half batches pay twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

MOST_GAIN = 1.5
"""Throughput of a split over unified engines on the same devices, at most. A measured ratio above it is unfair."""


@dataclass(frozen=True)
class StepFit:
    """seconds of a decode step = base_s + row_s * batch."""

    base_s: float
    row_s: float

    def seconds(self, batch: float) -> float:
        return self.base_s + self.row_s * batch


def fit_step(
    num_steps: float, seconds: float, *, rows: float, rows_squared: float, row_seconds: float
) -> StepFit:
    """Least squares from sums over steps: of 1, t, b, b * b and b * t. One batch size only: all of it is base.

    Neither part is below 0; no steps give a fit of zeros.
    """
    if num_steps <= 0:
        return StepFit(0.0, 0.0)
    mean_s, mean_rows = seconds / num_steps, rows / num_steps
    variance = rows_squared / num_steps - mean_rows**2
    if variance < 1e-6 * max(1.0, mean_rows**2):
        return StepFit(mean_s, 0.0)
    slope = (row_seconds / num_steps - mean_rows * mean_s) / variance
    slope = min(max(slope, 0.0), mean_s / mean_rows)
    return StepFit(mean_s - slope * mean_rows, slope)


def split_rate(
    fit: StepFit,
    *,
    batch: float,
    prefill_s: float,
    num_output: float,
    request_bytes: float = 0.0,
    link_bytes_s: float = inf,
) -> float:
    """Requests a second of one prefill and one decode device with `batch` requests in flight."""
    decode = batch / (num_output * fit.seconds(batch)) if fit.seconds(batch) > 0 else inf
    link = link_bytes_s / request_bytes if request_bytes else inf
    return min(1 / prefill_s if prefill_s > 0 else inf, decode, link)


def unified_rate(fit: StepFit, *, batch: float, prefill_s: float, num_output: float) -> float:
    """Requests a second of two unified devices that share `batch` requests in flight."""
    device_s = prefill_s + num_output * (2 * fit.base_s / batch + fit.row_s)
    return 2 / device_s if device_s > 0 else inf
