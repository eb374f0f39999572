"""A run's figures: tables, one HTML page, and JSON, also under the names of sglang.bench_serving. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from math import nan
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import page
from .metrics import Spread, Summary

LATENCIES: dict[str, Callable[[Summary], Spread]] = {
    "TTFT": lambda s: s.ttft_s,
    "TPOT": lambda s: s.tpot_s,
    "ITL": lambda s: s.itl_s,
    "E2E": lambda s: s.e2e_s,
}

ENOUGH_FOR_P99 = 100
"""Samples below which the table leaves p99 out: it would repeat the maximum and look like a measurement."""


def throughput_table(summaries: Sequence[Summary], title: str) -> Table:
    """One row a shape; narrow enough for 80 columns."""
    found = Table(title=title, title_justify="left")
    for name in ("load", "requests", "req/s", "in tok/s", "out tok/s", "running"):
        found.add_column(name, justify="right", no_wrap=True)
    with_goodput = any(s.goodput is not None for s in summaries)
    if with_goodput:
        found.add_column("good req/s", justify="right", no_wrap=True)
    for s in summaries:
        num = f"{s.num}" if not s.num_failed else f"{s.num} ([red]{s.num_failed} failed[/])"
        rates = (s.request_rate, s.input_rate, s.output_rate, s.mean_running)
        found.add_row(
            _load(s), num, *(_number(r) for r in rates), *([_number(s.goodput)] if with_goodput else [])
        )
    return found


def latency_table(summaries: Sequence[Summary]) -> Table:
    """Milliseconds; four rows a shape."""
    found = Table(title="ms", title_justify="left")
    for name in ("load", "", "mean", "p50", "p90", "p99", "max"):
        found.add_column(name, justify="right", no_wrap=True)
    for s in summaries:
        for name, read in LATENCIES.items():
            x = read(s)
            tail = x.p99 if x.num >= ENOUGH_FOR_P99 else nan
            cells = [_number(v * 1000) for v in (x.mean, x.median, x.p90, tail, x.max)]
            found.add_row(_load(s) if name == "TTFT" else "", name, *cells, end_section=name == "E2E")
    return found


def print_report(console: Console, summaries: Sequence[Summary], title: str) -> None:
    """The tables, then every failure and every count that did not agree."""
    console.print(throughput_table(summaries, title), latency_table(summaries))
    for s in summaries:
        for text, count in s.errors:
            console.print(f"[red]failed[/] {_load(s)}: {count} x {text}", highlight=False)
        for text, count in s.mismatches:
            console.print(f"[yellow]counts differ[/] {_load(s)}: {count} x {text}", highlight=False)


def to_html(summaries: Sequence[Summary], facts: Mapping[str, Any]) -> str:
    """One page: both tables, throughput and latencies over the load, and how it was measured."""
    parts = [page.table(*_cells(t)) for t in (throughput_table(summaries, ""), latency_table(summaries))]
    x_unit = "requests/s" if any(s.rate for s in summaries) else "at once"
    at = [(s.rate or float(s.concurrency), s) for s in summaries]
    rates = {"out tok/s": [(x, s.output_rate) for x, s in at]}
    parts.append(page.lines("throughput", "tok/s", rates, x_unit=x_unit))
    for name, read in LATENCIES.items():
        series = {
            part: [(x, v * 1000) for x, s in at if math.isfinite(v := getattr(read(s), field))]
            for part, field in (("p50", "median"), ("p90", "p90"), ("p99", "p99"))
        }
        parts.append(page.lines(name, "ms", series, x_unit=x_unit))
    errors = [f"failed, {_load(s)}: {count} x {text}" for s in summaries for text, count in s.errors]
    parts += [page.paragraph(e) for e in errors]
    parts.append(page.preformatted("\n".join(f"{k}: {v}" for k, v in facts.items())))
    return page.page(f"{facts['model']} at {facts['url']}", parts)


def _cells(drawn: Table) -> tuple[list[str], list[list[str]]]:
    """A table's headings and rows as plain text."""
    columns = [[Text.from_markup(str(cell)).plain for cell in c.cells] for c in drawn.columns]
    return [str(c.header) for c in drawn.columns], [list(row) for row in zip(*columns, strict=True)]


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


def _load(s: Summary) -> str:
    return f"c={s.concurrency}" if s.concurrency else f"{s.rate:g}/s" if s.rate else "trace"


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
