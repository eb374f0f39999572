"""What `compare` found: one table of all arms, the verdict of each load, JSON, and one page. Measures nothing."""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

import splitserve
from splitserve.bench import page
from splitserve.bench.metrics import Summary, percentile
from splitserve.bench.report import to_json as summary_to_json
from splitserve.compare.measure import Taken, merged
from splitserve.plan.verdict import FIRST_TOKEN, GOODPUT, THROUGHPUT, TOKEN_GAPS, Gain, gain, judge
from splitserve.tables import columns
from splitserve.words import command_line

if TYPE_CHECKING:
    from splitserve.compare.main import Found, Study

Figure = Callable[[Summary], float]

FIGURES: dict[str, tuple[str, Figure, bool]] = {
    THROUGHPUT: ("out tok/s", lambda s: s.output_rate, True),
    GOODPUT: ("good req/s", lambda s: math.nan if s.goodput is None else s.goodput, True),
    FIRST_TOKEN: ("ms", lambda s: 1000 * s.ttft_s.median, False),
    "TPOT p50": ("ms", lambda s: 1000 * s.tpot_s.median, False),
    TOKEN_GAPS: ("ms", lambda s: 1000 * s.itl_s.p99, False),
}
"""name -> unit, where it stands, and whether more is better."""


def results(study: Study, found: Found) -> dict[str, Any]:
    """Everything as plain values: facts, arms, and for each load the figures of each arm and the verdict."""
    loads = []
    for i, shape in enumerate(study.shapes):
        taken = {arm.name: found.taken[arm.name][i] for arm in found.arms}
        loads.append(
            {
                "load": shape.label,
                "num": shape.num,
                "arms": {a.name: _arm(taken[a.name], a.num_devices) for a in found.arms},
                "verdict": _verdict(taken),
            }
        )
    failed = sum(t.summary.num_failed for own in found.taken.values() for one in own for t in one)
    return {
        "version": splitserve.__version__,
        "file": study.file,
        "workload": f"{study.input_len} in / {study.output_len} out",
        "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} cpus",
        "command": command_line(sys.argv),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seed": study.seed,
        "repeats": study.repeats,
        "throttles": study.throttles,
        "order": found.order,
        "num_failed": failed,
        "arms": {
            a.name: {
                "shape": a.shape,
                "num_devices": a.num_devices,
                "step_tokens": found.chunks[a.name],
                "tuning": {str(k): v for k, v in found.tuning.get(a.name, {}).items()},
                "file": a.text,
            }
            for a in found.arms
        },
        "loads": loads,
    }


def _arm(taken: Sequence[Taken], num_devices: int) -> dict[str, Any]:
    figures: dict[str, dict[str, Any]] = {}
    for name, (unit, read, _) in FIGURES.items():
        values = [v for t in taken if math.isfinite(v := read(t.summary))]
        if values:
            figures[name] = {
                "unit": unit,
                "median": percentile(values, 50),
                "low": min(values),
                "high": max(values),
            }
    per_device = figures[THROUGHPUT]["median"] / num_devices
    return {
        "figures": figures,
        "per_device": per_device,
        "runs": [summary_to_json(t.summary) for t in taken],
        "engines": [
            {"role": e.role, "busy": e.busy_s / r.duration_s, "sums": dict(e.sums)}
            for r in [merged([t.run for t in taken])]
            for e in r.engines
        ],
    }


def _verdict(taken: dict[str, list[Taken]]) -> dict[str, Any] | None:
    """None without the split's arm: then there is nothing to judge."""
    if "split" not in taken:
        return None
    rivals = {name: own for name, own in taken.items() if name != "split"}
    replicas = [t.run for t in rivals.get("replicas", [])]
    verdict = judge(merged([t.run for t in taken["split"]]), replicas, _gains(taken["split"], rivals))
    return {**asdict(verdict), "bound": str(verdict.bound)}


