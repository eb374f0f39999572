"""Counters and latency histograms of the router, as Prometheus text. Plain numbers: counting must cost nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Counts of values by upper bound, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BUCKETS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Metrics:
    """What the router counts.

    `outcomes`: ok, client_error, engine_error, lost, deadline, client_left, rejected -> number of requests.
    """

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}
        self.num_retries = 0
        self.num_resumed = 0
        self.num_stream_errors = 0
        self.num_probes = 0
        self.num_warnings = 0
        self.num_alone = 0
        self.first_byte_s = Histogram()
        self.total_s = Histogram()

    def count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def text(self, gauges: Mapping[str, Iterable[tuple[str, float]]]) -> bytes:
        """Prometheus text format. `gauges`: name -> (labels such as `{id="decode-0"}` or empty, value)."""
        lines = ["# TYPE splitserve_router_requests_total counter"]
        lines += [
            f'splitserve_router_requests_total{{outcome="{k}"}} {v}' for k, v in sorted(self.outcomes.items())
        ]
        for name, value in (
            ("retries_total", self.num_retries),
            ("resumed_streams_total", self.num_resumed),
            ("stream_errors_total", self.num_stream_errors),
            ("probes_total", self.num_probes),
            ("open_circuit_routes_total", self.num_warnings),
            ("alone_routes_total", self.num_alone),
        ):
            lines += [f"# TYPE splitserve_router_{name} counter", f"splitserve_router_{name} {value}"]
        lines += _histogram("splitserve_router_first_byte_seconds", self.first_byte_s)
        lines += _histogram("splitserve_router_request_seconds", self.total_s)
        for name, samples in gauges.items():
            lines.append(f"# TYPE splitserve_router_{name} gauge")
            lines += [f"splitserve_router_{name}{labels} {value:g}" for labels, value in samples]
        return ("\n".join(lines) + "\n").encode()


def _histogram(name: str, histogram: Histogram) -> list[str]:
    lines = [f"# TYPE {name} histogram"]
    below = 0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        below += count
        lines.append(f'{name}_bucket{{le="{bound:g}"}} {below}')
    total = sum(histogram.counts)
    return [
        *lines,
        f'{name}_bucket{{le="+Inf"}} {total}',
        f"{name}_sum {histogram.sum:.6f}",
        f"{name}_count {total}",
    ]
