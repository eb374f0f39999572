"""What this server counts, for Prometheus: its requests, and the engine's own figures as they last came.

One registry for each server; nothing is registered globally. Seconds and bytes are base units. prometheus_client is
imported when a Metrics is made: it brings an HTTP server of its own along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from splitserve.wire import Load

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_ITL_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_E2E_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 600)


class Metrics:
    def __init__(self, load: Callable[[], Load | None]) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self._registry = CollectorRegistry()
        own = self._registry
        self._requests = Counter(
            "splitserve_requests", "HTTP requests that ended", ["endpoint", "status"], registry=own
        )
        self._running = Gauge("splitserve_requests_open", "Generation requests being answered", registry=own)
        self._ttft = Histogram(
            "splitserve_ttft_seconds", "Arrival to first token from the engine", buckets=_TTFT_S, registry=own
        )
        self._itl = Histogram(
            "splitserve_itl_seconds", "Between tokens of a choice", buckets=_ITL_S, registry=own
        )
        self._e2e = Histogram(
            "splitserve_request_seconds", "Arrival to last byte", buckets=_E2E_S, registry=own
        )
        self._prompt = Counter(
            "splitserve_prompt_tokens", "Prompt tokens of requests that began", registry=own
        )
        self._output = Counter("splitserve_output_tokens", "Tokens received from the engine", registry=own)
        self._registry.register(_EngineFigures(load))

    def began(self, num_prompt_tokens: int) -> None:
        self._running.inc()
        self._prompt.inc(num_prompt_tokens)

    def ended(self, endpoint: str, status: str, *, seconds: float) -> None:
        """`status` is the HTTP status that the client saw, `client_left`, or `error:CODE` inside a stream."""
        self._running.dec()
        self._requests.labels(endpoint, status).inc()
        self._e2e.observe(seconds)

    def refused(self, endpoint: str, status: int) -> None:
        """A request that never reached the engine."""
        self._requests.labels(endpoint, str(status)).inc()

    def first_token(self, seconds: float, count: int) -> None:
        self._ttft.observe(seconds)
        self._output.inc(count)

    def next_tokens(self, seconds: float, count: int) -> None:
        """`seconds` for each of `count` tokens that came together."""
        self._itl.observe(seconds)
        self._output.inc(count)

    def render(self) -> bytes:
        from prometheus_client import generate_latest

        return generate_latest(self._registry)


class _EngineFigures:
    """The engine's last Load, read when somebody asks. Its counters keep the engine's own names."""

    def __init__(self, load: Callable[[], Load | None]) -> None:
        self._load = load

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        load = self._load()
        if load is None:
            return
        pages = GaugeMetricFamily("splitserve_engine_pages", "Pages of state memory", labels=["state"])
        used = load.total_pages - load.free_pages - load.quarantined_pages
        shown = {
            "total": load.total_pages,
            "free": load.free_pages,
            "used": used,
            "quarantined": load.quarantined_pages,
        }
        for state, count in shown.items():
            pages.add_metric([state], count)
        yield pages
        queue = GaugeMetricFamily("splitserve_engine_requests", "Requests in the engine", labels=["state"])
        queue.add_metric(["running"], load.num_running)
        queue.add_metric(["waiting"], load.num_waiting)
        yield queue
        yield GaugeMetricFamily(
            "splitserve_engine_queued_tokens", "Prompt tokens not computed yet", value=load.queued_tokens
        )
        slow = CounterMetricFamily(
            "splitserve_handoff_slow_writes",
            "Writes of state that took four times as long as the fabric doctor's, by pair of ranks",
            labels=["pair"],
        )
        for pair, count in load.slow_writes.items():
            slow.add_metric([pair], count)
        yield slow
        for name, value in load.counters.items():
            yield CounterMetricFamily(
                f"splitserve_engine_{name}", f"Engine counter {name} since start", value=value
            )
