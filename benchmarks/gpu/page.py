"""What the stages of benchmarks/gpu/split.py found, as one page. Measures nothing.

machine and binding │ fabric: GB/s of every rank pair │ handoffs: GB/s by prompt length │ loads: three arms, verdicts
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from splitserve.cli.report import table as process_table
from splitserve.compare.report import print_report
from splitserve.plan.verdict import covered

Stages = Mapping[str, Mapping[str, Any]]
"""By name, what a stage wrote: facts, and under "found" what it measured."""


def show(console: Console, stages: Stages) -> None:
    """Print every part of the page that has been measured."""
    if not stages:
        console.print("nothing has been measured yet")
        return
    first = next(iter(stages.values()))
    scale = (
        "a tiny model on CPUs: proves the script, measures nothing" if first["tiny"] else "DeepSeek-V4-Flash"
    )
    commits = ", ".join(sorted({s["commit"] for s in stages.values()}))
    console.print(
        f"{first['box']}: {scale}; {first['host']['cpu']}, {first['date']}, commit {commits}", highlight=False
    )
    for name, draw in (("topology", _topology), ("fabric", _fabric), ("handoff", _handoff)):
        if name in stages:
            draw(console, stages[name]["found"])
    if "busy" in stages:
        _busy(console, stages["busy"]["found"])
    for name in ("first", "short", "long"):
        if name in stages:
            print_report(console, dict(stages[name]["found"]))


def _topology(console: Console, found: Mapping[str, Any]) -> None:
    gpus = [g["name"] for g in found["machine"]["gpus"]]
    names = ", ".join(f"{gpus.count(n)} x {n}" for n in sorted(set(gpus))) or "no GPUs"
    cores, nodes = len(found["machine"]["cores"]), len(found["machine"]["nodes"])
    console.print(
        f"{names}, {cores} cores, {nodes} memory node(s)\nkernels: {found['kernels']}", highlight=False
    )


def _fabric(console: Console, found: Mapping[str, Any]) -> None:
    """The matrix of all rank pairs: the largest write alone, and in brackets while all write."""
    links = found["fabric"]["links"]
    rate = {(x["source"], x["target"]): x for x in links}
    sources, targets = (sorted({x[end] for x in links}) for end in ("source", "target"))
    rows = []
    for s in sources:
        cells = []
        for t in targets:
            best = max(rate[s, t]["alone"].values())
            busy = rate[s, t]["together"]
            cells.append(f"{best:.2f} ({busy:.2f})" if busy else f"{best:.2f}")
        rows.append([f"prefill {s}", *cells])
    _table(
        console,
        f"fabric, GB/s alone (all at once), {found['fabric'].get('memory', 'host')} memory",
        ["", *(f"decode {t}" for t in targets)],
        rows,
    )
    lanes = ", ".join(sorted({x["lane"] for x in links}))
    memcpy, tcp = found["fabric"]["memcpy"], found["fabric"]["tcp"]
    console.print(f"memcpy {memcpy:.2f}, a socket {tcp:.2f} GB/s; lanes: {lanes}", highlight=False)
    for finding in found["verdict"]["findings"]:
        console.print(f"{finding['kind']}: {finding['text']}", highlight=False)


def _handoff(console: Console, found: Mapping[str, Any]) -> None:
    console.print(f"\nbinding (ready after {found['ready_s']:.0f} s)", highlight=False)
    console.print("\n".join(process_table({"processes": found["processes"]})), highlight=False, markup=False)
    for p in found["processes"]:
        for wrong in p["misbound"]:
            console.print(f"{p['name']}: {wrong}", highlight=False)
    rows = []
    for length, records in found["lengths"].items():
        good = [r for r in records if r["sent"]["ok"] and r["received"]["ok"]]
        rates = [rate_of(r["sent"]) for r in good]
        if not good:
            rows.append([length, "0", *("-" * 5)])
            continue
        spread = f"{statistics.median(rates):.2f} ({min(rates):.2f}-{max(rates):.2f})"
        sent = good[-1]["sent"]
        lanes = ", ".join(sorted({lane.split("/")[0] for r in good for lane in r["sent"]["lanes"]}))
        rows.append(
            [
                length,
                str(len(good)),
                f"{sent['bytes'] / 1e6:.2f}",
                str(sent["descriptors"]),
                spread,
                _ends(good),
                lanes,
            ]
        )
    head = [
        "tokens",
        "handoffs",
        "MB, all ranks",
        "descriptors",
        "GB/s, median (min-max)",
        "ms to the end",
        "lane",
    ]
    _table(
        console,
        "handoffs of lone prompts: bytes over the time in which they moved; from the last row to their end",
        head,
        rows,
    )


def _ends(records: Sequence[Mapping[str, Any]]) -> str:
    """Milliseconds from the turn in which the last chunk was computed to the one in which all of it was there."""
    ends = [
        1000 * (c["written"] - c["computed"])
        for r in records
        for c in r["sent"]["chunks"][-1:]
        if c["written"]
    ]
    return f"{statistics.median(ends):.2f} ({min(ends):.2f}-{max(ends):.2f})" if ends else "-"


def _busy(console: Console, found: Mapping[str, Any]) -> None:
    """The gaps between tokens of the same load, alone and beside prompts."""
    gaps = {name: _gaps(found[name]) for name in ("idle", "loaded")}
    rows = [[name, *(f"{gaps[name][f]:.2f}" for f in GAPS)] for name in gaps]
    rows.append(["loaded / idle", *(f"{gaps['loaded'][f] / gaps['idle'][f]:.2f}" for f in GAPS)])
    _table(
        console,
        f"gaps between tokens, ms, {found['concurrency']} at once: alone, and while long prompts come in",
        ["", *GAPS],
        rows,
    )


GAPS = ("median", "p90", "p99")


def _gaps(bench: Mapping[str, Any]) -> Mapping[str, float]:
    (run,) = bench["results"]
    return {f: 1000 * run["itl_s"][f] for f in GAPS}


def rate_of(sent: Mapping[str, Any]) -> float:
    """GB/s of one handoff: its bytes over the time in which they moved; in older records, over turns of the loop."""
    spans = [(c["posted"], c["written"]) for c in sent["chunks"] if c["posted"] and c["written"]]
    turns, moving = covered(spans), sum(c.get("moving", 0.0) for c in sent["chunks"])
    seconds = min(turns, moving) or max(turns, moving)  # chunks under way at once count once
    return sent["bytes"] / seconds / 1e9 if seconds else 0.0


def _table(console: Console, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    console.print(f"\n{title}", highlight=False)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in head:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
