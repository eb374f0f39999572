"""A placed engine or router as a process to start: its words, environment, bindings and ports. Pure.

What an engine gets is placement's business; here it becomes a command line (engines/) and a ProcSpec. Ports are wishes
and marks, which ports.py fills.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from splitserve.config import EngineConfig
from splitserve.launch import engines as engines_of
from splitserve.launch.commands import port_mark, to_flags, url
from splitserve.launch.deployment import Deployment, Group
from splitserve.launch.engines.seat import Seat
from splitserve.launch.topology import Core, Topology
from splitserve.numa import expected_policy
from splitserve.types import Role

ROUTER = "router"


@dataclass(frozen=True)
class PortWish:
    """A port that a process will listen on; 0 asks for any free one."""

    key: str
    host: str
    port: int


@dataclass(frozen=True)
class ProcSpec:
    """One process to start. `cpus` compute (its ranks'); `front_cpus` are where the process itself may run."""

    name: str
    role: str
    stage: int  # 0 starts first; the next stage when all of it is ready
    argv: tuple[str, ...]  # after `python -m splitserve`
    env: dict[str, str]
    cpus: tuple[int, ...]
    front_cpus: tuple[int, ...]
    memory_node: int | None
    memory: str  # the policy that its ranks should show (numa.read_binding)
    gpus: tuple[int, ...]
    tp: int  # ranks; 0: none
    ports: tuple[PortWish, ...]
    why: tuple[str, ...]
    host: str = ""  # where, if not on this host: the name that its cluster gives it

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Placed:
    """One engine before and while it is placed."""

    name: str
    role: Role
    config: EngineConfig
    index: int  # among all engines, in starting order
    group: Group
    cores: tuple[Core, ...] = ()
    cpus: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    why: tuple[str, ...] = ()


def _bind_memory(engine: Placed, topology: Topology) -> tuple[int | None, str, str]:
    """(node, policy of numa.py, why) of an engine that has its cores."""
    nodes = {c.node for c in engine.cores}
    node = engine.config.node if engine.config.node >= 0 else nodes.pop() if len(nodes) == 1 else None
    policy = engine.config.memory_bind
    if policy == "auto":
        policy = "bind" if node is not None and len(topology.nodes) > 1 else "none"
    if node is None:
        return (
            None,
            policy if policy == "interleave" else "none",
            "cores on several memory nodes: memory is not bound",
        )
    if policy in ("auto", "none"):
        return node, "none", f"memory of node {node}: first touched there"
    return node, policy, f"memory of node {node}: {policy}, set before anything is allocated"


def _bound_nodes(policy: str, node: int | None, topology: Topology) -> tuple[int, ...]:
    if policy == "interleave":
        return tuple(n.node for n in topology.nodes)
    return () if node is None else (node,)


def engine_spec(
    engine: Placed, deployment: Deployment, front: tuple[int, ...], topology: Topology
) -> ProcSpec:
    node, policy, memory = _bind_memory(engine, topology)
    nodes = _bound_nodes(policy, node, topology)
    seat = Seat(
        name=engine.name,
        role=engine.role,
        config=engine.config,
        transfer=deployment.transfer,
        server=deployment.server,
        program=engine.group.program,
        given=engine.group.given,
        ready_timeout_s=deployment.config.ready_timeout_s,
        num_prefills=sum(g.replicas for g in deployment.groups if g.role is Role.PREFILL),
        cpus=engine.cpus,
        gpus=engine.gpus,
        node=node,
        memory=policy,
        nodes=nodes,
    )
    words, env = engines_of.command(seat)
    return ProcSpec(
        name=engine.name,
        role=str(engine.role),
        stage=0,
        argv=words,
        env=env,
        cpus=engine.cpus,
        front_cpus=front,
        memory_node=node,
        memory=expected_policy(policy, nodes),
        gpus=engine.gpus,
        tp=engine.config.tp,
        ports=_ports(engine, deployment),
        why=(*engine.why, memory),
    )


def _ports(engine: Placed, deployment: Deployment) -> tuple[PortWish, ...]:
    """What it listens on; numbers named in the deployment count up from engine to engine."""
    host = deployment.server.host
    named = {"http": deployment.server.port, "bootstrap": deployment.transfer.bootstrap_port}
    keys = ("http", *engines_of.ports(engine.group.program, engine.role))
    return tuple(PortWish(k, host, named[k] + engine.index if named.get(k) else 0) for k in keys)


def router_spec(
    engines: list[Placed],
    deployment: Deployment,
    front: tuple[int, ...],
    *,
    own: bool,
    addresses: Mapping[str, str],
) -> ProcSpec:
    router = deployment.router
    router = replace(router, drain_s=deployment.config.drain_s)  # the supervisor waits as long for it
    words = [ROUTER, *to_flags(router, skip=("port",)), "--port", port_mark(ROUTER, "http")]
    for e in engines:
        at = url(addresses.get(e.name, deployment.server.host), port_mark(e.name, "http"))
        match e.role:
            case Role.PREFILL if "bootstrap" in engines_of.ports(e.group.program, e.role):
                words += ["--prefill", f"{at},{port_mark(e.name, 'bootstrap')}"]
            case Role.PREFILL:
                words += ["--prefill", at]
            case Role.DECODE:
                words += ["--decode", at]
            case Role.UNIFIED:
                words += ["--worker", at]
    floating = (
        f"cpus {commas(front)}: no engine computes there"
        if own
        else f"floats over cpus {commas(front)}: every core computes, and one set aside would cost more than routing"
    )
    return ProcSpec(
        name=ROUTER,
        role=ROUTER,
        stage=1,
        argv=tuple(words),
        env={},
        cpus=(),
        front_cpus=front,
        memory_node=None,
        memory="default",
        gpus=(),
        tp=0,
        ports=(PortWish("http", router.host, router.port),),
        why=(
            floating,
            "starts when every engine is ready, since it is ready only after a token through each pair",
        ),
    )


def commas(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))
