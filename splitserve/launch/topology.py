"""What this machine offers: cpus, cores, memory nodes, limits of its cgroup, and GPUs. Reads; decides nothing.

    Topology ─┬─ cores: one per physical core, with the cpus (hyperthreads) this process may use on it
              ├─ memory nodes: bytes free on each
              ├─ limits: cpu quota and memory limit of the cgroup (v1 and v2)
              └─ gpus: through NVML, where nvidia-ml-py and a driver are there

Sources: sched_getaffinity, /sys/devices/system/{cpu,node}, /proc/meminfo, /proc/self/cgroup. Paths hang from `root`,
so that tests hand in trees of machines they do not have. A container that hides sysfs still gives a usable answer:
every cpu a core of its own, one node.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from splitserve.errors import ConfigError
from splitserve.numa import parse_list


@dataclass(frozen=True)
class Core:
    """One physical core: where it is, and its cpus that this process may use (lowest first)."""

    socket: int
    node: int
    core: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Node:
    """One NUMA node's memory."""

    node: int
    total: int
    free: int


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML names it. `node` is -1 where the platform does not say."""

    index: int
    name: str
    uuid: str
    memory: int
    free: int
    bus: str
    node: int
    arch: int = 0  # 90 for sm_90; 0 where it is not known


@dataclass(frozen=True)
class Topology:
    """What may be used here. `cpu_quota` is in cpus, 0.0 for none; `memory` counts what the cgroup leaves too."""

    cores: tuple[Core, ...]
    nodes: tuple[Node, ...]
    gpus: tuple[Gpu, ...]
    cpu_quota: float
    memory_total: int
    memory_free: int
    shm_free: int

    @property
    def cpus(self) -> tuple[int, ...]:
        """All cpus that this process may use, ascending."""
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read(root: str | Path = "/", *, affinity: Iterable[int] | None = None, nvml: bool = True) -> Topology:
    """Read the machine under `root`; `affinity` are the cpus to count (default: this process's)."""
    base = Path(root)
    cpus = sorted(os.sched_getaffinity(0) if affinity is None else affinity)
    total, free = _memory(base)
    limit, used = _memory_limit(base)
    if limit is not None:
        total, free = min(total, limit), min(free, max(0, limit - used))
    return Topology(
        cores=_cores(base, cpus),
        nodes=_nodes(base, total, free),
        gpus=_gpus(base) if nvml else (),
        cpu_quota=_cpu_quota(base),
        memory_total=total,
        memory_free=free,
        shm_free=_shm_free(base),
    )


def load(path: str | Path) -> Topology:
    """A machine written by `splitserve topology --json`. ConfigError for a file that is none."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Topology)
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}", field="topology") from None
    except msgspec.DecodeError as e:
        raise ConfigError(
            f"{path} is no topology: {e}", field="topology", fix="write one with `splitserve topology --json`"
        ) from None


def draw(topology: Topology) -> list[str]:
    """A small picture: one line a node and core, one a GPU, one for what limits all of them."""
    lines = []
    for node in topology.nodes:
        lines.append(f"node {node.node}   memory {_gib(node.free)} free of {_gib(node.total)}")
        for core in (c for c in topology.cores if c.node == node.node):
            cpus = ", ".join(map(str, core.cpus))
            lines.append(f"  ├─ socket {core.socket} core {core.core:<3} cpu {cpus}")
        lines += [f"  ├─ {_gpu(g)}" for g in topology.gpus if g.node == node.node]
        lines[-1] = lines[-1].replace("├─", "└─")
    lines += [_gpu(g) for g in topology.gpus if g.node not in {n.node for n in topology.nodes}]
    quota = f"cpu quota {topology.cpu_quota:g}" if topology.cpu_quota else "no cpu quota"
    lines.append(
        f"limits   {quota}, memory {_gib(topology.memory_free)} free of {_gib(topology.memory_total)}, "
        f"/dev/shm {_gib(topology.shm_free)} free"
    )
    return lines


def _gpu(gpu: Gpu) -> str:
    return f"gpu {gpu.index} {gpu.name}, {_gib(gpu.free)} free of {_gib(gpu.memory)}, bus {gpu.bus}"


def _gib(n: int) -> str:
    return f"{n / 2**30:.1f} GiB"


def _cores(base: Path, cpus: list[int]) -> tuple[Core, ...]:
    node_of = {
        cpu: int(path.name.removeprefix("node"))
        for path in (base / "sys/devices/system/node").glob("node[0-9]*")
        for cpu in parse_list(_text(path / "cpulist"))
    }
    found: dict[tuple[int, int, int], list[int]] = {}
    for cpu in cpus:
        where = base / f"sys/devices/system/cpu/cpu{cpu}/topology"
        socket = _int(where / "physical_package_id", 0)
        # Without sysfs a cpu counts as a core of its own; core_id repeats on every socket and die, hence the key.
        siblings = parse_list(_text(where / "thread_siblings_list")) or [cpu]
        found.setdefault((node_of.get(cpu, 0), socket, min(siblings)), []).append(cpu)
    return tuple(
        Core(
            socket,
            node,
            _int(base / f"sys/devices/system/cpu/cpu{first}/topology/core_id", first),
            tuple(of_core),
        )
        for (node, socket, first), of_core in sorted(found.items())
    )


def _nodes(base: Path, total: int, free: int) -> tuple[Node, ...]:
    nodes = []
    paths = (base / "sys/devices/system/node").glob("node[0-9]*")
    for path in sorted(paths, key=lambda p: int(p.name.removeprefix("node"))):
        sizes = {
            line.split()[2].rstrip(":"): int(line.split()[3]) * 1024
            for line in _text(path / "meminfo").splitlines()
            if len(line.split()) >= 4
        }
        if "MemTotal" in sizes:
            # Cached file pages count as free: the kernel gives them up before it refuses memory.
            spare = sizes.get("MemFree", 0) + sizes.get("FilePages", 0) - sizes.get("Shmem", 0)
            nodes.append(
                Node(int(path.name.removeprefix("node")), sizes["MemTotal"], min(spare, sizes["MemTotal"]))
            )
    return tuple(nodes) or (Node(0, total, free),)


def _memory(base: Path) -> tuple[int, int]:
    sizes = {}
    for line in _text(base / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if rest.split():
            sizes[name] = int(rest.split()[0]) * 1024
    return sizes.get("MemTotal", 0), sizes.get("MemAvailable", sizes.get("MemFree", 0))


def _cgroups(base: Path, controller: str) -> list[tuple[bool, Path]]:
    """Directories of our cgroup and its parents for a controller, inner first: (is v2, path).

    Inside a container /proc/self/cgroup may name a path of the host that is not mounted here; the mount's root,
    which is then the container's own group, closes the list.
    """
    mount = base / "sys/fs/cgroup"
    found = []
    for line in _text(base / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        v2 = controllers == ""
        if not v2 and controller not in controllers.split(","):
            continue
        top = mount if v2 else mount / controllers
        if not v2 and not top.exists():
            top = mount / controller
        inner = top / path.lstrip("/")
        chain = [inner, *inner.parents]
        found += [(v2, p) for p in chain if p.is_relative_to(top)]
    return found


def _cpu_quota(base: Path) -> float:
    quotas = []
    for v2, path in _cgroups(base, "cpu"):
        if v2:
            words = _text(path / "cpu.max").split()
            quota, period = (words[0], words[1]) if len(words) == 2 else ("max", "1")
        else:
            quota, period = (
                _text(path / "cpu.cfs_quota_us").strip(),
                _text(path / "cpu.cfs_period_us").strip(),
            )
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=0.0)


def _memory_limit(base: Path) -> tuple[int | None, int]:
    """The tightest limit over our cgroup and its parents, with that group's use; file cache counts as unused."""
    best: tuple[int | None, int] = (None, 0)
    for v2, path in _cgroups(base, "memory"):
        limit = _text(path / ("memory.max" if v2 else "memory.limit_in_bytes")).strip()
        if not limit.isdigit() or int(limit) >= 2**60:  # v1 writes "no limit" as a number near 2^63
            continue
        used = _int(path / ("memory.current" if v2 else "memory.usage_in_bytes"), 0)
        cache = [
            int(line.split()[1])
            for line in _text(path / "memory.stat").splitlines()
            if line.startswith("inactive_file ")
        ]
        used = max(0, used - sum(cache))
        if best[0] is None or int(limit) - used < best[0] - best[1]:
            best = (int(limit), used)
    return best


def _shm_free(base: Path) -> int:
    try:
        stat = os.statvfs(base / "dev/shm")
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize


def _gpus(base: Path) -> tuple[Gpu, ...]:
    """GPUs through NVML; none where the library or the driver is missing."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(_read_gpu(pynvml, base, i) for i in range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def _read_gpu(nvml: Any, base: Path, index: int) -> Gpu:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(device)
    bus = _str(nvml.nvmlDeviceGetPciInfo(device).busId).lower()
    # sysfs writes the domain with 4 digits, NVML with 8.
    node = _int(base / f"sys/bus/pci/devices/{bus[-12:]}/numa_node", -1)
    name, uuid = _str(nvml.nvmlDeviceGetName(device)), _str(nvml.nvmlDeviceGetUUID(device))
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(device)
    return Gpu(index, name, uuid, memory.total, memory.free, bus, node, 10 * major + minor)


def _str(raw: bytes | str) -> str:
    return raw.decode() if isinstance(raw, bytes) else raw


def _text(path: Path) -> str:
    """A small file's text, or "" where this kernel does not have it."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _int(path: Path, default: int) -> int:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else default
