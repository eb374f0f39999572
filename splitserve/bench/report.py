"""A run's figures as a table for people and as JSON for programs; also under the names of sglang.bench_serving."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from .metrics import Spread, Summary


def table(summaries: Sequence[Summary], title: str) -> Table:
    """One row a shape; times in milliseconds as mean / p50 / p90 / p99."""
    found = Table(title=title, caption="ms: mean / p50 / p90 / p99")
    for name in ("load", "requests", "req/s", "in tok/s", "out tok/s", "TTFT", "TPOT", "ITL", "E2E"):
        found.add_column(name, justify="right", no_wrap=True)
    with_goodput = any(s.goodput is not None for s in summaries)
    if with_goodput:
        found.add_column("goodput req/s", justify="right")
    for s in summaries:
        load = f"c={s.concurrency}" if s.concurrency else f"{s.rate:g}/s" if s.rate else "trace"
        num = f"{s.num}" if not s.num_failed else f"{s.num} ([red]{s.num_failed} failed[/])"
        row = [load, num, f"{s.request_rate:.2f}", f"{s.input_rate:.0f}", f"{s.output_rate:.1f}"]
        row += [_cell(x) for x in (s.ttft_s, s.tpot_s, s.itl_s, s.e2e_s)]
        found.add_row(*row, *([_number(s.goodput)] if with_goodput else []))
    return found


def print_report(console: Console, summaries: Sequence[Summary], title: str) -> None:
    """The table, then every failure and every count that did not agree."""
    console.print(table(summaries, title))
    for s in summaries:
        where = f"c={s.concurrency}" if s.concurrency else "open loop"
        for text, count in s.errors:
            console.print(f"[red]failed[/] {where}: {count} x {text}", highlight=False)
        for text, count in s.mismatches:
            console.print(f"[yellow]counts differ[/] {where}: {count} x {text}", highlight=False)


def to_json(summary: Summary) -> dict[str, Any]:
    """Our names and bench_serving's, side by side; NaN becomes null."""
    s = summary
    ours: dict[str, Any] = {
        "concurrency": s.concurrency or None,
        "rate": s.rate,
        "num": s.num,
        "num_failed": s.num_failed,
        "duration_s": s.duration_s,
        "num_input": s.num_input,
        "num_output": s.num_output,
        "request_rate": s.request_rate,
        "input_rate": s.input_rate,
        "output_rate": s.output_rate,
        "goodput": s.goodput,
        "errors": dict(s.errors),
        "mismatches": dict(s.mismatches),
    }
    theirs: dict[str, Any] = {
        "backend": "sglang-oai",
        "request_rate": s.rate if s.rate is not None else "inf",
        "max_concurrency": s.concurrency or None,
        "duration": s.duration_s,
        "completed": s.num - s.num_failed,
        "total_input_tokens": s.num_input,
        "total_output_tokens": s.num_output,
        "request_throughput": s.request_rate,
        "input_throughput": s.input_rate,
        "output_throughput": s.output_rate,
        "total_throughput": s.input_rate + s.output_rate,
        "concurrency": s.mean_running,
    }
    for name, spread in (("ttft", s.ttft_s), ("tpot", s.tpot_s), ("itl", s.itl_s), ("e2e_latency", s.e2e_s)):
        for part in ("mean", "median", "std", "p90", "p95", "p99", "max"):
            theirs[f"{part}_{name}_ms"] = _finite(getattr(spread, part) * 1000)
        ours[f"{name.removesuffix('_latency')}_s"] = {
            part: _finite(getattr(spread, part)) for part in ("mean", "median", "p90", "p95", "p99", "max")
        }
    return {**ours, "bench_serving": theirs}


def _cell(spread: Spread) -> str:
    return " / ".join(_number(v * 1000) for v in (spread.mean, spread.median, spread.p90, spread.p99))


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
