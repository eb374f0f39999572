"""The same devices used in three ways: a split deployment's file rewritten as each of its rivals. Pure.

    file     prefill 1 x tp 1, decode 1 x tp 1      cpus 0 | 1
    split    the same                               cpus 0 | 1
    replicas unified 2 x tp 1 behind the router     cpus 0 | 1
    single   unified 1 x tp 1 (a GPU: x tp 2)       cpus 0,1

The single engine gets the memory and the seats of all engines that it replaces, as it has their devices.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from splitserve.config import EngineConfig
from splitserve.errors import ConfigError
from splitserve.launch.deployment import Deployment, Group
from splitserve.launch.placement import place
from splitserve.launch.topology import Topology
from splitserve.types import Role

NAMES = ("split", "replicas", "single")


@dataclass(frozen=True)
class Arm:
    """One way to use the devices: the text of its deployment file, and what it is in a few words."""

    name: str
    text: str
    shape: str
    num_devices: int


def arms(deployment: Deployment, topology: Topology, names: Sequence[str] = NAMES) -> list[Arm]:
    """The arms called `names`. ConfigError for a file without a pair, and for tp that does not divide the devices."""
    if not deployment.split:
        raise ConfigError(
            f"{deployment.path} has no pair to compare", fix="give a file with [prefill] and [decode]"
        )
    groups = _pinned(deployment, topology)
    ranks = sum(g.replicas * g.engine.tp for g in groups)
    cpus = tuple(c for g in groups for c in g.engine.cpus)
    num_devices = ranks if groups[0].engine.device == "cuda" else len(set(cpus)) or ranks
    makers: dict[str, Callable[[], tuple[Group, ...]]] = {
        "split": lambda: groups,
        "replicas": lambda: (_replicas(groups, ranks, cpus),),
        "single": lambda: (_single(groups, ranks, cpus),),
    }
    found = []
    for name in names:
        if name not in makers:
            raise ConfigError(f"no arm {name!r}", field="arms", fix=f"some of {', '.join(NAMES)}")
        own = makers[name]()
        shape = " + ".join(f"{g.replicas} x {g.role} tp {g.engine.tp}" for g in own)
        found.append(Arm(name, _to_text(deployment, own), shape, num_devices))
    return found


def _pinned(deployment: Deployment, topology: Topology) -> tuple[Group, ...]:
    """The pair's groups with the cpus that placement gives them, unless engines must share some."""
    specs = [s for s in place(topology, deployment) if s.role != "router"]
    cpus = [c for s in specs for c in s.cpus]
    if len(set(cpus)) != len(cpus):
        return deployment.groups
    by_role = {
        g.role: tuple(c for s in specs if s.role == str(g.role) for c in s.cpus) for g in deployment.groups
    }
    return tuple(replace(g, engine=replace(g.engine, cpus=by_role[g.role])) for g in deployment.groups)


def _replicas(groups: Sequence[Group], ranks: int, cpus: tuple[int, ...]) -> Group:
    engine = groups[-1].engine
    if ranks % engine.tp:
        raise ConfigError(
            f"{ranks} devices make no whole number of unified engines of tp {engine.tp}",
            field="tp",
            fix="compare --arms split,single, or another tp",
        )
    engine = replace(engine, role="unified", cpus=cpus)
    return replace(groups[-1], role=Role.UNIFIED, replicas=ranks // engine.tp, engine=engine)


def _single(groups: Sequence[Group], ranks: int, cpus: tuple[int, ...]) -> Group:
    """On CPUs one rank with a thread for each core; on GPUs one rank a GPU."""
    engine, num = groups[-1].engine, sum(g.replicas for g in groups)
    on_gpus = engine.device == "cuda"
    threads = sum(g.replicas * g.engine.tp * g.engine.threads for g in groups)
    scale = 1 if on_gpus else num
    own = replace(
        engine,
        role="unified",
        tp=ranks if on_gpus else 1,
        threads=engine.threads if on_gpus or not engine.threads else threads,
        memory_mb=engine.memory_mb * scale,
        num_pages=engine.num_pages * scale,
        max_seqs=engine.max_seqs * num,
        cpus=cpus,
    )
    return replace(groups[-1], role=Role.UNIFIED, replicas=1, engine=own)


def _to_text(deployment: Deployment, groups: Sequence[Group]) -> str:
    router = replace(deployment.router, port=0)
    server = replace(deployment.server, port=0)
    sections: dict[str, Mapping[str, Any]] = {
        "deployment": {"name": deployment.name, "model": deployment.config.model},
        "transfer": _changed(replace(deployment.transfer, bootstrap_port=0)),
        "server": _changed(server),
        "router": _changed(router),
    }
    for group in groups:
        own = {k: v for k, v in _changed(group.engine).items() if k not in ("role", "model")}
        sections[str(group.role)] = {"replicas": group.replicas, **own}
    lines = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        # A JSON string, number, boolean or flat list is also TOML.
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _changed(config: Any) -> dict[str, Any]:
    """Fields of a config that differ from their defaults."""
    found = {}
    for f in fields(config):
        value = getattr(config, f.name)
        default = f.default if f.default is not dataclasses.MISSING else None
        if value != default:
            found[f.name] = list(value) if isinstance(value, tuple) else value
    return found


STEP_TOKENS = EngineConfig().step_tokens
