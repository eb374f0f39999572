"""Our unified engine and our split pair against other servers of the same model on the same cores, in one run.

    python -m benchmarks.serve.peers [--concurrency 1,4,8] [--num 6,16,24] [--repeats 3] [--peer NAME=COMMAND ...]

Every arm is started alone, asked for one token (that is its start time), warmed up, loaded by the client of
`splitserve bench` with fresh random prompts, and stopped; the order of the arms is drawn anew for each repeat. A
peer's COMMAND is split like a shell's words and may hold {model} (a safetensors directory, see as_safetensors.py),
{port}, {port1}, {port2} ... (free ports) and {cores}. It must serve the OpenAI completions API on {port}.

For example vLLM's CPU build, in a venv of its own:

    --peer 'vllm=env VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND={cores} /venv/bin/vllm serve {model} \\
        --dtype float32 --max-model-len 2048 --port {port}'

This compares what a user gets, HTTP included. Figures of different machines or runs are not comparable.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.measure import keep, spread
from splitserve.bench.main import measure
from splitserve.bench.metrics import Summary
from splitserve.bench.plan import Plan, numbers
from splitserve.errors import SplitserveError
from splitserve.launch import stage
from splitserve.net.client import Client

START_S = 600.0
STOP_S = 20.0
PAUSE_S = 0.1

Figures = dict[str, list[float]]


@dataclass(frozen=True)
class Arm:
    """One way to serve. `start` brings it up and says where; the stack takes it down."""

    name: str
    start: Callable[[AsyncExitStack], Any]


def our_unified(args: argparse.Namespace) -> Arm:
    words = f"{sys.executable} -m splitserve serve smollm2-135m --role unified --dtype {args.dtype} --port {{port}}"
    return command("splitserve", f"{words} --max-seqs 32 --memory-mb 600", args)


def our_pair(args: argparse.Namespace) -> Arm:
    async def start(closing: AsyncExitStack) -> str:
        sets = (f"engine.dtype={args.dtype}",)
        state = await stage.up(args.deployment, f"peers-{os.getpid()}", closing, sets=sets)
        return str(state["url"])

    return Arm("splitserve pair", start)


def command(name: str, words: str, args: argparse.Namespace) -> Arm:
    """An arm that is one command in a process group of its own."""

    async def start(closing: AsyncExitStack) -> str:
        ports = {f"port{i}" if i else "port": free_port() for i in range(8)}
        cores = ",".join(str(c) for c in sorted(os.sched_getaffinity(0)))
        argv = [w.format(model=args.model, cores=cores, **ports) for w in shlex.split(words)]
        log = Path(f"{args.logs}/{name.replace(' ', '-')}.log").open("ab")  # noqa: SIM115 - handed to the child
        child = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
        closing.callback(stop, child)
        return f"http://127.0.0.1:{ports['port']}"

    return Arm(name, start)


def free_port() -> int:
    """A port that is free now; peers cannot be handed a socket."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


def stop(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the whole group, SIGKILL to what is left of it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(STOP_S)
    time.sleep(1.0)


async def first_token(url: str) -> None:
    """Return once a token has come; raises TimeoutError after START_S."""
    async with asyncio.timeout(START_S), Client() as client:
        while True:
            with suppress(SplitserveError):
                models = await client.request("GET", f"{url}/v1/models", timeout_s=5.0)
                name = msgspec.json.decode(models.body)["data"][0]["id"] if models.status == 200 else ""
                if name and await one_token(client, url, name):
                    return
            await asyncio.sleep(PAUSE_S)


async def one_token(client: Client, url: str, model: str) -> bool:
    body = msgspec.json.encode({"model": model, "prompt": [100, 200, 300], "max_tokens": 1})
    headers = (("content-type", "application/json"),)
    answer = await client.request("POST", f"{url}/v1/completions", body=body, headers=headers, timeout_s=60.0)
    return answer.status == 200


async def run_arm(arm: Arm, plan: Plan, console: Console) -> tuple[float, list[Summary]]:
    """(Seconds from start to the first token, a summary for each concurrency)."""
    async with AsyncExitStack() as closing:
        begun = time.perf_counter()
        url = await arm.start(closing)
        await first_token(url)
        started = time.perf_counter() - begun
        summaries, _ = await measure(replace(plan, url=url), console)
    return started, summaries


def figures(summary: Summary) -> dict[str, float]:
    return {
        "output_tok_s": summary.output_rate,
        "ttft_ms": summary.ttft_s.median * 1000,
        "tpot_ms": summary.tpot_s.median * 1000,
        "failed": float(summary.num_failed),
    }


def main() -> int:
    args = parser().parse_args()
    console = Console()
    arms = [our_unified(args), our_pair(args)]
    arms += [command(*p.split("=", 1), args) for p in args.peer]
    found: dict[str, Any] = {a.name: {"start_s": [], **{str(c): {} for c in args.concurrency}} for a in arms}
    for repeat in range(args.repeats):
        for arm in random.sample(arms, len(arms)):
            console.print(f"repeat {repeat + 1} of {args.repeats}: {arm.name}")
            started, summaries = asyncio.run(run_arm(arm, plan_of(args), console))
            found[arm.name]["start_s"].append(started)
            for summary in summaries:
                for key, value in figures(summary).items():
                    found[arm.name][str(summary.concurrency)].setdefault(key, []).append(value)
    result = {name: spreads(values) for name, values in found.items()}
    console.print(table(result, args.concurrency))
    if args.keep:
        console.print(f"kept in {keep(args.keep, result)}")
    return 0


def spreads(values: dict[str, Any]) -> dict[str, Any]:
    return {k: spreads(v) if isinstance(v, dict) else spread(v) for k, v in values.items()}


def plan_of(args: argparse.Namespace) -> Plan:
    return Plan(
        url="",
        concurrency=args.concurrency,
        num=args.num,
        input_len=args.input_len,
        output_len=args.output_len,
        vocab=args.vocab,
    )


def table(result: dict[str, Any], concurrency: Sequence[int]) -> Table:
    """Medians; tok/s, TTFT and TPOT in milliseconds of each arm at each concurrency."""
    found = Table(title="output tok/s, TTFT ms, TPOT ms (medians)", title_justify="left")
    for name in ("", "start s", *(f"c={c}" for c in concurrency)):
        found.add_column(name, justify="right" if name else "left", no_wrap=True)
    for arm, values in result.items():
        cells = [
            ", ".join(f"{values[str(c)][k]['median']:.4g}" for k in ("output_tok_s", "ttft_ms", "tpot_ms"))
            for c in concurrency
        ]
        found.add_row(arm, f"{values['start_s']['median']:.1f}", *cells)
    return found


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--model", default="", help="safetensors directory for peers (benchmarks.serve.as_safetensors)"
    )
    p.add_argument("--deployment", default="deploy/demo.toml")
    p.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    p.add_argument("--concurrency", type=numbers, default=(1, 4, 8))
    p.add_argument("--num", type=numbers, default=(6, 16, 24))
    p.add_argument("--input-len", type=int, default=256)
    p.add_argument("--output-len", type=int, default=64)
    p.add_argument("--vocab", type=int, default=49152)
    p.add_argument("--dtype", default="f32")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--logs", default="/tmp", help="where the arms' output goes")
    p.add_argument(
        "--keep", default="peers_cpu", metavar="NAME", help="file under benchmarks/results; empty: none"
    )
    return p


if __name__ == "__main__":
    sys.exit(main())
