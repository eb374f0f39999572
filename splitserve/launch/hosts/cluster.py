"""The hosts of a Ray cluster: found, described, reserved from, and given a Crew each. The only file that knows Ray.

    placement group for each engine    its cpus or GPUs, in one bundle, on the host that spread.py chose if it has room
    actor for each host                a Crew, pinned there; made again by Ray should it die, and then without processes

Both belong to the job of `up`: when that ends in any way, Ray removes them, and the processes leave with their crew.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from splitserve import __version__
from splitserve.config import HostsConfig
from splitserve.errors import CapacityError, ConfigError, PeerLost, SplitserveError
from splitserve.launch.commands import fill, fill_word
from splitserve.launch.deployment import Deployment, Group
from splitserve.launch.fits import Footprint
from splitserve.launch.hosts.crew import Crew
from splitserve.launch.hosts.spread import Host
from splitserve.launch.placement import engine_names
from splitserve.launch.procs import ProcSpec
from splitserve.launch.topology import Topology

NAMESPACE = "splitserve"
CALL_S = 60.0
KNOCK_S = 5.0
DOCTOR_S = 150.0
MOST_CALLS = 64
"""At once, to one crew: each process has one waiting for what it says."""


def load_ray() -> Any:
    """Ray itself. ConfigError, with the line that installs it, where it is missing."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")  # of half a minute each, where 20 are usual
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ConfigError(
            '[hosts] backend is "ray", and Ray is not installed here',
            field="backend",
            fix="pip install 'splitserve[ray]' on every host (or pip install 'ray>=2.40,<3')",
        ) from None


def connect(address: str) -> Any:
    """Ray, joined as a job of our namespace. ConfigError where no cluster answers."""
    ray = load_ray()
    _knock(address)
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level="ERROR",
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError) as e:
        raise _no_cluster(address, str(e).splitlines()[0]) from None
    return ray


def _knock(address: str) -> None:
    """ConfigError where nobody listens there: Ray itself would go on trying for minutes."""
    at = address
    if at == "auto":  # what this host belongs to, as Ray itself finds it
        kept = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
        at = os.environ.get("RAY_ADDRESS") or (kept.read_text().strip() if kept.is_file() else "")
    host, _, port = at.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        return  # Ray has its own words for that
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()
    except (OSError, OverflowError) as e:
        raise _no_cluster(at, getattr(e, "strerror", None) or "nobody answers") from None


def _no_cluster(address: str, why: str) -> ConfigError:
    return ConfigError(
        f"no Ray cluster at {address}: {why}",
        field="address",
        fix="ray start --head here, ray start --address=HERE:6379 on the others; or set [hosts] address",
    )


