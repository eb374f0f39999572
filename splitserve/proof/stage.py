"""What `verify` plays on: a running deployment, or one of its own; and always a unified engine of its own.

Processes are started by the same commands that a person uses, so that the proof covers them too.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from splitserve.errors import ConfigError
from splitserve.launch.deployment import load
from splitserve.launch.stage import PROGRAM, api_key, only_running, state, up

Say = Callable[[str], None]

UP_S = 300.0
STOP_S = 30.0
SAME_FIELDS = ("device", "dtype", "kv_dtype", "page_tokens", "step_tokens", "max_seqs", "speculative")
"""Of an engine's facts: equal on both sides, the same steps are computed, and answers can be equal to the bit."""


@dataclass(frozen=True)
class Door:
    """Where a process is asked, and the API key that it wants; "" for none."""

    url: str
    key: str = ""


@dataclass(frozen=True)
class Doors:
    router: Door
    prefill: Door
    decode: Door
    engine_key_file: str = ""


async def stage(file: str, say: Say, closing: AsyncExitStack) -> Doors:
    """The deployment of `file`, or the only one running. One that is not running is brought up, and down at the end."""
    name = (
        load(file).name
        if file
        else only_running("name a deployment file: splitserve verify deploy/demo.toml")
    )
    found = state(name)
    if found is None:
        say(f"{name} is not running: bringing up one for the proof")
        found = await up(file, f"verify-{os.getpid()}", closing, sets=("engine.allow_faults=true",))
    return _doors(found)


async def unified_engine(
    facts: Mapping[str, Any], say: Say, closing: AsyncExitStack, *, tp: int = 1, key_file: str = ""
) -> str:
    """Start one engine of `tp` ranks that computes everything itself, with the settings of `facts`; its address.

    It asks for the keys of `key_file`, as those do that it is compared with.
    """
    say("starting a unified engine to compare with")
    gpus, env = _gpus(facts, tp)
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        *_words(facts, tp, key_file),
        *gpus,
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    closing.push_async_callback(_stop, process)
    assert process.stdout is not None
    assert process.stderr is not None
    tail = asyncio.ensure_future(_tail(process.stderr))
    try:
        async with asyncio.timeout(UP_S):
            async for line in process.stdout:
                message = json.loads(line)
                if message.get("ready"):
                    _keep_reading(process.stdout, closing)
                    return str(message["url"])
    except TimeoutError:
        raise ConfigError(f"the unified engine was not ready within {UP_S:g} s") from None
    words = " | ".join((await tail)[-3:])
    raise ConfigError(f"the unified engine ended before it was ready: {words}")


def _words(facts: Mapping[str, Any], tp: int, key_file: str) -> list[str]:
    """What tells `serve` to be that engine; also where defaults would do, since the environment may name others."""
    words = ["serve", str(facts["model_path"]), "--role", "unified", "--tp", str(tp)]
    words += ["--host", "127.0.0.1", "--port", "0", f"--api-key-file={key_file}"]
    for field in SAME_FIELDS:
        words += [f"--{field.replace('_', '-')}", str(facts[field])]
    words += ["--num-pages", str(facts["num_pages"]), "--threads", str(facts["threads"])]
    return [*words, "--cpus", ",".join(str(c) for c in facts["cpus"])]


def _gpus(facts: Mapping[str, Any], tp: int) -> tuple[list[str], dict[str, str]]:
    """(flags, environment) that put `tp` ranks where those of `facts` are, if there are as many of them."""
    visible, gpus = str(facts.get("visible_gpus", "")), list(facts.get("gpus", ()))
    env = dict(os.environ)
    if visible and tp <= max(len(gpus), len(visible.split(","))):
        env |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible}
    return (["--gpus", ",".join(map(str, gpus[:tp]))] if tp <= len(gpus) else []), env


def _doors(found: Mapping[str, Any]) -> Doors:
    by_role = {p["role"]: p["url"] for p in reversed(found["processes"])}
    missing = {"router", "prefill", "decode"} - set(by_role)
    if missing:
        raise ConfigError(
            f"{found['name']} has no {' and no '.join(sorted(missing))}: there is no handoff to prove",
            fix="verify a deployment with [prefill] and [decode]",
        )
    router, prefill, decode = (Door(by_role[r], api_key(found, r)) for r in ("router", "prefill", "decode"))
    return Doors(router, prefill, decode, found.get("engine_key_file", ""))


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()


async def _tail(stream: asyncio.StreamReader, most: int = 20) -> list[str]:
    """The last lines of a stream, once it has ended; reading on keeps the process from blocking."""
    lines: list[str] = []
    async for line in stream:
        lines = [*lines[-most + 1 :], line.decode("utf-8", "replace").rstrip()]
    return lines


def _keep_reading(stream: asyncio.StreamReader, closing: AsyncExitStack) -> None:
    task = asyncio.ensure_future(_tail(stream))
    closing.callback(task.cancel)
