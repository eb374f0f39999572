"""A machine as a person reads it: sockets, nodes, the PCI tree with its links, and which GPUs reach each other."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.launch import pci
from splitserve.launch.nvml import Gpu
from splitserve.launch.pci import Nic, PciDevice
from splitserve.launch.topology import Node, Topology, how_near
from splitserve.numa import short_list


def draw(topology: Topology) -> list[str]:
    """Nodes with their cores and their part of the PCI tree, then peer access, then limits. One string a line."""
    lines: list[str] = []
    for node in topology.nodes:
        lines += _node(topology, node)
    lines += _rest(topology, {n.node for n in topology.nodes})
    lines += _matrix(topology)
    return [*lines, *_limits(topology)]


def _node(topology: Topology, node: Node) -> list[str]:
    lines = [f"node {node.node}   memory {gib(node.free)} free of {gib(node.total)}"]
    parts: list[list[str]] = []
    for socket in sorted({c.socket for c in topology.cores if c.node == node.node}):
        cores = [c for c in topology.cores if (c.node, c.socket) == (node.node, socket)]
        cpus = tuple(cpu for c in cores for cpu in c.cpus)
        parts.append([f"socket {socket}   {len(cores)} cores, cpus {short_list(cpus)}"])
    hosts = sorted({d.host for d in topology.pci if d.node == node.node and not d.parent})
    parts += [_host(topology, host) for host in hosts]
    parts += [[_gpu(g)] for g in topology.gpus if g.node == node.node and g.address not in topology.devices]
    return lines + _branches(parts)


def _rest(topology: Topology, nodes: set[int]) -> list[str]:
    """What lies on no node that is drawn: the platform does not say, or hides it."""
    hosts = sorted({d.host for d in topology.pci if d.node not in nodes and not d.parent})
    lines = [line for host in hosts for line in _host(topology, host)]
    return lines + [
        _gpu(g) for g in topology.gpus if g.node not in nodes and g.address not in topology.devices
    ]


def _host(topology: Topology, host: str) -> list[str]:
    tops = [d for d in topology.pci if d.host == host and not d.parent]
    return [f"host bridge {host.removeprefix('pci')}", *_branches([_subtree(topology, d) for d in tops])]


def _subtree(topology: Topology, device: PciDevice) -> list[str]:
    """A device and all below it. A port with one thing below it shares that thing's line."""
    below = [d for d in topology.pci if d.parent == device.address]
    own = _describe(topology, device)
    if len(below) == 1:
        first, *others = _subtree(topology, below[0])
        return [f"{own} ─ {first}", *others]
    return [own, *_branches([_subtree(topology, d) for d in below])]


def _branches(parts: Sequence[list[str]]) -> list[str]:
    lines = []
    for n, (head, *tail) in enumerate(parts, 1):
        last = n == len(parts)
        lines.append(f"  {'└─' if last else '├─'} {head}")
        lines += [f"  {' ' if last else '│'}  {line}" for line in tail]
    return lines


def _describe(topology: Topology, device: PciDevice) -> str:
    acs = ", ACS redirects" if any("redirect" in f for f in device.acs or ()) else ""
    if device.is_bridge:
        names = {"switch up": "switch", "switch down": "port"}
        return f"{names.get(device.kind, device.kind)} {device.address}{acs}"
    link = _link(topology, device)
    gpu = next((g for g in topology.gpus if g.address == device.address), None)
    if gpu is not None:
        return f"{_gpu(gpu)}{link}"
    nics = [n for n in topology.nics if n.address == device.address]
    if nics:
        return f"{', '.join(map(_nic, nics))}, bus {device.address}{link}"
    silent = " (NVML tells nothing of it)" if device.kind == "gpu" else ""
    return f"{device.kind} {device.ids}, bus {device.address}{silent}{link}"


def _link(topology: Topology, device: PciDevice) -> str:
    """The link now, and what it could be where that is more."""
    if not device.width:
        return ""
    narrow = pci.narrowed(topology.devices, device)
    could = []
    if narrow:
        could.append(f"NARROW: {narrow}")
    if device.speed and device.speed < device.max_speed:
        could.append(f"idle or slowed: up to {device.max_speed:g}")
    return f", {device.speed:g} GT/s x{device.width}{f' ({chr(44).join(could)})' if could else ''}"


def _gpu(gpu: Gpu) -> str:
    return f"gpu {gpu.index} {gpu.name}, {gib(gpu.free)} free of {gib(gpu.memory)}, bus {gpu.bus}"


def _nic(nic: Nic) -> str:
    rdma = f" ({nic.rdma})" if nic.rdma and nic.rdma != nic.name else ""
    speed = f" {nic.speed:g} Gbit/s" if nic.speed else ""
    return f"nic {nic.name}{rdma} {nic.layer}{speed} {'up' if nic.up else 'down'}"


def _matrix(topology: Topology) -> list[str]:
    """For every two GPUs the way between them, with `!` where they may not reach each other's memory."""
    gpus = topology.gpus
    if len(gpus) < 2:
        return []
    head = "".join(f"{'gpu' + str(g.index):>9}" for g in gpus)
    lines = ["", f"between GPUs{head}"]
    for one in gpus:
        cells = ["-" if one is other else _way(topology, one, other) for other in gpus]
        lines.append(f"{'gpu' + str(one.index):<12}{''.join(f'{c:>9}' for c in cells)}")
    whys = sorted({p.p2p for p in topology.pairs} - {"ok", "unknown"})
    return [*lines, *(f"! no peer access: {why}" for why in whys), ""]


def _way(topology: Topology, one: Gpu, other: Gpu) -> str:
    pair = topology.pair(one.index, other.index)
    way = f"nvlink{pair.nvlinks}" if pair.nvlinks else how_near(topology, one, other)
    return way if pair.p2p in ("ok", "unknown") else f"{way}!"


def _limits(topology: Topology) -> list[str]:
    quota = f"cpu quota {topology.cpu_quota:g}" if topology.cpu_quota else "no cpu quota"
    lines = [
        f"limits   {quota}, memory {gib(topology.memory_free)} free of {gib(topology.memory_total)}, "
        f"/dev/shm {gib(topology.shm_free)} free"
    ]
    known = {d.acs for d in topology.pci if d.is_bridge}
    acs = "unknown (only root can read it)" if known <= {None} else "see the ports"
    if topology.pci:
        lines.append(f"pci      IOMMU {topology.iommu}, ACS {acs}")
    if topology.driver:
        lines.append(f"driver   {topology.driver}, CUDA up to {topology.cuda or '?'}")
    elif topology.no_gpus and any(d.kind == "gpu" for d in topology.pci):
        lines.append(f"driver   {topology.no_gpus}")
    return lines


def gib(n: int) -> str:
    """Bytes as a person reads them."""
    return f"{n / 2**30:.1f} GiB"
