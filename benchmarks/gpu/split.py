"""Does the split pay on a box of two, four or eight GPUs? Everything about it, by one command.

    python -m benchmarks.gpu.split --box x8 [--out DIR] [--model DIR] [--stages fabric,handoff,short,long]
    python -m benchmarks.gpu.split --box x8 --tiny       the same on a CPU: a model of 6 MB, ranks over gloo

    box   file                           split        rivals
    x2    deploy/gpu-1p1d.toml           1 + 1        TP2, 2 x 1        (the 36 layers that fit one GPU)
    x4    deploy/v4-flash-h200-x4.toml   TP2 + TP2    TP4, 2 x TP2
    x8    deploy/v4-flash-h200-x8.toml   TP4 + TP4    TP8, 2 x TP4

    topology   the machine, and where every process would go
    fabric     `doctor --fabric`: each prefill rank to each decode rank, alone and all at once
    handoff    the split brought up: what each process is bound to, then lone prompts and what their handoffs took
    first      `compare` of split and replicas, 8,192 tokens in and 2 out, one at a time: what a handoff adds
    busy       the split's tokens, 256 in and 256 out, alone and while prompts of 8,192 tokens come in
    short      `compare` with 256 tokens in and 256 out
    long       `compare` with 8,192 in and 1,024 out

Each stage writes DIR/STAGE.json when it is done; the page at the end shows whatever lies there, so that the stages of a
machine lent for minutes can be run one by one (`--stages` names them, `--show` only prints). Without --model the model
is DeepSeek-V4-Flash's shapes, all 43 layers, with weights made up on the devices.

--tiny is there to run every line of this without GPUs: its figures are those of processes fighting for a few cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu import page
from benchmarks.measure import commit, machine
from splitserve.launch import stage as deployed
from splitserve.launch.stage import PROGRAM
from splitserve.net.client import Client

FILES = {
    "x2": "deploy/gpu-1p1d.toml",
    "x4": "deploy/v4-flash-h200-x4.toml",
    "x8": "deploy/v4-flash-h200-x8.toml",
}
ROOT = Path(__file__).resolve().parents[2]
CALL_S = 30.0


@dataclass(frozen=True)
class Scale:
    """How much is measured, and on what."""

    shape: tuple[str, ...]  # words of make-checkpoint
    settings: dict[str, str]  # over the deployment file, as environment variables
    short: tuple[int, int] = (256, 256)  # tokens in, tokens out
    long: tuple[int, int] = (8192, 1024)
    concurrency: str = "1,8,16,64"
    chunks: str = "2048"
    repeats: int = 3
    handoffs: tuple[int, ...] = (256, 1024, 8192)  # prompt lengths
    per_length: int = 8
    busy: int = 8  # requests at once of the stage of that name


FULL = Scale(("--layers", "43"), {})
HALF = replace(FULL, shape=("--layers", "36"), concurrency="1,8,16")
TINY = Scale(
    # Four output groups, so that four ranks can share them.
    ("--tiny", "--set", "o_groups=4"),
    {
        "SPLITSERVE_ENGINE_DEVICE": "cpu",
        "SPLITSERVE_ENGINE_MEMORY_MB": "64",
        "SPLITSERVE_ENGINE_MAX_SEQS": "8",
        "SPLITSERVE_TRANSFER_DEADLINE_S": "300",  # sixteen warm-up prompts before ranks that share two cores
    },
    short=(32, 6),
    long=(200, 6),
    concurrency="1,2",
    chunks="256",
    repeats=1,
    handoffs=(100, 300),
    per_length=2,
    busy=2,
)


class Box:
    """One run. `say` is told what goes on."""

    def __init__(self, args: argparse.Namespace, out: Path, scale: Scale, say: Callable[[str], None]) -> None:
        self.file = str(ROOT / FILES[args.box])
        self.out = out
        self.scale = scale
        self._args = args
        self._say = say
        self._env = {
            **os.environ,
            "SPLITSERVE_DEPLOYMENT_MODEL": args.model or str(self._shapes()),
            **scale.settings,
        }
        if not args.model:
            self._env["SPLITSERVE_ENGINE_DUMMY_WEIGHTS"] = "true"

    def _shapes(self) -> Path:
        """A directory with a config.json and a tokenizer, made once."""
        where = self.out / "shapes"
        if not where.exists():
            self._run("make-checkpoint", str(where), "--config-only", *self.scale.shape, env=dict(os.environ))
        return where

    def topology(self) -> dict[str, Any]:
        plan = json.loads(self._run("up", self.file, "--dry-run", "--json"))
        return {"machine": json.loads(self._run("topology", "--json")), "kernels": plan["kernels"]}

    def fabric(self) -> dict[str, Any]:
        # Exit code 1 says that something is wrong with a link, which is a finding and no failure of this script.
        found: dict[str, Any] = json.loads(self._run("doctor", "--fabric", self.file, "--json", codes=(0, 1)))
        return found

    def handoff(self) -> dict[str, Any]:
        return asyncio.run(self._handoff())

    async def _handoff(self) -> dict[str, Any]:
        os.environ.update(self._env)  # `deployed.up` starts children with ours
        async with AsyncExitStack() as closing:
            name = f"gpu-split-{os.getpid()}"
            begun = time.monotonic()
            await deployed.up(self.file, name, closing)
            ready_s = time.monotonic() - begun
            state = json.loads(self._run("status", name, "--json"))["deployments"][0]
            client = await closing.enter_async_context(Client())
            lengths = {}
            for length in self.scale.handoffs:
                words = ["--num", str(self.scale.per_length), "--concurrency", "1", "--output-len", "2"]
                self._run("bench", state["url"], *words, "--input-len", str(length), "--json")
                lengths[str(length)] = await self._records(client, state, length)
            return {"ready_s": ready_s, "processes": state["processes"], "lengths": lengths}

    async def _records(self, client: Client, state: dict[str, Any], length: int) -> list[dict[str, Any]]:
        """Both sides' records of the handoffs of prompts of this length, joined by room."""
        sides = {}
        for p in state["processes"]:
            if p["role"] != "router":
                answer = await client.request("GET", p["url"] + "/debug/handoffs", timeout_s=CALL_S)
                sides[p["role"]] = json.loads(answer.body)
        received = {r["room"]: r for r in sides["decode"]["received"] if r["num_tokens"] == length}
        return [
            {"sent": s, "received": received[s["room"]]}
            for s in sides["prefill"]["sent"]
            if s["room"] in received
        ]

    def first(self) -> dict[str, Any]:
        tokens = ("--input-len", str(self.scale.long[0]), "--output-len", "2", "--concurrency", "1")
        return self._compare(*tokens, "--arms", "split,replicas", "--num", str(2 * self.scale.per_length))

    def busy(self) -> dict[str, Any]:
        return asyncio.run(self._busy())

    async def _busy(self) -> dict[str, Any]:
        """The same load twice, the second time beside another one that is prompts and nothing else."""
        os.environ.update(self._env)
        many = self.scale.busy
        load = ["--input-len", str(self.scale.short[0]), "--output-len", str(self.scale.short[1])]
        load += ["--concurrency", str(many), "--num", str(2 * many), "--json"]
        async with AsyncExitStack() as closing:
            state = await deployed.up(self.file, f"gpu-busy-{os.getpid()}", closing)
            url = state["url"]
            self._run("bench", url, *load)  # what comes first is not measured
            idle = json.loads(self._run("bench", url, *load))
            beside = [*PROGRAM, "bench", url, "--input-len", str(self.scale.long[0]), "--output-len", "1"]
            beside += ["--concurrency", "2", "--num", "300", "--json"]
            with subprocess.Popen(
                beside, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            ) as prompts:
                await asyncio.sleep(CALL_S / 6)
                loaded = json.loads(self._run("bench", url, *load))
                lasted = prompts.poll() is None
                prompts.terminate()
            if not lasted:
                raise SystemExit("the prompts beside it ended early: nothing was measured")
            return {"concurrency": many, "idle": idle, "loaded": loaded}

    def short(self) -> dict[str, Any]:
        return self._loads(*self.scale.short)

    def long(self) -> dict[str, Any]:
        return self._loads(*self.scale.long)

    def _loads(self, num_in: int, num_out: int) -> dict[str, Any]:
        words = ["--input-len", str(num_in), "--output-len", str(num_out)]
        for name in ("concurrency", "num"):
            value = getattr(self._args, name) or getattr(self.scale, name, None)
            words += [f"--{name}", str(value)] if value else []
        return self._compare(*words)

    def _compare(self, *load: str) -> dict[str, Any]:
        words = [*load, "--json"]
        for name in ("chunks", "repeats"):
            value = getattr(self._args, name) or getattr(self.scale, name, None)
            words += [f"--{name}", str(value)] if value else []
        # Exit code 1 says that requests failed: the page counts them.
        found: dict[str, Any] = json.loads(self._run("compare", self.file, *words, codes=(0, 1)))
        return found

    def _run(self, *words: str, codes: tuple[int, ...] = (0,), env: dict[str, str] | None = None) -> str:
        """A command of splitserve; returns what it printed. SystemExit with its own words where it fails."""
        self._say(f"splitserve {' '.join(words)}")
        done = subprocess.run(
            [*PROGRAM, *words], cwd=ROOT, env=env or self._env, stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode not in codes:
            raise SystemExit(f"splitserve {words[0]} ended with {done.returncode}")
        return done.stdout


STAGES: dict[str, Callable[[Box], dict[str, Any]]] = {
    "topology": Box.topology,
    "fabric": Box.fabric,
    "handoff": Box.handoff,
    "first": Box.first,
    "busy": Box.busy,
    "short": Box.short,
    "long": Box.long,
}


def main(words: list[str] | None = None) -> int:
    args = _parser().parse_args(words)
    out = Path(args.out or tempfile.mkdtemp(prefix="splitserve-split-"))
    out.mkdir(parents=True, exist_ok=True)
    errors = Console(stderr=True)
    if not args.show:
        box = Box(
            args,
            out,
            TINY if args.tiny else HALF if args.box == "x2" else FULL,
            lambda text: errors.print(f"[dim]{text}[/]", highlight=False),
        )
        for name in args.stages.split(","):
            begun = time.monotonic()
            found = STAGES[name](box)
            facts = {"stage": name, "box": args.box, "tiny": args.tiny, "commit": commit(), "host": machine()}
            facts |= {"date": time.strftime("%Y-%m-%d"), "seconds": time.monotonic() - begun}
            (out / f"{name}.json").write_text(json.dumps({**facts, "found": found}, indent=1) + "\n")
    stages = {n: json.loads(p.read_text()) for n in STAGES if (p := out / f"{n}.json").exists()}
    console = Console(width=None if sys.stdout.isatty() else 140)
    page.show(console, stages)
    console.print(f"kept in {out}", highlight=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "python -m benchmarks.gpu.split",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--box", required=True, choices=tuple(FILES))
    p.add_argument("--tiny", action="store_true", help="a tiny model on this CPU instead")
    p.add_argument("--model", default="", metavar="DIR", help="a checkpoint; default: made-up weights")
    p.add_argument(
        "--out", default="", metavar="DIR", help="where the stages are kept; default: a fresh directory"
    )
    p.add_argument("--stages", default=",".join(STAGES), metavar="LIST", help=f"some of {','.join(STAGES)}")
    p.add_argument("--show", action="store_true", help="measure nothing, print what lies in --out")
    p.add_argument("--concurrency", default="", metavar="LIST", help="of compare (default 1,8,16,64)")
    p.add_argument("--chunks", default="", metavar="LIST", help="of compare (default 2048)")
    p.add_argument("--repeats", type=int, default=0, help="of compare (default 3)")
    p.add_argument("--num", type=int, default=0, help="of compare: requests of each load")
    return p


if __name__ == "__main__":
    sys.exit(main())
