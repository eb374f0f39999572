"""Which process runs where, and why: a pure function from machine and deployment to process specs.

    cores of the cpuset, by node           8 cores, one prefill and one decode engine
      0 1 2 3 4 5 6 7                      0 1 2 │ 3 4 5 │ 6 7
                                           prefill-0  decode-0  router and HTTP fronts

Compute gets cores of its own: an engine step waits for its slowest thread, so a core that two engines share costs both.
One hyperthread of a core computes; its siblings are left to the router and the HTTP fronts, which sleep unless bytes
move. It opens no file and no socket; the ports it wants are marks that ports.py fills.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from splitserve.config import EngineConfig
from splitserve.errors import ConfigError
from splitserve.launch.deployment import Deployment
from splitserve.launch.measured import Measured
from splitserve.launch.nvml import Gpu
from splitserve.launch.pairing import RankSeat, order_seats, seats_of
from splitserve.launch.procs import Placed, ProcSpec, commas, engine_spec, router_spec
from splitserve.launch.topology import Core, Topology
from splitserve.types import Role

_SPARE_FROM = 6
"""From this many cores on, one is set aside for the router and the fronts; below, it would cost too much compute."""


@dataclass(frozen=True)
class Share:
    """The part of a deployment that one of several hosts gets: engines by name, and perhaps the router.

    `addresses` are of all engines: where the router and peers reach each.
    """

    engines: frozenset[str]
    addresses: Mapping[str, str]
    router: bool


def place(
    topology: Topology,
    deployment: Deployment,
    links: Measured | None = None,
    *,
    share: Share | None = None,
) -> list[ProcSpec]:
    """Processes in starting order: engines, then the router. Deterministic; reads nothing but its arguments.

    `links` is what the fabric doctor measured here: it decides which seat each decode rank takes (pairing.py), and
    prefill engines are told what to expect of their links. No cpu computes for two engines while there are as many
    cores as ranks; with fewer they share, and `why` says so. `share`: only that part (hosts/spread.py has the rest).
    Raises ConfigError for cpus outside the cpuset and for more GPU ranks than GPUs.
    """
    everybody = _engines(deployment)
    engines = [e for e in everybody if share is None or e.name in share.engines]
    _check_nodes(engines, topology)
    engines = _give_gpus(engines, topology)
    engines = _give_named_cpus(engines, topology)
    engines = _give_cores(engines, topology)
    engines = _give_seats(engines, topology, links)
    computing = {cpu for e in engines for cpu in e.cpus}
    spare = tuple(cpu for cpu in topology.cpus if cpu not in computing)
    front = spare or topology.cpus
    decodes = _ranks(engines, Role.DECODE)
    deployment = _directed(deployment, links)
    if links and links.direction != deployment.transfer.direction:
        links = None  # what was measured is of the other way
    specs = []
    for e in engines:
        probed = links.expected(seats_of(e.name, e.cpus, e.gpus, e.config.tp), decodes) if links else ()
        told = replace(deployment.transfer, probed=probed) if e.role is Role.PREFILL else deployment.transfer
        specs.append(engine_spec(e, replace(deployment, transfer=told), front, topology))
    if share is None:
        return [*specs, router_spec(everybody, deployment, front, own=bool(spare), addresses={})]
    if share.router:
        specs.append(router_spec(everybody, deployment, front, own=bool(spare), addresses=share.addresses))
    return specs


def _directed(deployment: Deployment, links: Measured | None) -> Deployment:
    """With the direction that was measured to be better, where the file and its overrides name none."""
    given = any(s.name == "transfer.direction" and s.source != "default" for s in deployment.settings)
    if links is None or given:
        return deployment
    return replace(deployment, transfer=replace(deployment.transfer, direction=links.direction))


def engine_names(deployment: Deployment) -> list[tuple[str, Role, EngineConfig]]:
    """All engines of a deployment in starting order."""
    return [(e.name, e.role, e.config) for e in _engines(deployment)]


def explain(specs: Sequence[ProcSpec]) -> list[str]:
    """Every decision with its reason, for `up --dry-run`."""
    return [f"{spec.name}: {why}" for spec in specs for why in spec.why]


def _engines(deployment: Deployment) -> list[Placed]:
    found: list[Placed] = []
    for group in deployment.groups:
        for i in range(group.replicas):
            cpus = group.engine.cpus
            share = len(cpus) // group.replicas
            own = replace(group.engine, cpus=cpus[i * share : (i + 1) * share])
            found.append(Placed(f"{group.role}-{i}", group.role, own, len(found), group))
    return found


def _check_nodes(engines: list[Placed], topology: Topology) -> None:
    have = [n.node for n in topology.nodes]
    for e in engines:
        if e.config.node >= 0 and e.config.node not in have:
            raise ConfigError(
                f"{e.name}: there is no memory node {e.config.node} (nodes here: {commas(have)})",
                field="node",
                fix="see `splitserve topology`, or leave node out",
            )


def _give_gpus(engines: list[Placed], topology: Topology) -> list[Placed]:
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
            e = replace(e, gpus=ids, why=(*e.why, f"gpus {commas(ids)}: {why}"))  # noqa: PLW2901
        placed.append(e)
    return placed


def _check_shared(engines: list[Placed]) -> None:
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


def _named_gpus(engine: Placed, topology: Topology) -> tuple[list[Gpu], str]:
    there = {g.index: g for g in topology.gpus}
    missing = sorted(set(engine.config.gpus) - set(there))
    if missing or len(engine.config.gpus) != engine.config.tp:
        what = f"gpus {commas(missing)} are not here" if missing else f"{len(engine.config.gpus)} gpus for tp"
        raise ConfigError(
            f"{engine.name}: {what} ({engine.config.tp} ranks; GPUs {commas(sorted(there)) or 'none'})",
            field="gpus",
            fix="name one GPU of `splitserve topology` for each rank, or leave gpus out",
        )
    return [there[i] for i in engine.config.gpus], "named in the deployment"


def _next_gpus(engine: Placed, free: list[Gpu]) -> tuple[list[Gpu], str]:
    """All on one node if one has enough free: the wished one, else the first; neighbours on a bus stay together."""
    count = engine.config.tp
    nodes = sorted({g.node for g in free}, key=lambda n: (n != engine.config.node, n))
    for node in nodes:
        near = [g for g in free if g.node == node]
        if len(near) >= count:
            return near[:count], f"the next free of node {node}, in bus order"
    return free[:count], "the next free, in bus order: no node has enough for all ranks"


def _give_named_cpus(engines: list[Placed], topology: Topology) -> list[Placed]:
    placed = []
    for e in engines:
        missing = sorted(set(e.config.cpus) - set(topology.cpus))
        if missing:
            raise ConfigError(
                f"{e.name}: cpus {commas(missing)} are not among those this process may use ({commas(topology.cpus)})",
                field="cpus",
                fix="name cpus of `splitserve topology`, or leave cpus out",
            )
        why = (*e.why, f"cpus {commas(e.config.cpus)}: named in the deployment") if e.config.cpus else e.why
        cores = tuple(c for c in topology.cores if set(c.cpus) & set(e.config.cpus))
        placed.append(replace(e, cpus=e.config.cpus, cores=cores, why=why))
    return placed


def _give_cores(engines: list[Placed], topology: Topology) -> list[Placed]:
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
        why = f"cpus {commas(cpus)}: {share}, shared with no other engine"
        placed.append(replace(e, cores=tuple(own), cpus=cpus, why=(*e.why, why)))
    return placed


def _give_seats(engines: list[Placed], topology: Topology, links: Measured | None) -> list[Placed]:
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


def _ranks(engines: list[Placed], role: Role) -> list[list[RankSeat]]:
    """The ranks of each engine of a role."""
    return [seats_of(e.name, e.cpus, e.gpus, e.config.tp) for e in engines if e.role is role]


def _cores_of(engine: Placed, free: list[Core], each: int, topology: Topology) -> list[Core]:
    """`each` cores for every rank, in the order of ranks; beside its own GPU where these lie on several nodes."""
    if engine.config.node >= 0 or len(_gpu_nodes(engine, topology)) < 2:
        return _pick(free, each * engine.config.tp, _wished_node(engine, topology))
    node_of = {g.index: g.node for g in topology.gpus}
    own: list[Core] = []
    for gpu in engine.gpus:
        own += _pick([c for c in free if c not in own], each, node_of[gpu])
    return own


def _gpu_nodes(engine: Placed, topology: Topology) -> set[int]:
    return {g.node for g in topology.gpus if g.index in engine.gpus}


def _wished_node(engine: Placed, topology: Topology) -> int:
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


def _share_cores(engines: list[Placed], cores: list[Core], ranks: int) -> list[Placed]:
    placed, turn = [], 0
    for e in engines:
        if e.cpus:
            placed.append(e)
            continue
        own = [cores[(turn + r) % len(cores)] for r in range(e.config.tp)]
        turn += e.config.tp
        own = list(dict.fromkeys(own))
        cpus = tuple(c.cpus[0] for c in own)
        why = f"cpus {commas(cpus)}: {len(cores)} cores for {ranks} ranks, so engines share and slow each other down"
        placed.append(replace(e, cores=tuple(own), cpus=cpus, why=(*e.why, why)))
    return placed
