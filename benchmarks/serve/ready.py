"""How long from `splitserve up` to the first token through the pair, and where it goes; and after a kill -9?

    python -m benchmarks.serve.ready [FILE] [--repeats 3] [--keep ready]

Starts, in turn: the whole deployment by `up`, then each engine by its own command line alone on the same cpus. The sum
of the parts is: what `up` does before it starts anything (the checks of the file and the model), the slower engine
alone, the router, one token. What `up` takes beyond that is what engines cost each other by starting at the same time.

Then each process is killed with -9 in a deployment that is up: seconds until all are ready and a token has come through
every pair again, and until the first answer to a request sent at the moment of the kill or after.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.measure import keep, spread

PROGRAM = [sys.executable, "-m", "splitserve"]
NAME = "ready-bench"
LONG_S = 300.0
BEFORE = "before anything is started"


class Box:
    """A runtime directory of its own, and commands in it."""

    def __init__(self, file: str, home: str) -> None:
        self.file = file
        self.home = home
        self.env = {**os.environ, "XDG_RUNTIME_DIR": home, "XDG_STATE_HOME": home}
        self.words = [file, "--set", f"deployment.name={NAME}", "--set", "router.port=0"]

    def run(self, *words: str) -> str:
        done = subprocess.run(
            [*PROGRAM, *words], env=self.env, capture_output=True, text=True, timeout=LONG_S, check=False
        )
        if done.returncode:
            raise SystemExit(f"{shlex.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((Path(self.home) / "splitserve" / NAME / "state.json").read_text())
        return found

    def up(self) -> tuple[dict[str, float], subprocess.Popen[str]]:
        """Seconds from the command's start to each thing it reported; the command, which goes on."""
        begun = time.monotonic()
        child = subprocess.Popen(
            [*PROGRAM, "up", *self.words, "--json"],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert child.stdout is not None
        seen: dict[str, float] = {}
        for line in child.stdout:
            event = json.loads(line)
            key = f"{event['name']} {event['event']} {event['text']}" if event["event"] == "loading" else ""
            seen.setdefault(key or f"{event['name']} {event['event']}".strip(), time.monotonic() - begun)
            if event["event"] == "up":
                return seen, child
            if event["event"] == "outcome":
                break
        raise SystemExit(f"did not come up: {seen}")

    def down(self, child: subprocess.Popen[str]) -> None:
        child.terminate()
        child.communicate(timeout=LONG_S)


def start_of(box: Box) -> dict[str, float]:
    """One `up`, in its parts as they followed each other."""
    seen, child = box.up()
    box.down(child)
    engines = {
        k.split()[0]: t for k, t in seen.items() if k.endswith(" ready") and not k.startswith("router")
    }
    first = min(seen.values())
    slowest = max(engines.values())
    return {
        "up": seen["up"],
        BEFORE: first,
        **{f"{name} ready after": t - first for name, t in engines.items()},
        "router": seen["router ready"] - slowest,
        "first token": seen["up"] - seen["router ready"],
    }


def alone(box: Box) -> dict[str, float]:
    """Each engine started by its own words on its own cpus, with nothing else."""
    plan = json.loads(box.run("up", *box.words, "--dry-run", "--json"))
    ports = {f"{p['name']}.{w['key']}": 0 for p in plan["processes"] for w in p["ports"]}
    found = {}
    for process in plan["processes"]:
        if process["role"] != "router":
            words = [_fill(word, ports) for word in process["argv"]]
            found[f"{process['name']} alone"] = _until_ready(box, words, process)
    return found


def _fill(word: str, ports: dict[str, int]) -> str:
    for name, port in ports.items():
        word = word.replace(f"{{{name}}}", str(port))
    return word


def _until_ready(box: Box, words: list[str], process: dict[str, Any]) -> float:
    begun = time.monotonic()
    child = subprocess.Popen(
        [*PROGRAM, *words],
        env={**box.env, **process["env"]},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    os.sched_setaffinity(child.pid, process["front_cpus"])
    assert child.stdout is not None
    try:
        for line in child.stdout:
            if line.startswith("{") and json.loads(line).get("ready"):
                return time.monotonic() - begun
    finally:
        child.terminate()
        child.communicate(timeout=LONG_S)
    raise SystemExit(f"{shlex.join(words)} did not become ready")


# ------------------------------------------------------------------ deaths


def deaths(box: Box) -> list[dict[str, Any]]:
    """Each process killed once, in a deployment that is well before each."""
    _, child = box.up()
    told = []
    try:
        for process in [p["name"] for p in box.state()["processes"]]:
            for part in ("server", "rank 0") if process != "router" else ("router",):
                told.append(
                    {"killed": f"{process} {part}" if process != part else part, **kill(box, process, part)}
                )
                print(told[-1], flush=True)
    finally:
        box.down(child)
    return told


def kill(box: Box, process: str, part: str) -> dict[str, float]:
    state = next(p for p in box.state()["processes"] if p["name"] == process)
    pid = state["ranks"][0]["pid"] if part.startswith("rank") else state["pid"]
    restarts = state["restarts"]
    begun = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    answered = 0.0
    while True:
        if not answered and answers(box):
            answered = time.monotonic() - begun
        now = next(p for p in box.state()["processes"] if p["name"] == process)
        if now["restarts"] > restarts and now["phase"] == "ready" and proven(box) and answered:
            return {
                "ready_again_s": round(time.monotonic() - begun, 2),
                "answers_again_s": round(answered, 2),
            }
        if time.monotonic() > begun + LONG_S:
            raise SystemExit(f"{process} is not well again: {box.state()}")
        time.sleep(0.02)


def answers(box: Box) -> bool:
    """One token of a fresh prompt, through the router."""
    body = {"prompt": f"{time.monotonic_ns()}", "max_tokens": 1}
    try:
        request = urllib.request.Request(
            box.state()["url"] + "/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30.0) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def proven(box: Box) -> bool:
    """The router says that a token has come through every pair as it is now."""
    try:
        with urllib.request.urlopen(box.state()["url"] + "/ready", timeout=5.0) as answer:
            told = json.loads(answer.read())
    except (OSError, urllib.error.URLError):
        return False
    return not told["unproven"] and not told["down"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", default="deploy/demo.toml")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", default="ready")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ss-") as home:
        os.chmod(home, 0o700)
        box = Box(args.file, home)
        starts, parts = [], []
        for _ in range(args.repeats):
            starts.append(start_of(box))
            parts.append(alone(box))
            print(starts[-1], parts[-1], flush=True)
        died = deaths(box)
    up = {key: spread([s[key] for s in starts]) for key in starts[0]}
    single = {key: spread([p[key] for p in parts]) for key in parts[0]}
    engine = max(v["median"] for v in single.values())
    total = engine + sum(up[key]["median"] for key in (BEFORE, "router", "first token"))
    result = {
        "up": up,
        "alone": single,
        "sum_of_parts_s": total,
        "up_over_sum": up["up"]["median"] / total,
        "after_kill": died,
    }
    print(json.dumps(result, indent=1))
    print(keep(args.keep, result))


if __name__ == "__main__":
    main()
