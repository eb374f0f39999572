"""Which process runs where, and why: a pure function from machine and deployment to process specs.

    cores of the cpuset, by node           8 cores, one prefill and one decode engine
      0 1 2 3 4 5 6 7                      0 1 2 │ 3 4 5 │ 6 7
                                           prefill-0  decode-0  router and HTTP fronts

Compute gets cores of its own: an engine step waits for its slowest thread, so a core that two engines share costs both.
One hyperthread of a core computes; its siblings are left to the router and the HTTP fronts, which sleep unless bytes
move. It opens no file and no socket; the ports it wants are marks that ports.py fills.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from splitserve.config import EngineConfig
from splitserve.errors import ConfigError
from splitserve.launch import engines as engines_of
from splitserve.launch.commands import port_mark, to_flags, url
from splitserve.launch.deployment import Deployment, Group
from splitserve.launch.engines.seat import Seat
from splitserve.launch.measured import Measured
from splitserve.launch.nvml import Gpu
from splitserve.launch.pairing import RankSeat, order_seats, seats_of
from splitserve.launch.topology import Core, Topology
from splitserve.numa import expected_policy
from splitserve.types import Role

_ROUTER = "router"
_SPARE_FROM = 6
"""From this many cores on, one is set aside for the router and the fronts; below, it would cost too much compute."""


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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Engine:
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


def place(topology: Topology, deployment: Deployment, links: Measured | None = None) -> list[ProcSpec]:
    """Processes in starting order: engines, then the router. Deterministic; reads nothing but its arguments.

    `links` is what the fabric doctor measured here: it decides which seat each decode rank takes (pairing.py), and
    prefill engines are told what to expect of their links. No cpu computes for two engines while there are as many
    cores as ranks; with fewer they share, and `why` says so.
    Raises ConfigError for cpus outside the cpuset and for more GPU ranks than GPUs.
    """
    engines = _engines(deployment)
    _check_nodes(engines, topology)
    engines = _give_gpus(engines, topology)
    engines = _give_named_cpus(engines, topology)
    engines = _give_cores(engines, topology)
    engines = _give_seats(engines, topology, links)
    computing = {cpu for e in engines for cpu in e.cpus}
    spare = tuple(cpu for cpu in topology.cpus if cpu not in computing)
    front = spare or topology.cpus
    decodes = _ranks(engines, Role.DECODE)
    specs = []
    for e in engines:
        probed = links.expected(seats_of(e.name, e.cpus, e.gpus, e.config.tp), decodes) if links else ()
        told = replace(deployment.transfer, probed=probed) if e.role is Role.PREFILL else deployment.transfer
        specs.append(_engine_spec(e, replace(deployment, transfer=told), front, topology))
    return [*specs, _router_spec(engines, deployment, front, own=bool(spare))]


def explain(specs: Sequence[ProcSpec]) -> list[str]:
    """Every decision with its reason, for `up --dry-run`."""
    return [f"{spec.name}: {why}" for spec in specs for why in spec.why]


def _engines(deployment: Deployment) -> list[_Engine]:
    found: list[_Engine] = []
    for group in deployment.groups:
        for i in range(group.replicas):
            cpus = group.engine.cpus
            share = len(cpus) // group.replicas
            own = replace(group.engine, cpus=cpus[i * share : (i + 1) * share])
            found.append(_Engine(f"{group.role}-{i}", group.role, own, len(found), group))
    return found


def _check_nodes(engines: list[_Engine], topology: Topology) -> None:
    have = [n.node for n in topology.nodes]
    for e in engines:
        if e.config.node >= 0 and e.config.node not in have:
            raise ConfigError(
                f"{e.name}: there is no memory node {e.config.node} (nodes here: {_list(have)})",
                field="node",
                fix="see `splitserve topology`, or leave node out",
            )


def _give_gpus(engines: list[_Engine], topology: Topology) -> list[_Engine]:
    """`tp` GPUs to each CUDA engine, in bus order, so that neighbours on a switch stay together."""
    _check_shared(engines)
    named = {index for e in engines for index in e.config.gpus}
    wanted = len(named) + sum(e.config.tp for e in engines if e.config.device == "cuda" and not e.config.gpus)
    if wanted > len(topology.gpus):
        raise ConfigError(
            f"{wanted} GPU ranks but {len(topology.gpus)} GPUs here{_why_none(topology)}",
            field="device",
            fix='lower tp or replicas, or set device = "cpu"; GPU counts need nvidia-ml-py (pip install nvidia-ml-py)',
        )
    free = sorted((g for g in topology.gpus if g.index not in named), key=lambda g: (g.node, g.bus))
    placed = []
    for e in engines:
        if e.config.device == "cuda":
            own, why = _named_gpus(e, topology) if e.config.gpus else _next_gpus(e, free)
            free = [g for g in free if g not in own]
            ids = tuple(g.index for g in own)
            e = replace(e, gpus=ids, why=(*e.why, f"gpus {_list(ids)}: {why}"))  # noqa: PLW2901
        placed.append(e)
    return placed


def _check_shared(engines: list[_Engine]) -> None:
    """A GPU that is named more than once is shared on purpose, and then each must say how much of it is its own."""
    names = [(index, e) for e in engines if e.config.device == "cuda" for index in e.config.gpus]
    for index, e in names:
        others = [other.name for i, other in names if i == index]
        if len(others) > 1 and not (e.config.memory_mb or e.config.num_pages):
            raise ConfigError(
                f"{e.name}: gpu {index} is named {len(others)} times ({','.join(sorted(set(others)))}),"
                " and what each rank may have of it is not said",
                field="memory_mb",
                fix="set memory_mb for engines that share a GPU, or name other gpus",
            )


def _why_none(topology: Topology) -> str:
    """What NVML said where it told of no GPU: a missing module or driver looks like a missing GPU otherwise."""
    return f": {topology.no_gpus}" if topology.no_gpus and not topology.gpus else ""


def _named_gpus(engine: _Engine, topology: Topology) -> tuple[list[Gpu], str]:
    there = {g.index: g for g in topology.gpus}
    missing = sorted(set(engine.config.gpus) - set(there))
    if missing or len(engine.config.gpus) != engine.config.tp:
        what = f"gpus {_list(missing)} are not here" if missing else f"{len(engine.config.gpus)} gpus for tp"
        raise ConfigError(
            f"{engine.name}: {what} ({engine.config.tp} ranks; GPUs {_list(sorted(there)) or 'none'})",
            field="gpus",
            fix="name one GPU of `splitserve topology` for each rank, or leave gpus out",
        )
    return [there[i] for i in engine.config.gpus], "named in the deployment"


def _next_gpus(engine: _Engine, free: list[Gpu]) -> tuple[list[Gpu], str]:
    """All on one node if one has enough free: the wished one, else the first; neighbours on a bus stay together."""
    count = engine.config.tp
    nodes = sorted({g.node for g in free}, key=lambda n: (n != engine.config.node, n))
    for node in nodes:
        near = [g for g in free if g.node == node]
        if len(near) >= count:
            return near[:count], f"the next free of node {node}, in bus order"
    return free[:count], "the next free, in bus order: no node has enough for all ranks"


def _give_named_cpus(engines: list[_Engine], topology: Topology) -> list[_Engine]:
    placed = []
    for e in engines:
        missing = sorted(set(e.config.cpus) - set(topology.cpus))
        if missing:
            raise ConfigError(
                f"{e.name}: cpus {_list(missing)} are not among those this process may use ({_list(topology.cpus)})",
                field="cpus",
                fix="name cpus of `splitserve topology`, or leave cpus out",
            )
        why = (*e.why, f"cpus {_list(e.config.cpus)}: named in the deployment") if e.config.cpus else e.why
        cores = tuple(c for c in topology.cores if set(c.cpus) & set(e.config.cpus))
        placed.append(replace(e, cpus=e.config.cpus, cores=cores, why=why))
    return placed


def _give_cores(engines: list[_Engine], topology: Topology) -> list[_Engine]:
    """Cores to every engine that names no cpus: equal shares for all ranks, whole engines on one node if they fit."""
    named = {cpu for e in engines for cpu in e.cpus}
    free = [c for c in topology.cores if not named & set(c.cpus)]
    quota = f", of which the cgroup's quota of {topology.cpu_quota:g} pays for" if topology.cpu_quota else ""
    if topology.cpu_quota:
        taken = sum(1 for c in topology.cores if named & set(c.cpus))
        # Threads beyond the quota would all be stopped together for the rest of each period.
        free = free[: max(1, int(topology.cpu_quota) - taken)]
    waiting = [e for e in engines if not e.cpus]
    ranks = sum(e.config.tp for e in waiting)
    if not waiting:
        return engines
    if len(free) < ranks:
        return _share_cores(engines, free or list(topology.cores), ranks)
    spare = 1 if len(free) >= _SPARE_FROM and len(free) > ranks else 0
    each = (len(free) - spare) // ranks
    placed = []
    for e in engines:
        if e.cpus:
            placed.append(e)
            continue
        own = _cores_of(e, free, each, topology)
        free = [c for c in free if c not in own]
        cpus = tuple(c.cpus[0] for c in own)
        share = f"{each} of {len(topology.cores)} cores{quota} for each of {ranks} ranks"
        if e.gpus and len({c.node for c in own} | _gpu_nodes(e, topology)) == 1:
            share = f"{share}, on the node of its gpus"
        why = f"cpus {_list(cpus)}: {share}, shared with no other engine"
        placed.append(replace(e, cores=tuple(own), cpus=cpus, why=(*e.why, why)))
    return placed


def _give_seats(engines: list[_Engine], topology: Topology, links: Measured | None) -> list[_Engine]:
    """Order the seats of each decode engine by its links from prefill; seats that a person named stay in that order."""
    sources = _ranks(engines, Role.PREFILL)
    placed = []
    for e in engines:
        tp = e.config.tp
        if e.role is Role.DECODE and 1 < tp <= len(e.cpus) and len(e.cpus) % tp == 0:
            seats = seats_of(e.name, e.cpus, e.gpus, tp)
            order, gain = order_seats(sources, seats, topology, links.best if links else {})
            named = e.config.gpus or e.config.cpus
            names = ", ".join(seats[at].seat for at in order)
            if gain and named:
                e = replace(e, why=(*e.why, f"seats in the order named; with {names} instead: {gain}"))  # noqa: PLW2901
            elif gain:
                cpus = tuple(cpu for at in order for cpu in seats[at].cpus)
                gpus = tuple(e.gpus[at] for at in order) if e.gpus else ()
                e = replace(e, cpus=cpus, gpus=gpus, why=(*e.why, f"ranks on {names}: {gain}"))  # noqa: PLW2901
        placed.append(e)
    return placed


def _ranks(engines: list[_Engine], role: Role) -> list[list[RankSeat]]:
    """The ranks of each engine of a role."""
    return [seats_of(e.name, e.cpus, e.gpus, e.config.tp) for e in engines if e.role is role]


def _cores_of(engine: _Engine, free: list[Core], each: int, topology: Topology) -> list[Core]:
    """`each` cores for every rank, in the order of ranks; beside its own GPU where these lie on several nodes."""
    if engine.config.node >= 0 or len(_gpu_nodes(engine, topology)) < 2:
        return _pick(free, each * engine.config.tp, _wished_node(engine, topology))
    node_of = {g.index: g.node for g in topology.gpus}
    own: list[Core] = []
    for gpu in engine.gpus:
        own += _pick([c for c in free if c not in own], each, node_of[gpu])
    return own


def _gpu_nodes(engine: _Engine, topology: Topology) -> set[int]:
    return {g.node for g in topology.gpus if g.index in engine.gpus}


def _wished_node(engine: _Engine, topology: Topology) -> int:
    """The node named in the deployment, else that of all its GPUs, else -1."""
    nodes = _gpu_nodes(engine, topology)
    near = nodes.pop() if len(nodes) == 1 else -1
    return engine.config.node if engine.config.node >= 0 else near


def _pick(free: list[Core], count: int, wished: int) -> list[Core]:
    """`count` cores of the wished node, else of the one with most left (so prefill and decode part ways).

    Across nodes if none has enough, beginning with the wished one.
    """
    nodes = sorted({c.node for c in free}, key=lambda n: (n != wished, -sum(c.node == n for c in free), n))
    best = [c for c in free if c.node == nodes[0]]
    others = [c for c in free if c.node != nodes[0]] if nodes[0] == wished else free
    return best[:count] if len(best) >= count else [*(best if nodes[0] == wished else []), *others][:count]


def _share_cores(engines: list[_Engine], cores: list[Core], ranks: int) -> list[_Engine]:
    placed, turn = [], 0
    for e in engines:
        if e.cpus:
            placed.append(e)
            continue
        own = [cores[(turn + r) % len(cores)] for r in range(e.config.tp)]
        turn += e.config.tp
        own = list(dict.fromkeys(own))
        cpus = tuple(c.cpus[0] for c in own)
        why = f"cpus {_list(cpus)}: {len(cores)} cores for {ranks} ranks, so engines share and slow each other down"
        placed.append(replace(e, cores=tuple(own), cpus=cpus, why=(*e.why, why)))
    return placed


def _bind_memory(engine: _Engine, topology: Topology) -> tuple[int | None, str, str]:
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


def _engine_spec(
    engine: _Engine, deployment: Deployment, front: tuple[int, ...], topology: Topology
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


def _ports(engine: _Engine, deployment: Deployment) -> tuple[PortWish, ...]:
    """What it listens on; numbers named in the deployment count up from engine to engine."""
    host = deployment.server.host
    named = {"http": deployment.server.port, "bootstrap": deployment.transfer.bootstrap_port}
    keys = ("http", *engines_of.ports(engine.group.program, engine.role))
    return tuple(PortWish(k, host, named[k] + engine.index if named.get(k) else 0) for k in keys)


def _router_spec(
    engines: list[_Engine], deployment: Deployment, front: tuple[int, ...], *, own: bool
) -> ProcSpec:
    router = deployment.router
    router = replace(router, drain_s=deployment.config.drain_s)  # the supervisor waits as long for it
    words = [_ROUTER, *to_flags(router, skip=("port",)), "--port", port_mark(_ROUTER, "http")]
    for e in engines:
        at = url(deployment.server.host, port_mark(e.name, "http"))
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
        f"cpus {_list(front)}: no engine computes there"
        if own
        else f"floats over cpus {_list(front)}: every core computes, and one set aside would cost more than routing"
    )
    return ProcSpec(
        name=_ROUTER,
        role=_ROUTER,
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


def _list(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))
