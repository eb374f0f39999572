"""A deployment for the length of a measurement or a proof: brought up and taken down by the commands a person uses.

Processes are started as `splitserve up` and ended as `splitserve down`, so that what is shown covers those too.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from splitserve.errors import ConfigError
from splitserve.launch import rundir
from splitserve.net.keys import first_key

PROGRAM = (sys.executable, "-m", "splitserve")


def only_running(fix: str) -> str:
    """The name of the one deployment that is up. ConfigError, with `fix`, where there are none or several."""
    running = [n for n in rundir.names() if rundir.RunDir(n).running()]
    if len(running) == 1:
        return running[0]
    raise ConfigError(f"{len(running)} deployments are running: {', '.join(running) or 'none'}", fix=fix)


def running_url(otherwise: str) -> str:
    """Where the one deployment that is up answers; `otherwise` where there are none or several."""
    running = [found for n in rundir.names() if (found := state(n))]
    return str(running[0]["url"]) if len(running) == 1 else otherwise


def state(name: str) -> dict[str, Any] | None:
    """What a running deployment's supervisor wrote of it: processes with role and url; None when it is not up."""
    where = rundir.RunDir(name)
    return where.read_state() if where.running() else None


def api_key(found: Mapping[str, Any], role: str) -> str:
    """The key that processes of `role` ask for in the deployment of this state; "" where they ask for none.

    ConfigError where the key file cannot be read.
    """
    return first_key(found.get("api_key_file" if role == "router" else "engine_key_file", ""))


def running_key(url: str) -> str:
    """The key that whoever answers at `url` asks for, where that is a process of a deployment that is up; or "".

    ConfigError where its key file cannot be read, or `url` is none.
    """
    from splitserve.net.upstream import split_url

    def place(url: str) -> tuple[str, int]:
        origin, _ = split_url(url)
        return origin.host.replace("localhost", "127.0.0.1"), origin.port

    for found in filter(None, map(state, rundir.names())):
        for process in found["processes"]:
            if process["url"] and place(process["url"]) == place(url):
                return api_key(found, process["role"])
    return ""


async def up(file: str, name: str, closing: AsyncExitStack, *, sets: Sequence[str] = ()) -> dict[str, Any]:
    """Bring `file` up as `name`, on any free port; `closing` takes it down. Returns its state.

    Raises ConfigError with the last words of `up` where it does not come up.
    """
    closing.push_async_callback(_run, (*PROGRAM, "down", name))
    words = [w for s in (f"deployment.name={name}", "router.port=0", *sets) for w in ("--set", s)]
    code, out = await _run((*PROGRAM, "up", file, "--detach", *words))
    if code:
        raise ConfigError(f"{file} did not come up: {out.strip()[-600:]}")
    found = state(name)
    if found is None:
        raise ConfigError(f"{name} came up and is gone again", fix=f"splitserve logs {name}")
    return found


async def _run(argv: Sequence[str]) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode("utf-8", "replace")
