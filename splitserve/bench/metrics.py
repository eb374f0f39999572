"""Latency and throughput of one run, from the marks of its requests. Pure.

    sent ──────────── first token ── token ── token ── ... ── end
      │◀──── TTFT ────▶│◀─ ITL ─▶│◀─ ITL ─▶│
      │                │◀──────── end - first ────────▶│   TPOT = that / (output tokens - 1)
      │◀──────────────────── E2E ──────────────────────▶│

Token counts are the server's (usage); the client's own counts are compared with them and every difference is told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass
class Marks:
    """One request as its client saw it. Times in seconds of one clock; -1.0: has not happened."""

    num_input: int  # asked
    num_wanted: int
    sent_s: float = -1.0
    first_s: float = -1.0
    end_s: float = -1.0
    gaps_s: list[float] = field(default_factory=list)  # between events that carried tokens
    num_events: int = 0
    usage_input: int = -1  # -1: the server told no usage
    usage_output: int = -1
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and self.end_s >= 0 and self.first_s >= 0

    @property
    def num_output(self) -> int:
        """The server's count, or one token an event where it gives none."""
        return self.usage_output if self.usage_output >= 0 else self.num_events

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """None for a single token: it has no time between tokens."""
        return (self.end_s - self.first_s) / (self.num_output - 1) if self.num_output > 1 else None

    def mismatch(self) -> str:
        """What the counts disagree about; empty when they agree."""
        if self.usage_output < 0:
            return "the server told no usage"
        if self.usage_input != self.num_input:
            return f"{self.num_input} prompt tokens sent, the server counted {self.usage_input}"
        if self.usage_output != self.num_wanted:
            return f"{self.num_wanted} tokens asked for, the server counted {self.usage_output}"
        if self.num_events > self.usage_output:
            return f"{self.num_events} token events came, the server counted {self.usage_output}"
        return ""


@dataclass(frozen=True)
class Spread:
    """One quantity over many requests. NaN when there are none."""

    mean: float
    median: float
    std: float
    p90: float
    p95: float
    p99: float
    max: float
    num: int = 0

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        if not values:
            nan = math.nan
            return Spread(nan, nan, nan, nan, nan, nan, nan)
        mean = math.fsum(values) / len(values)
        std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
        q = [percentile(values, p) for p in (50, 90, 95, 99)]
        return Spread(mean, q[0], std, q[1], q[2], q[3], max(values), len(values))


@dataclass(frozen=True)
class Slo:
    """Limits that a request must keep to count as good."""

    ttft_s: float
    tpot_s: float

    def met(self, marks: Marks) -> bool:
        tpot = marks.tpot_s
        return marks.ok and marks.ttft_s <= self.ttft_s and (tpot is None or tpot <= self.tpot_s)


@dataclass(frozen=True)
class Summary:
    """One shape of load: `concurrency` (0: open loop at `rate` a second)."""

    concurrency: int
    rate: float | None
    num: int
    num_failed: int
    duration_s: float
    num_input: int
    num_output: int
    ttft_s: Spread
    tpot_s: Spread
    itl_s: Spread
    e2e_s: Spread
    goodput: float | None  # good requests a second
    mean_running: float  # average number of requests in flight
    errors: tuple[tuple[str, int], ...]
    mismatches: tuple[tuple[str, int], ...]

    @property
    def request_rate(self) -> float:
        return (self.num - self.num_failed) / self.duration_s

    @property
    def output_rate(self) -> float:
        return self.num_output / self.duration_s

    @property
    def input_rate(self) -> float:
        return self.num_input / self.duration_s


def summarize(
    marks: Sequence[Marks],
    *,
    duration_s: float,
    concurrency: int = 0,
    rate: float | None = None,
    slo: Slo | None = None,
) -> Summary:
    """Figures of one run. Failed requests count in `num_failed` and nowhere else."""
    good = [m for m in marks if m.ok]
    return Summary(
        concurrency=concurrency,
        rate=rate,
        num=len(marks),
        num_failed=len(marks) - len(good),
        duration_s=max(duration_s, 1e-9),
        num_input=sum(m.usage_input if m.usage_input >= 0 else m.num_input for m in good),
        num_output=sum(m.num_output for m in good),
        ttft_s=Spread.of([m.ttft_s for m in good]),
        tpot_s=Spread.of([t for m in good if (t := m.tpot_s) is not None]),
        itl_s=Spread.of([gap for m in good for gap in m.gaps_s]),
        e2e_s=Spread.of([m.e2e_s for m in good]),
        goodput=sum(slo.met(m) for m in marks) / max(duration_s, 1e-9) if slo else None,
        mean_running=math.fsum(m.e2e_s for m in good) / max(duration_s, 1e-9),
        errors=_count(m.error or "the answer had no token" for m in marks if not m.ok),
        mismatches=_count(text for m in good if (text := m.mismatch())),
    )


def percentile(values: Sequence[float], p: float) -> float:
    """The p-th percentile with linear interpolation between ranks (numpy's default). `values` must not be empty."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * p / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def _count(texts: Iterable[str]) -> tuple[tuple[str, int], ...]:
    counts: dict[str, int] = {}
    for text in texts:
        counts[text] = counts.get(text, 0) + 1
    return tuple(sorted(counts.items(), key=lambda item: -item[1]))