class Cluster:
    """A deployment's hold on a cluster, from the start of `up` to its end. The first host is this one."""

    def __init__(
        self, deployment: Deployment, *, command: Sequence[str] = (), only_look: bool = False
    ) -> None:
        """Join it and put a crew on every host. ConfigError for no cluster, or another version on a host.

        `command` begins the processes' command lines; empty: splitserve by each host's own interpreter. `only_look`:
        nothing will be started, so that crews of this deployment may be there already.
        """
        self._config: HostsConfig = deployment.hosts
        self._ray = connect(deployment.hosts.address)
        self._crews: dict[str, Any] = {}
        self._names: dict[str, str] = {}
        self._groups: dict[str, Any] = {}
        try:
            self.hosts = self._enlist(f"look-{os.getpid()}" if only_look else deployment.name, tuple(command))
        except BaseException:
            self.close()
            raise

    def _enlist(self, name: str, command: tuple[str, ...]) -> list[Host]:
        nodes = [n for n in self._ray.nodes() if n["Alive"]]
        here = self._ray.get_runtime_context().get_node_id()
        nodes.sort(key=lambda n: (n["NodeID"] != here, n["NodeManagerAddress"], n["NodeID"]))
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        actor = self._ray.remote(Crew)
        for node in nodes:
            key = node["NodeID"]
            self._names[key] = f"{name}-{key[:8]}"
            self._crews[key] = actor.options(
                name=self._names[key],
                num_cpus=0,
                max_restarts=-1,
                max_concurrency=MOST_CALLS,
                scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(key, soft=False),
            ).remote(self._names[key], command)
        told = self._get([self._crews[n["NodeID"]].describe.remote() for n in nodes])
        return [_host(node, facts) for node, facts in zip(nodes, told, strict=True)]

    def reserve(self, deployment: Deployment, where: Mapping[str, str]) -> dict[str, str]:
        """A placement group for each engine, and so the host that it really has. CapacityError where it gets none."""
        groups = importlib.import_module("ray.util.placement_group")
        for name, target in where.items():
            self._reserve(groups, deployment, name, target)
        table = groups.placement_group_table
        return {name: table(group)["bundles_to_node_id"][0] for name, group in self._groups.items()}

    def _reserve(self, groups: Any, deployment: Deployment, name: str, target: str) -> None:
        config = next(c for n, _, c in engine_names(deployment) if n == name)
        bundle = {"GPU": config.tp} if config.device == "cuda" else {"CPU": config.tp}
        self._groups[name] = groups.placement_group(
            [bundle], strategy="STRICT_PACK", name=name, _soft_target_node_id=target
        )
        if not self._groups[name].wait(self._config.wait_s):
            (kind, count), *_ = bundle.items()
            raise CapacityError(
                f"{name} wants {count} {kind} of one host, and after {self._config.wait_s:g} s none has them free",
                field="hosts",
                fix="`ray status` shows who holds what; lower tp or replicas, or add hosts",
            )

    def reserve_one(self, deployment: Deployment, name: str, target: str) -> str:
        """A new placement group for one engine, in the place of the one it had; the host that it really has."""
        groups = importlib.import_module("ray.util.placement_group")
        groups.remove_placement_group(self._groups.pop(name))
        self._reserve(groups, deployment, name, target)
        return str(groups.placement_group_table(self._groups[name])["bundles_to_node_id"][0])

    def alive(self) -> list[Host]:
        """Those of the hosts that Ray has not given up."""
        names = {n["NodeID"] for n in self._ray.nodes() if n["Alive"]}
        return [h for h in self.hosts if h.name in names]

    def check(self, host: Host, groups: Sequence[Group]) -> tuple[dict[str, Footprint], list[str]]:
        """What engines of these groups need at least on that host, by role, and warnings about other engines there.

        Raises what is wrong with their models or programs there, with the host's address before it.
        """
        try:
            found: tuple[dict[str, Footprint], list[str]] = self._get(
                [self._crews[host.name].check.remote(tuple(groups), host.topology.memory_free)]
            )[0]
        except SplitserveError as e:
            e.message = f"host {host.address}: {e.message}"
            raise
        return found

    def doctor(self, flags: Sequence[str]) -> list[list[dict[str, Any]]]:
        """What `splitserve doctor` finds on each host, all at the same time."""
        return list(
            self._get(
                [self._crews[h.name].doctor.remote(tuple(flags)) for h in self.hosts], within_s=DOCTOR_S
            )
        )

    def claim(self, specs: Sequence[ProcSpec]) -> dict[str, int]:
        """Ports of all processes on other hosts' crews."""
        asked = [
            self._crews[s.host].claim.remote([(f"{s.name}.{w.key}", w.host, w.port) for w in s.ports])
            for s in specs
            if s.host
        ]
        return {name: port for ports in self._get(asked) for name, port in ports.items()}

    def relayed(self, spec: ProcSpec, ports: Mapping[str, int]) -> ProcSpec:
        """The process as the supervisor starts it here: a relay that has the crew of its host start it."""
        if not spec.host:
            return spec
        words = ["on-host", "--cluster", self._ray.get_runtime_context().gcs_address]
        words += ["--crew", self._names[spec.host], "--process", spec.name]
        words += ["--cpus", ",".join(map(str, spec.front_cpus))]
        for key, value in spec.env.items():
            words += ["--env", f"{key}={fill_word(value, ports)}"]
        for w in spec.ports:
            words += ["--hold", f"{spec.name}.{w.key}={w.host}={ports[f'{spec.name}.{w.key}']}"]
        inner = fill(spec.argv, ports)
        return replace(
            spec, argv=(*words, "--", *inner), env={}, front_cpus=tuple(sorted(os.sched_getaffinity(0)))
        )

    def close(self) -> None:
        """End what is left and leave; the reservations go with the job."""
        closing = [crew.close.remote() for crew in self._crews.values()]
        with suppress(self._ray.exceptions.RayError):
            self._ray.get(closing, timeout=10.0)
        self._ray.shutdown()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _get(self, calls: Any, *, within_s: float = CALL_S) -> Any:
        """Answers of crews. What they raise of ours comes as it is; PeerLost where a host does not answer."""
        try:
            return self._ray.get(calls, timeout=within_s)
        except self._ray.exceptions.RayTaskError as e:
            raise e.cause or e from None
        except self._ray.exceptions.RayError as e:
            raise PeerLost(
                f"a host of the Ray cluster does not answer: {str(e).splitlines()[0]}",
                fix="`ray status`; splitserve must be installed on every host",
            ) from None


def _host(node: Mapping[str, Any], facts: Mapping[str, Any]) -> Host:
    """A node of Ray's as a host of ours, with no more cores and GPUs than Ray may give away there."""
    if facts["version"] != __version__:
        raise ConfigError(
            f"{facts['host']} has splitserve {facts['version']}, this host {__version__}",
            field="hosts",
            fix="install the same version on every host",
        )
    found = msgspec.json.decode(facts["topology"], type=Topology)
    given = node["Resources"]
    found = replace(
        found,
        cores=found.cores[: int(given.get("CPU", 0))],
        gpus=found.gpus[: int(given.get("GPU", 0))],
    )
    return Host(node["NodeID"], node["NodeManagerAddress"], found)
