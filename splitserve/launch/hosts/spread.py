"""Which engine goes to which host, and what runs there: a pure function from the hosts' topologies and a deployment.

    hosts         A (8 GPUs)               B (8 GPUs)
    2 x TP4 each  prefill-0 decode-0       prefill-1 decode-1     a pair that fits on one host stays on it
    1 x TP8 each  prefill-0                decode-0               else state crosses the network

An engine never spans hosts. Within a host, placement.py decides as it does for one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from splitserve.config import EngineConfig
from splitserve.errors import ConfigError
from splitserve.launch.commands import reach
from splitserve.launch.deployment import Deployment
from splitserve.launch.placement import Share, engine_names, place
from splitserve.launch.procs import ProcSpec
from splitserve.launch.topology import Topology
from splitserve.types import Role

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Host:
    """One host of a cluster. `address` is where the others reach it; the first of several is where `up` runs."""

    name: str
    address: str
    topology: Topology

    def room(self, device: str) -> int:
        """Ranks that it has GPUs or cores for."""
        return len(self.topology.gpus) if device == "cuda" else len(self.topology.cores)


def spread(hosts: Sequence[Host], deployment: Deployment) -> dict[str, str]:
    """Engine -> name of its host. ConfigError, with the sum, where an engine fits on none.

    Pairs come one after another: both halves to the first host that has room for both, else each to the host with
    the most room left.
    """
    engines = {name: (role, config) for name, role, config in engine_names(deployment)}
    left = {(h.name, device): h.room(device) for h in hosts for device in ("cpu", "cuda")}
    found: dict[str, str] = {}
    for group in _pairs(engines):
        ranks: dict[str, int] = {}
        for name in group:
            config = engines[name][1]
            ranks[config.device] = ranks.get(config.device, 0) + config.tp
        whole = next((h for h in hosts if all(left[h.name, d] >= n for d, n in ranks.items())), None)
        for name in group:
            config = engines[name][1]
            host = whole or max(hosts, key=lambda h: left[h.name, config.device])
            if left[host.name, config.device] < config.tp:
                raise _no_room(name, config, hosts, left)
            left[host.name, config.device] -= config.tp
            found[name] = host.name
    return {name: found[name] for name in engines}


def place_all(
    hosts: Sequence[Host], deployment: Deployment, where: Mapping[str, str] | None = None
) -> list[ProcSpec]:
    """All processes, engines first; the router runs on the first host, as `up` does. `where` as `spread` says."""
    where = where or spread(hosts, deployment)
    by_name = {h.name: h for h in hosts}
    addresses = {engine: by_name[host].address for engine, host in where.items()}
    specs: list[ProcSpec] = []
    routers: list[ProcSpec] = []
    for at, host in enumerate(hosts):
        own = frozenset(engine for engine, name in where.items() if name == host.name)
        share = Share(own, addresses, router=at == 0)
        for spec in place(host.topology, _on(host, hosts, deployment), share=share):
            if spec.role == "router":
                routers.append(spec)
            else:
                why = (f"on host {host.name[:12]} ({host.address})", *spec.why)
                specs.append(replace(spec, host=host.name, why=why))
    order = list(where)
    return [*sorted(specs, key=lambda s: order.index(s.name)), *routers]


def rehouse(
    hosts: Sequence[Host], alive: Sequence[Host], deployment: Deployment, specs: Sequence[ProcSpec], name: str
) -> tuple[ProcSpec, ProcSpec]:
    """(engine `name` on the host of `alive` with most room, the router that knows it there); the rest stay as placed.

    `hosts` are all there were, the router's first. ConfigError, with the sum, where it fits on none.
    """
    config = next(c for n, _, c in engine_names(deployment) if n == name)
    others = [s for s in specs if s.host and s.name != name]
    left = {
        (h.name, config.device): h.room(config.device) - _num_ranks(others, h, config.device) for h in alive
    }
    best = max(alive, key=lambda h: left[h.name, config.device], default=None)
    if best is None or left[best.name, config.device] < config.tp:
        raise _no_room(name, config, alive, left)
    addresses = {s.name: next(h.address for h in hosts if h.name == s.host) for s in others}
    addresses = {n: addresses.get(n, best.address) for n, _, _ in engine_names(deployment)}
    rest = replace(best, topology=_unused(best, [s for s in others if s.host == best.name], config))
    own = Share(frozenset((name,)), addresses, router=False)
    (spec,) = place(rest.topology, _on(best, hosts, deployment), share=own)
    first = frozenset(s.name for s in others if s.host == hosts[0].name)
    told = place(
        hosts[0].topology, _on(hosts[0], hosts, deployment), share=Share(first, addresses, router=True)
    )
    why = (f"on host {best.name[:12]} ({best.address}), whose other engines stay as they are", *spec.why)
    return replace(spec, host=best.name, why=why), told[-1]


def _num_ranks(specs: Sequence[ProcSpec], host: Host, device: str) -> int:
    on_gpus = device == "cuda"
    return sum(s.tp for s in specs if s.host == host.name and bool(s.gpus) is on_gpus)


def _unused(host: Host, specs: Sequence[ProcSpec], config: EngineConfig) -> Topology:
    """What the engines there leave of it; all of its cores where they took more than one a rank."""
    gpus = {index for s in specs for index in s.gpus}
    cpus = {cpu for s in specs for cpu in s.cpus}
    free = tuple(core for core in host.topology.cores if not cpus & set(core.cpus))
    cores = free if len(free) >= config.tp else host.topology.cores
    return replace(
        host.topology, cores=cores, gpus=tuple(g for g in host.topology.gpus if g.index not in gpus)
    )


def _on(host: Host, hosts: Sequence[Host], deployment: Deployment) -> Deployment:
    """The deployment as an engine on this host sees it: others reach it at the host's address, not by loopback."""
    transfer, server = deployment.transfer, deployment.server
    if reach(server.host) in _LOOPBACK:
        server = replace(server, host=host.address)
    bind = host.address if reach(transfer.bootstrap_host) in _LOOPBACK else transfer.bootstrap_host
    allowed = dict.fromkeys((*transfer.allow_hosts, *(h.address for h in hosts)))
    transfer = replace(transfer, bootstrap_host=bind, allow_hosts=tuple(allowed))
    return replace(deployment, server=server, transfer=transfer)


def _pairs(engines: Mapping[str, tuple[Role, EngineConfig]]) -> list[list[str]]:
    """Names of each prefill engine with a decode engine, in order; the rest alone."""
    roles: dict[Role, list[str]] = {}
    for name, (role, _) in engines.items():
        roles.setdefault(role, []).append(name)
    rows = zip_longest(*roles.values())
    return [[name for name in row if name is not None] for row in rows]


def _no_room(
    name: str, config: EngineConfig, hosts: Sequence[Host], left: Mapping[tuple[str, str], int]
) -> ConfigError:
    what = "GPUs" if config.device == "cuda" else "cores"
    have = ", ".join(f"{h.name} {left[h.name, config.device]} of {h.room(config.device)}" for h in hosts)
    return ConfigError(
        f"{name} wants {config.tp} {what} of one host; free: {have or 'no hosts'}",
        field="tp",
        fix="lower tp or replicas, or add hosts: an engine does not span them",
    )
