"""One arm that is up: load it through its router, and read what its engines did meanwhile. Judges nothing.

read sums ─▶ load ─▶ client's marks ─▶ read sums and engines' marks ─▶ Taken
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from splitserve.bench.client import LoadClient
from splitserve.bench.metrics import Slo, Summary, summarize
from splitserve.bench.workload import Ask
from splitserve.errors import ConfigError
from splitserve.launch.stage import api_key
from splitserve.net.client import Client
from splitserve.net.keys import bearer
from splitserve.plan.verdict import Engine, Run, lives

CALL_S = 30.0
WAIT_S = 5.0


@dataclass(frozen=True)
class Shape:
    """A load: a closed loop of `concurrency`, or an open loop of `rate` requests a second; `num` requests."""

    num: int
    concurrency: int = 0
    rate: float | None = None

    @property
    def label(self) -> str:
        return f"{self.rate:g}/s" if self.rate is not None else f"c={self.concurrency}"


@dataclass(frozen=True)
class Taken:
    """One measurement of one arm: as clients saw it, and as its engines did."""

    summary: Summary
    run: Run


class Target:
    """The processes of a deployment that is up. `state` is what its supervisor wrote."""

    def __init__(self, client: Client, state: Mapping[str, Any]) -> None:
        self._client = client
        self._engines = [(p["role"], p["url"]) for p in state["processes"] if p["role"] != "router"]
        self._headers = [("content-type", "application/json"), *bearer(api_key(state, "engine"))]
        self.router = next(p["url"] for p in state["processes"] if p["role"] == "router")

    async def throttle(self, throttles: Mapping[str, float]) -> None:
        """Plant each slowness, in ms, at every engine. ConfigError where the deployment does not allow it."""
        for name, ms in throttles.items():
            for _, url in self._engines:
                await self._call("POST", f"{url}/debug/plant", {"fault": name, "ms": ms})

    async def measure(self, load: LoadClient, asks: Sequence[Ask], shape: Shape, *, slo: Slo | None) -> Taken:
        """Load the router with `asks` and take what came of it."""
        before, since = await self._sums(), time.monotonic()
        if shape.rate is None:
            marks, duration_s = await load.closed_loop(asks, shape.concurrency)
        else:
            marks, duration_s = await load.open_loop(asks)
        after = await self._sums()
        engines = tuple(
            Engine(role, {k: v - b.get(k, 0.0) for k, v in a.items()})
            for (role, _), a, b in zip(self._engines, after, before, strict=True)
        )
        summary = summarize(
            marks, duration_s=duration_s, concurrency=shape.concurrency, rate=shape.rate, slo=slo
        )
        records = {role: [r async for r in self._records(role)] for role in ("prefill", "decode")}
        found = lives(records["prefill"], records["decode"], since=since)
        return Taken(summary, Run(summary.duration_s, engines, found))

    async def _records(self, role: str) -> Any:
        for own, url in self._engines:
            if own == role:
                for record in (await self._call("GET", f"{url}/debug/marks"))["requests"]:
                    yield record

    async def _sums(self) -> list[dict[str, float]]:
        return [(await self._call("GET", f"{url}/debug/stats"))["counters"] for _, url in self._engines]

    async def _call(self, method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        raw = b"" if body is None else msgspec.json.encode(body)
        answer = await self._client.request(method, url, body=raw, headers=self._headers, timeout_s=CALL_S)
        found = msgspec.json.decode(answer.body) if answer.body else {}
        if answer.status != 200 or not isinstance(found, dict):
            told = found.get("error", {}) if isinstance(found, dict) else {}
            raise ConfigError(
                f"{method} {url} answered {answer.status}: {told.get('message', '')}",
                fix=told.get("fix") or "is everything of the same version?",
            )
        return found


def merged(runs: Sequence[Run]) -> Run:
    """Repeated runs of one arm as one: times and sums added up, engine by engine."""
    engines = []
    for same in zip(*(r.engines for r in runs), strict=True):
        names = {k for e in same for k in e.sums}
        engines.append(Engine(same[0].role, {k: sum(e.sums.get(k, 0.0) for e in same) for k in names}))
    return Run(sum(r.duration_s for r in runs), tuple(engines), tuple(li for r in runs for li in r.lives))
