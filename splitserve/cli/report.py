"""How a start and a stop are shown: one line for what changes, a table at the end, or JSON lines for programs.

A report is a function of one event (see launch/supervisor.py). It decides nothing and never fails: whoever reads it may
have gone, which is no reason to stop serving.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from splitserve.numa import short_list
from splitserve.plan.fabric import GET, HOST, PUT, Fabric, Verdict
from splitserve.tables import columns

Event = dict[str, Any]


class PlainReport:
    """One line for each thing that changed, with the time since the start: for files, pipes and CI."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._said: dict[str, str] = {}

    def __call__(self, event: Event) -> None:
        text = describe(event)
        if self._said.get(event["name"]) == text:
            return  # progress within a stage: the stage has been named
        self._said[event["name"]] = text
        with contextlib.suppress(OSError):
            print(f"{time.monotonic() - self._begun:6.1f} s  {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is open."""


class LiveReport:
    """A line for each process that is loading, redrawn in place; the rest as in PlainReport."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.fields[process]:<12}"), BarColumn(24), TextColumn("{task.description}"))
        self._progress = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True))
        self._tasks: dict[str, Any] = {}
        self._progress.start()

    def __call__(self, event: Event) -> None:
        name = event["name"]
        if event["event"] == "loading":
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task("", total=1.0, process=name)
            self._progress.update(
                self._tasks[name], completed=event.get("done", 0.0), description=event["text"]
            )
            return
        if event["event"] in ("ready", "died") and name in self._tasks:
            self._progress.remove_task(self._tasks.pop(name))
        self._progress.console.print(describe(event), highlight=False, markup=False)
        if event["event"] in ("up", "stopping", "killing"):
            self.close()

    def close(self) -> None:
        for task in self._tasks.values():
            self._progress.remove_task(task)
        self._tasks.clear()
        self._progress.stop()


class JsonReport:
    """One JSON object a line on stdout."""

    def __call__(self, event: Event) -> None:
        try:
            print(json.dumps(event), flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def close(self) -> None:
        """Nothing is open."""


Report = PlainReport | LiveReport | JsonReport


def choose(*, as_json: bool) -> Report:
    """JSON if asked for, redrawn lines on a terminal, plain lines elsewhere."""
    if as_json:
        return JsonReport()
    return LiveReport() if sys.stderr.isatty() else PlainReport()


def describe(event: Event) -> str:
    """One event as a person reads it."""
    name, text = event["name"], event["text"]
    match event["event"]:
        case "loading":
            return f"{name}: {text}"
        case "note":
            return f"{name}: {text}"
        case "ready":
            return f"{name}: ready{f' at {text}' if text else ''}"
        case "up":
            return f"up: {text}; {event['url']}"
        case "died":
            return f"{name}: {text}"
        case "restarting":
            return f"{name}: starts again {text}"
        case "gave_up":
            return f"{name}: given up, {text}"
        case "stopping":
            hint = " (running requests may end; Ctrl-C once more stops at once)" if text == "Ctrl-C" else ""
            return f"stopping: {text}{hint}"
        case "killing":
            return f"killing {name or 'everything'}: {text}"
        case "stopped":
            return f"stopped: {text}"
        case other:
            return f"{name}: {other} {text}".strip()


def fabric(measured: Fabric, verdict: Verdict) -> list[str]:
    """The matrix of links in both directions, the yardsticks, what is wrong, and what follows from it."""
    lines = []
    for direction, what in ((PUT, "writes (put)"), (GET, "reads (get)")):
        if any(link.sizes(direction) for link in measured.links):
            lines += [f"GB/s of single {what}, by size", *columns(*_matrix(measured, direction)), ""]
    copy = "a copy by one core" if measured.memory == HOST else "a plain copy between them"
    lines.append(f"{copy} {measured.memcpy:.2f} GB/s, a socket {measured.tcp:.2f} GB/s (medians)")
    lines.append(f"memory: {measured.memory}")
    lines.append(f"direction: {verdict.direction}, {verdict.why}")
    pairs = ", ".join(f"{source} to {target}" for target, source in sorted(verdict.pairing.items()))
    lines.append(f"pairing of ranks with the best slowest link: {pairs}")
    for word, findings in (("FAIL", verdict.findings), ("warn", verdict.warnings)):
        for finding in findings:
            lines += [f"{word}  {finding.kind}: {finding.text}", f"      fix: {finding.fix}"]
    return lines if verdict.findings else [*lines, "ok    no fallback, no halved link, no collapse"]


def _matrix(measured: Fabric, direction: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    sizes = sorted({size for link in measured.links for size in link.sizes(direction)})
    # The transport names the lane of its writes; that of reads is not known.
    lane = ("lane",) if direction == PUT else ()
    head = ("prefill", "decode", *(_size(n) for n in sizes), "all at once", "tcp", "copy", *lane)
    rows = [
        (
            _rank(measured.sources, link.source),
            _rank(measured.targets, link.target),
            *(f"{link.sizes(direction)[n]:.2f}" for n in sizes),
            f"{link.shared(direction):.2f}" if link.shared(direction) else "-",
            f"{link.tcp:.2f}",
            f"{link.copy:.2f}",
            *((link.lane.split("/")[0],) if lane else ()),
        )
        for link in measured.links
    ]
    return head, rows


def _rank(names: Sequence[str], rank: int) -> str:
    return names[rank] if names else str(rank)


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def table(state: dict[str, Any]) -> list[str]:
    """The processes of one deployment, one line each, under a head line."""
    head = ("process", "state", "pid", "cpus", "memory", "gpus", "restarts", "address")
    rows = [
        (
            p["name"],
            f"{p['phase']} {p['loading']}".strip() if p["phase"] == "starting" else p["phase"],
            str(p["pid"] or "-"),
            short_list(p["cpus"]) + ("!" if p["misbound"] else ""),
            p["memory"],
            short_list(p["gpus"]) or "-",
            str(p["restarts"]),
            " ".join(f"{key}:{port}" for key, port in p["ports"].items()),
        )
        for p in state["processes"]
    ]
    hosts = [p.get("host", "")[:12] or "here" for p in state["processes"]]
    if set(hosts) == {"here"}:
        return columns(head, rows)
    return columns((*head, "host"), [(*row, host) for row, host in zip(rows, hosts, strict=True)])


def loads(state: dict[str, Any]) -> list[str]:
    """What the engines of one deployment do, one line each and an empty one; nothing where the router does not tell."""
    rows = []
    for p in state["processes"]:
        load, rates = p["load"], p["tokens_per_s"]
        if not load:
            continue
        total = load["total_pages"]
        used = f"{1 - load['free_pages'] / total:.0%}" if total else "-"
        rows.append(
            (
                p["name"],
                str(load["num_running"]),
                str(load["num_waiting"]),
                used,
                f"{rates['prompt']:.0f}",
                f"{rates['output']:.0f}",
                load["lane"] or "-",
            )
        )
    head = ("engine", "running", "waiting", "state used", "prompt tok/s", "output tok/s", "lane")
    return [*columns(head, rows), ""] if rows else []
