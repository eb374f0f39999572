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
from typing import Any

from splitserve.numa import short_list

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
        case "kernels":
            return f"kernels: {text}"
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
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]
