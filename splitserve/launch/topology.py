"""What this machine offers: cpus, memory nodes, cgroup limits, GPUs and how they hang together. Decides nothing.

    Topology ─┬─ cores: one per physical core, with the cpus (hyperthreads) this process may use on it
              ├─ memory nodes: bytes free on each
              ├─ limits: cpu quota and memory limit of the cgroup (cgroup.py)
              ├─ gpus, and for every two of them NVLink and peer access: through NVML (nvml.py)
              └─ pci, nics, iommu: the tree above them, from sysfs (pci.py)

Sources: sched_getaffinity, /sys, /proc/meminfo, /proc/self/cgroup, NVML. Paths hang from `root`, so that tests hand in
trees of machines they do not have. A container that hides sysfs still gives a usable answer: every cpu a core of its
own, one node, no PCI tree.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from splitserve.errors import ConfigError
from splitserve.launch import pci
from splitserve.launch.cgroup import cpu_quota, memory_limit
from splitserve.launch.nvml import Gpu, GpuPair, GpuReading, read_gpus
from splitserve.launch.pci import Nic, PciDevice, number, text
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
class Topology:
    """What may be used here. `cpu_quota` is in cpus, 0.0 for none; `memory` counts what the cgroup leaves too.

    `no_gpus` is why NVML told of none; "" where it was not asked or told of some. Files of older versions lack what
    has a default here.
    """

    cores: tuple[Core, ...]
    nodes: tuple[Node, ...]
    gpus: tuple[Gpu, ...]
    cpu_quota: float
    memory_total: int
    memory_free: int
    shm_free: int
    pairs: tuple[GpuPair, ...] = ()
    pci: tuple[PciDevice, ...] = ()
    nics: tuple[Nic, ...] = ()
    iommu: str = "unknown"  # translated, passthrough, on, off
    driver: str = ""
    cuda: str = ""  # the newest that the driver runs, "13.0"
    no_gpus: str = ""

    @property
    def cpus(self) -> tuple[int, ...]:
        """All cpus that this process may use, ascending."""
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))

    @property
    def devices(self) -> dict[str, PciDevice]:
        """The PCI tree by address."""
        return {d.address: d for d in self.pci}

    def pair(self, one: int, other: int) -> GpuPair:
        """What is known of two GPUs, in either order."""
        a, b = sorted((one, other))
        return next((p for p in self.pairs if (p.a, p.b) == (a, b)), GpuPair(a, b, "unknown"))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read(
    root: str | Path = "/", *, affinity: Iterable[int] | None = None, nvml: bool = True, library: Any = None
) -> Topology:
    """Read the machine under `root`; `affinity` are the cpus to count (default: this process's).

    `library` stands in for pynvml.
    """
    base = Path(root)
    cpus = sorted(os.sched_getaffinity(0) if affinity is None else affinity)
    total, free = _memory(base)
    limit, used = memory_limit(base)
    if limit is not None:
        total, free = min(total, limit), min(free, max(0, limit - used))
    told = read_gpus(base, library) if nvml else GpuReading()
    devices = pci.read_devices(base)
    return Topology(
        cores=_cores(base, cpus),
        nodes=_nodes(base, total, free),
        gpus=told.gpus,
        cpu_quota=cpu_quota(base),
        memory_total=total,
        memory_free=free,
        shm_free=_shm_free(base),
        pairs=told.pairs,
        pci=devices,
        nics=pci.read_nics(base),
        iommu=pci.read_iommu(base, devices),
        driver=told.driver,
        cuda=told.cuda,
        no_gpus=told.trouble,
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


def how_near(topology: Topology, one: Gpu, other: Gpu) -> str:
    """The best way between two GPUs: nvlink, switch, root, node, across, or unknown."""
    if topology.pair(one.index, other.index).nvlinks:
        return "nvlink"
    found = pci.near(topology.devices, one.address, other.address)
    if found == "unknown" and -1 not in (one.node, other.node):
        return "node" if one.node == other.node else "across"
    return found


def _cores(base: Path, cpus: list[int]) -> tuple[Core, ...]:
    node_of = {
        cpu: int(path.name.removeprefix("node"))
        for path in (base / "sys/devices/system/node").glob("node[0-9]*")
        for cpu in parse_list(text(path / "cpulist"))
    }
    found: dict[tuple[int, int, int], list[int]] = {}
    for cpu in cpus:
        where = base / f"sys/devices/system/cpu/cpu{cpu}/topology"
        socket = number(where / "physical_package_id", 0)
        # Without sysfs a cpu counts as a core of its own; core_id repeats on every socket and die, hence the key.
        siblings = parse_list(text(where / "thread_siblings_list")) or [cpu]
        found.setdefault((node_of.get(cpu, 0), socket, min(siblings)), []).append(cpu)
    return tuple(
        Core(
            socket,
            node,
            number(base / f"sys/devices/system/cpu/cpu{first}/topology/core_id", first),
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
            for line in text(path / "meminfo").splitlines()
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
    for line in text(base / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if rest.split():
            sizes[name] = int(rest.split()[0]) * 1024
    return sizes.get("MemTotal", 0), sizes.get("MemAvailable", sizes.get("MemFree", 0))


def _shm_free(base: Path) -> int:
    try:
        stat = os.statvfs(base / "dev/shm")
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize
