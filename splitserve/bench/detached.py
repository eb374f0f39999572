"""`bench --detach`, `bench status`, `results` and `remove`: a measurement without a terminal, as people handle it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from splitserve.errors import ConfigError
from splitserve.words import Parser

from . import runs
from .plan import Outputs, Plan, undetached
from .runs import Run


def begin(
    words: Sequence[str], plan: Plan, outputs: Outputs, *, runs_dir: Path, program: Sequence[str]
) -> int:
    """Start the measurement and say its ID."""
    own = undetached(words, url=plan.url)
    run = runs.begin(runs_dir, own, url=plan.url, key=plan.api_key, program=program)
    name = run.path.name
    if outputs.json == "-":
        print(json.dumps({"id": name, "path": str(run.path)}))
    else:
        print(f"{name} measures {plan.url}\nsplitserve bench status {name}\nsplitserve bench results {name}")
    return 0


def recorded(path: Path, measure: Callable[[Run], int]) -> int:
    """Be the run of `path`: measure, and leave the end in its state whatever happens."""
    run = Run(path)
    run.started()
    code = 1
    try:
        code = measure(run)
    except ConfigError:
        code = 2
        raise
    except KeyboardInterrupt:
        code = 130
        raise
    finally:
        run.end(code)
    return code


def status(words: Sequence[str], where: Path) -> int:
    """All runs, or one. Exit code 0 whatever their state."""
    p = Parser("splitserve bench status", description="measurements started with --detach")
    p.add_argument("id", nargs="?", default="", metavar="ID", help="default: all")
    p.add_argument("--json", action="store_true", help="print JSON for programs")
    args = p.parse_args(list(words))
    chosen = [runs.find(where, args.id)] if args.id else runs.newest_first(where)
    found = [runs.describe(r) for r in chosen]
    if args.json:
        print(json.dumps({"runs": found}, indent=1))
        return 0
    for one in found:
        begun = time.strftime("%H:%M:%S", time.localtime(one["begun"]))
        print(f"{one['id']}  {one['state']:<8}begun {begun}, {one['seconds']:.0f} s  {one['url']}")
        if one["state"] != "done" and one["last_words"]:
            print(f"    {one['last_words']}")
    if not found:
        print("no measurement was started with --detach")
    return 0


def results(words: Sequence[str], where: Path) -> int:
    """What a run has found: its tables, JSON, or a page. Exit code 1 where it has found nothing (yet)."""
    p = Parser("splitserve bench results", description="figures of a measurement")
    p.add_argument("id", metavar="ID")
    p.add_argument("--json", action="store_true", help="print JSON for programs")
    p.add_argument("--html", default="", metavar="FILE", help="write one page with tables and plots")
    args = p.parse_args(list(words))
    run = runs.find(where, args.id)
    state = run.read().state
    if not run.result.exists():
        why = f": {run.last_words}" if run.last_words else ""
        print(f"{args.id} is {state} and has no figures{why}", file=sys.stderr)
        return 1
    if args.html:
        Path(args.html).write_bytes(run.page.read_bytes())
        print(f"written to {args.html}")
        return 0
    sys.stdout.write(run.result.read_text(encoding="utf-8") if args.json else run.report)
    return 0


def remove(words: Sequence[str], where: Path) -> int:
    """Forget runs that have ended."""
    p = Parser("splitserve bench remove", description="forget measurements that have ended")
    p.add_argument("ids", nargs="+", metavar="ID")
    for run in [runs.find(where, name) for name in p.parse_args(list(words)).ids]:
        runs.remove(run)
        print(f"removed {run.path.name}")
    return 0


COMMANDS: dict[str, Callable[[Sequence[str], Path], int]] = {
    "status": status,
    "results": results,
    "remove": remove,
}
