"""Whether what a deployment asks for is there: memory of host and GPUs, and cores that a cgroup pays for. Pure.

    weights of every engine + state of every rank   against   what is free, where a cgroup's memory.max counts too

Only what is certain is added up: weights as large as their files, and the least state where the file names no size.
Thus a refusal is never wrong, while what passes here may still be too much once activations come to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from splitserve.errors import CapacityError, ConfigError
from splitserve.launch.deployment import Deployment
from splitserve.launch.drawing import gib
from splitserve.launch.procs import ProcSpec
from splitserve.launch.topology import Topology


@dataclass(frozen=True)
class Footprint:
    """At least so many bytes: weights of one whole engine, state of one of its ranks."""

    weights: int
    state: int

    def of_engine(self, tp: int) -> int:
        return self.weights + tp * self.state

    def of_rank(self, tp: int) -> int:
        return self.weights // tp + self.state

    def told(self, tp: int) -> str:
        ranks = f"{tp} x " if tp > 1 else ""
        return f"{gib(self.weights)} weights + {ranks}{gib(self.state)} state"


def check_memory(topology: Topology, specs: Sequence[ProcSpec], footprints: Mapping[str, Footprint]) -> None:
    """CapacityError with the sum where engines (footprints by role) need more than there is, together."""
    engines = [s for s in specs if s.role in footprints]
    _check_host(topology, [s for s in engines if not s.gpus], footprints)
    for gpu in topology.gpus:
        users = [s for s in engines if gpu.index in s.gpus]
        parts = [(s.name, footprints[s.role].of_rank(s.tp), s.gpus.count(gpu.index)) for s in users]
        needed = sum(nbytes * count for _, nbytes, count in parts)
        if needed > gpu.memory:
            told = "; ".join(
                f"a rank of {name} {gib(n)}{f' x {count}' if count > 1 else ''}" for name, n, count in parts
            )
            raise CapacityError(
                f"gpu {gpu.index} has {gib(gpu.memory)}, and at least {gib(needed)} are needed: {told}",
                field="tp",
                fix="raise tp, so that each GPU holds less of the weights; or lower memory_mb; or name other gpus",
            )


def _check_host(topology: Topology, engines: Sequence[ProcSpec], footprints: Mapping[str, Footprint]) -> None:
    needed = sum(footprints[s.role].of_engine(s.tp) for s in engines)
    if needed <= topology.memory_free:
        return
    told = "; ".join(f"{s.name} {footprints[s.role].told(s.tp)}" for s in engines)
    raise CapacityError(
        f"at least {gib(needed)} of memory are needed together: {told}; {gib(topology.memory_free)} are free of "
        f"{gib(topology.memory_total)} (a cgroup's memory.max counts)",
        field="memory_mb",
        fix="lower memory_mb or replicas, free memory, or raise memory.max (docker: --memory)",
    )


def check_quota(topology: Topology, deployment: Deployment) -> None:
    """ConfigError where cpus or threads are named that the cgroup's cpu.max does not pay for: all would be stopped."""
    if not topology.cpu_quota:
        return
    paid = math.ceil(topology.cpu_quota)
    asked = {
        "cpus": sum(len(g.engine.cpus) for g in deployment.groups),
        "threads": sum(g.replicas * g.engine.tp * g.engine.threads for g in deployment.groups),
    }
    for setting, count in asked.items():
        if count > paid:
            raise ConfigError(
                f"{count} {setting} are asked for, and the cgroup's cpu.max pays for {topology.cpu_quota:g}",
                field=setting,
                fix=f"raise it (docker: --cpus={count}), or leave {setting} out: placement counts what is paid for",
            )
