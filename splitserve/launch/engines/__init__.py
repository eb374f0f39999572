"""What each engine of a deployment is started as: ours, or another's server by its adapter; and what may not be set.

    deployment file ─▶ Program ──┐
    placement ─▶ cpus, GPUs ─────┴▶ Seat ─▶ adapter ─▶ argv, environment ─▶ `splitserve attend ... -- argv`

Others' servers know neither our readiness lines nor our alive pipe: `splitserve attend` (launch/attend.py) does.
How our router speaks with them is in router/dialects. Which versions are installed is asked in installed.py.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

from splitserve.config import ServerConfig, TransferConfig
from splitserve.errors import ConfigError
from splitserve.launch.commands import url
from splitserve.launch.engines import ours
from splitserve.launch.engines.seat import HEALTH, Adapter, Program, Seat
from splitserve.launch.engines.sglang import Sglang
from splitserve.launch.engines.vllm import Vllm
from splitserve.numa import short_list
from splitserve.types import Role

ADAPTERS: dict[str, Adapter] = {adapter.name: adapter for adapter in (Sglang(), Vllm())}

_PLACED = frozenset(("model", "role", "replicas", "tp", "device", "cpus", "gpus", "node", "memory_bind"))
_PROGRAM = frozenset(("engine", "python", "args", "env"))
"""Settings that hold for every engine: placement and the supervisor follow them."""

_TRANSFER = frozenset(("transport", "backend", "ucx", "bootstrap_host", "bootstrap_port"))
_SERVER = frozenset(("host", "port", "log_level", "api_key_file"))


def check(program: Program, role: Role, given: Collection[str], source: str) -> None:
    """ConfigError where a role sets what its engine cannot follow; silence would be a wrong measurement."""
    if not program.foreign:
        for setting in ("python", "args", "env"):
            if getattr(program, setting):
                raise ConfigError(
                    f"{source}: [{role}] {setting} is for SGLang and vLLM, but the engine is {program.name}",
                    field=setting,
                    fix=f'remove {setting}, or set engine = "sglang" or "vllm"',
                )
        return
    extra = set(given) - ADAPTERS[program.name].settings - _PLACED - _PROGRAM
    _refuse(f"{source}: [{role}]", extra, program)
    _check_env(program, role, source)


def check_sections(
    program: Program, transfer: TransferConfig, server: ServerConfig, given: Collection[str], source: str
) -> None:
    """The same for [transfer] and [server], whose `given` names are "transfer.silence_s" and the like."""
    if not program.foreign:
        return
    for section, known in (("transfer", _TRANSFER), ("server", _SERVER)):
        names = {name.partition(".")[2] for name in given if name.startswith(f"{section}.")}
        _refuse(f"{source}: [{section}]", names - known, program)
    if transfer.transport != "nixl":
        raise ConfigError(
            f"{source}: [transfer] transport is {transfer.transport!r}, and {program.name} has only NIXL with us",
            field="transport",
            fix='transport = "nixl"',
        )
    if server.api_key_file:
        raise ConfigError(
            f"{source}: [server] api_key_file: {program.name} would show the key on its command line",
            field="api_key_file",
            fix="leave its engines on loopback and set [router] api_key_file",
        )
    for text in transfer.ucx:
        if "=" not in text:
            raise ConfigError(
                f"{source}: [transfer] ucx has {text!r}",
                field="ucx",
                fix='for example ucx = ["TLS=tcp,self"]',
            )


def _refuse(where: str, settings: Collection[str], program: Program) -> None:
    for setting in sorted(settings):
        raise ConfigError(
            f"{where} {setting} is a setting of our own engine, and {program.name} has none like it",
            field=setting,
            fix=f"remove {setting}; flags of {program.name} itself go into args",
        )


def _check_env(program: Program, role: Role, source: str) -> None:
    for pair in program.env:
        name, eq, _ = pair.partition("=")
        if not eq or not name.isidentifier():
            raise ConfigError(
                f"{source}: [{role}] env has {pair!r}",
                field="env",
                fix='each entry is "NAME=VALUE", for example env = ["HF_HUB_OFFLINE=1"]',
            )


def check_pair(programs: dict[Role, Program], source: str) -> None:
    """ConfigError where the halves of a pair are different engines: their transfers do not understand each other."""
    names = {str(role): program.name for role, program in programs.items()}
    if len(set(names.values())) > 1:
        raise ConfigError(
            f"{source}: the engines of a pair differ: "
            + ", ".join(f"[{role}] is {name}" for role, name in names.items()),
            field="engine",
            fix="set engine once, in [deployment]: SGLang, vLLM and our engine send state in ways of their own",
        )


def ports(program: Program, role: Role) -> tuple[str, ...]:
    """Keys of the ports that such an engine listens on beyond "http"."""
    return ADAPTERS[program.name].ports(role) if program.foreign else ours.ports(role)


def command(seat: Seat) -> tuple[tuple[str, ...], dict[str, str]]:
    """(words after `splitserve`, environment) of the process that serves or attends this engine; ports are marks."""
    if not seat.program.foreign:
        return ours.words(seat), ours.env(seat)
    adapter = ADAPTERS[seat.program.name]
    words = ["attend", "--engine", adapter.name, "--url", url(seat.server.host, seat.port("http"))]
    words += ["--health", HEALTH]
    if seat.cpus:
        words += ["--cpus", short_list(seat.cpus)]
    if seat.memory not in ("auto", "none") and seat.nodes:
        words += ["--memory-bind", seat.memory, "--nodes", short_list(seat.nodes)]
    words += ["--", seat.program.python or sys.executable, *adapter.argv(seat)]
    return tuple(words), adapter.env(seat)