def _gains(split: Sequence[Taken], rivals: dict[str, list[Taken]]) -> list[Gain]:
    """Each figure against the best rival in that figure."""
    gains = []
    for name, (_, read, more) in FIGURES.items():
        own = [read(t.summary) for t in split]
        others = {rival: [read(t.summary) for t in taken] for rival, taken in rivals.items()}
        medians = {
            rival: percentile(values, 50)
            for rival, values in others.items()
            if all(map(math.isfinite, values))
        }
        if not medians or not all(map(math.isfinite, own)):
            continue
        best = (max if more else min)(medians, key=lambda rival: medians[rival])
        gains.append(gain(name, own, others[best], more_is_better=more, rival=best))
    return gains


def to_json(found: dict[str, Any]) -> str:
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"


TITLES = {
    THROUGHPUT: "output tokens/s",
    GOODPUT: "requests/s within limits",
    FIRST_TOKEN: "TTFT p50, ms",
    "TPOT p50": "TPOT p50, ms",
    TOKEN_GAPS: "ITL p99, ms",
}
PER_DEVICE = "the same per core or GPU"


def _table(found: dict[str, Any], load: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """One load: a row a figure, a column an arm; so it fits 80 columns, whatever the figures."""
    arms = load["arms"]
    rows = []
    for name, title in TITLES.items():
        if any(name in arm["figures"] for arm in arms.values()):
            rows.append([title, *(_spread(arm["figures"].get(name)) for arm in arms.values())])
        if name == THROUGHPUT:
            rows.append([PER_DEVICE, *(_number(arm["per_device"]) for arm in arms.values())])
    rows.append(["tokens a step", *(str(found["arms"][name]["step_tokens"]) for name in arms)])
    return [f"{load['load']}, {load['num']} requests", *arms], rows


def _spread(figure: dict[str, Any] | None) -> str:
    """The median, and half of the distance between lowest and highest."""
    if figure is None:
        return "-"
    half = (figure["high"] - figure["low"]) / 2
    digits = _digits(figure["median"])
    return f"{figure['median']:.{digits}f}" + (f" ±{half:.{digits}f}" if half else "")


def _number(value: float) -> str:
    return f"{value:.{_digits(value)}f}"


def _digits(value: float) -> int:
    """Decimals that leave about three figures."""
    return 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3


def print_report(console: Console, found: dict[str, Any]) -> None:
    """A table of each load, its verdict, and what the tables' words mean."""
    console.print(f"{found['file']}  {found['workload']}  {found['repeats']} repeat(s)", highlight=False)
    for load in found["loads"]:
        head, rows = _table(found, load)
        lines = columns(head, rows, numbers=range(1, len(head)))
        console.print("\n".join(["", *lines, ""]), highlight=False, markup=False, soft_wrap=True)
        for sentence in _sentences(load):
            console.print(sentence, highlight=False)
    console.print(f"[dim]{_KEY}[/]", highlight=False)
    if found["num_failed"]:
        console.print(f"[red]{found['num_failed']} requests failed[/]")


_KEY = "Medians ± half of the distance from lowest to highest run; of times less is better."


def _sentences(load: dict[str, Any]) -> list[str]:
    verdict = load["verdict"]
    if verdict is None:
        return []
    return [f"{load['load']}: {verdict['sentence']}", *(f"doubt: {d}" for d in verdict["doubts"])]


def to_html(found: dict[str, Any]) -> str:
    """One page: verdicts, table, a plot of each figure, and how it was measured."""
    parts = [page.paragraph(s) for load in found["loads"] for s in _sentences(load)]
    parts += [page.table(*_table(found, load)) for load in found["loads"]]
    parts.append(page.paragraph(_KEY))
    for name, (unit, _, _) in FIGURES.items():
        groups = []
        for load in found["loads"]:
            drawn = {
                arm: page.Bar(f["median"], f["low"], f["high"])
                for arm, own in load["arms"].items()
                if (f := own["figures"].get(name))
            }
            groups.append((load["load"], drawn))
        if any(drawn for _, drawn in groups):
            parts.append(page.bars(name, unit, groups))
    parts.append(page.preformatted("\n".join(f"{k}: {found[k]}" for k in _FACTS)))
    parts += [page.preformatted(f"# {n}: {a['shape']}\n{a['file']}") for n, a in found["arms"].items()]
    return page.page(f"Does the split pay? {found['workload']}", parts)


_FACTS = (
    "file",
    "machine",
    "command",
    "finished",
    "version",
    "seed",
    "repeats",
    "order",
    "throttles",
    "num_failed",
)
