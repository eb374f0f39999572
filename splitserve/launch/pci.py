"""The PCI tree above GPUs and network cards: bridges, switches, link widths, ACS, IOMMU. Reads sysfs; decides nothing.

    /sys/devices/pci0000:00/0000:00:01.1/0000:01:00.0/0000:02:00.0/0000:03:00.0
                 host bridge  root port    switch up    switch down  gpu

The path that sysfs gives a device is its way to the processor, so that no configuration space is needed for the tree.
ACS is the exception: it stands in extended configuration space, which the kernel shows to root only; without it ACS is
unknown, not off. Paths hang from a root directory, so that tests hand in machines that they do not have.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NVIDIA = "10de"
_BRIDGES = ("root port", "switch up", "switch down", "bridge")
ACS_FUNCTIONS = ("source validation", "translation blocking", "request redirect", "completion redirect")
"""Bits 0-3 of the ACS control register. Either redirect sends traffic between peers up to the root and back."""

_ACS_CAPABILITY = 0x000D
_EXTENDED = 0x100
_MOST_CAPABILITIES = 64


@dataclass(frozen=True)
class PciDevice:
    """One function on the way to a GPU or network card. Speeds in GT/s, widths in lanes; 0 where it is not told.

    `acs` are the functions that are on, None where that cannot be read. `iommu` is its group's kind: "translated",
    "passthrough", or "" without a group.
    """

    address: str  # "0000:03:00.0"
    kind: str  # root port, switch up, switch down, bridge, gpu, nvswitch, nic
    parent: str  # the bridge above, "" directly at the host bridge
    host: str  # the host bridge, "pci0000:00"
    node: int
    ids: str  # vendor and device, "10de:2bb1"
    speed: float = 0.0
    width: int = 0
    max_speed: float = 0.0
    max_width: int = 0
    acs: tuple[str, ...] | None = None
    iommu: str = ""

    @property
    def is_bridge(self) -> bool:
        return self.kind in _BRIDGES


@dataclass(frozen=True)
class Nic:
    """One network interface on a PCI device; `rdma` is its verbs device, "" without one. Speed in Gbit/s."""

    name: str
    address: str
    node: int
    layer: str  # ethernet, infiniband
    speed: float
    up: bool
    rdma: str = ""


def read_devices(base: Path) -> tuple[PciDevice, ...]:
    """GPUs, NVSwitches and network cards under `base`, and every bridge above one; () where sysfs shows none."""
    paths = _paths(base)
    kinds = {a: kind for a, path in paths.items() if (kind := _end_kind(path))}
    bridges = {b for a in kinds for b in _above(paths[a])}
    upstream = {b for path in paths.values() for b in _above(path)[:-1]}  # bridges with a bridge below
    found = []
    for address in sorted(paths):
        path = paths[address]
        if address in kinds:
            found.append(_device(path, kinds[address]))
        elif address in bridges:
            found.append(_device(path, _bridge_kind((*_above(path), address), upstream)))
    return tuple(found)


def read_nics(base: Path) -> tuple[Nic, ...]:
    """Interfaces that are PCI devices, and verbs devices that have no interface."""
    rdma = {_pci_address(p / "device"): p.name for p in _children(base / "sys/class/infiniband")}
    found = []
    for path in _children(base / "sys/class/net"):
        address = _pci_address(path / "device")
        if address:
            found.append(_interface(base, path, address, rdma.pop(address, "")))
    found += [_verbs_only(base, name, address) for address, name in sorted(rdma.items()) if address]
    return tuple(sorted(found, key=lambda n: n.address))


def read_iommu(base: Path, devices: tuple[PciDevice, ...]) -> str:
    """Of the machine: "translated" or "passthrough" as its GPUs' groups are, "off" without a unit, "unknown"."""
    units = base / "sys/class/iommu"
    kinds = {d.iommu for d in devices if d.kind == "gpu" and d.iommu}
    if kinds:
        return "translated" if "translated" in kinds else "passthrough"
    if not units.is_dir():
        return "unknown"
    return "off" if not _children(units) else "on"


def near(devices: Mapping[str, PciDevice], one: str, other: str) -> str:
    """How two devices meet: "switch", "root" (one root complex), "node" (one memory node), "across", or "unknown"."""
    a, b = devices.get(one), devices.get(other)
    if a is None or b is None:
        return "unknown"
    if set(bridges_above(devices, one)) & set(bridges_above(devices, other)):
        return "switch"
    if a.host == b.host:
        return "root"
    return "node" if a.node == b.node else "across"


def bridges_above(devices: Mapping[str, PciDevice], address: str) -> tuple[str, ...]:
    """Addresses of the bridges from the one just above `address` to the root port."""
    found, at = [], devices[address].parent
    while at in devices:
        found.append(at)
        at = devices[at].parent
    return tuple(found)


def switch_of(devices: Mapping[str, PciDevice], address: str) -> str:
    """The upstream port of the topmost switch above a device, "" without one."""
    if address not in devices:
        return ""
    ups = [a for a in bridges_above(devices, address) if devices[a].kind == "switch up"]
    return ups[-1] if ups else ""


def redirected(devices: Mapping[str, PciDevice], address: str) -> tuple[str, ...]:
    """Bridges above a device whose ACS sends traffic between peers through the root."""
    return tuple(
        a for a in bridges_above(devices, address) if any("redirect" in f for f in devices[a].acs or ())
    )


def narrowed(devices: Mapping[str, PciDevice], device: PciDevice) -> str:
    """ "x8 of x16" where a link has fewer lanes than both its ends could have, else "".

    A lower speed is no fault by itself: GPUs slow their link while they idle.
    """
    above = devices.get(device.parent)
    could = min(device.max_width, above.max_width if above and above.max_width else device.max_width)
    return f"x{device.width} of x{could}" if 0 < device.width < could else ""


# ------------------------------------------------------------------ reading


def _paths(base: Path) -> dict[str, Path]:
    return {
        p.name: Path(os.path.realpath(p))
        for p in _children(base / "sys/bus/pci/devices")
        if _ADDRESS.fullmatch(p.name) and not (p / "physfn").exists()
    }


def _above(path: Path) -> tuple[str, ...]:
    """Bridges on a device's path, from the root port down."""
    return tuple(part for part in path.parts[:-1] if _ADDRESS.fullmatch(part))


def _end_kind(path: Path) -> str:
    """What a device is if the tree is drawn for its sake, else ""."""
    code, vendor = text(path / "class").strip(), text(path / "vendor").strip()
    if code.startswith("0x02"):
        return "nic"
    if not vendor.endswith(_NVIDIA):
        return ""
    return "gpu" if code.startswith(("0x0300", "0x0302")) else "nvswitch" if code.startswith("0x0680") else ""


def _bridge_kind(chain: tuple[str, ...], upstream: set[str]) -> str:
    """By its place: under the host bridge a root port; below, up and down ports of switches alternate."""
    if len(chain) == 1:
        return "root port"
    if len(chain) % 2 == 1:
        return "switch down"
    return "switch up" if chain[-1] in upstream else "bridge"


def _device(path: Path, kind: str) -> PciDevice:
    above = _above(path)
    hosts = [p for p in path.parts if p.startswith("pci")]
    return PciDevice(
        address=path.name,
        kind=kind,
        parent=above[-1] if above else "",
        host=hosts[-1] if hosts else "",
        node=number(path / "numa_node", -1),
        ids=":".join(text(path / n).strip().removeprefix("0x") for n in ("vendor", "device")),
        speed=_speed(path / "current_link_speed"),
        width=number(path / "current_link_width", 0),
        max_speed=_speed(path / "max_link_speed"),
        max_width=number(path / "max_link_width", 0),
        acs=_acs(path / "config") if kind in _BRIDGES else None,
        iommu=_group_kind(path / "iommu_group"),
    )


def _speed(path: Path) -> float:
    """ "32.0 GT/s PCIe" is 32.0; "Unknown" is 0."""
    word = text(path).strip().partition(" ")[0]
    return float(word) if re.fullmatch(r"\d+(\.\d+)?", word) else 0.0


def _group_kind(group: Path) -> str:
    kind = text(group / "type").strip()
    return "passthrough" if kind == "identity" else "translated" if kind else ""


def _acs(config: Path) -> tuple[str, ...] | None:
    """ACS functions that are on; () for a port without ACS; None where extended space cannot be read."""
    try:
        raw = config.read_bytes()
    except OSError:
        return None
    if len(raw) <= _EXTENDED + 8:
        return None
    for at in _capabilities(raw):
        if struct.unpack_from("<H", raw, at)[0] == _ACS_CAPABILITY and at + 8 <= len(raw):
            control = struct.unpack_from("<H", raw, at + 6)[0]
            return tuple(name for bit, name in enumerate(ACS_FUNCTIONS) if control >> bit & 1)
    return ()


def _capabilities(raw: bytes) -> Iterator[int]:
    """Offsets of the extended capabilities: a header of id (16 bits), version (4) and next (12)."""
    at = _EXTENDED
    for _ in range(_MOST_CAPABILITIES):
        if at < _EXTENDED or at + 4 > len(raw):
            return
        yield at
        at = struct.unpack_from("<I", raw, at)[0] >> 20 & 0xFFC


def _interface(base: Path, path: Path, address: str, rdma: str) -> Nic:
    infiniband = text(path / "type").strip() == "32"  # ARPHRD_INFINIBAND
    speed = number(path / "speed", 0) / 1000
    return Nic(
        name=path.name,
        address=address,
        node=number(path / "device/numa_node", number(base / f"sys/bus/pci/devices/{address}/numa_node", -1)),
        layer="infiniband" if infiniband else "ethernet",
        speed=max(0.0, speed),
        up=text(path / "operstate").strip() == "up",
        rdma=rdma,
    )


def _verbs_only(base: Path, name: str, address: str) -> Nic:
    port = base / f"sys/class/infiniband/{name}/ports/1"
    rate = text(port / "rate").partition(" ")[0]
    return Nic(
        name=name,
        address=address,
        node=number(base / f"sys/bus/pci/devices/{address}/numa_node", -1),
        layer=text(port / "link_layer").strip().lower() or "infiniband",
        speed=float(rate) if rate.replace(".", "", 1).isdigit() else 0.0,
        up="ACTIVE" in text(port / "state"),
        rdma=name,
    )


def _pci_address(link: Path) -> str:
    """The PCI function that a class device belongs to (a virtio card hangs one level below it), "" for others."""
    if not link.exists():
        return ""
    parts = [p for p in Path(os.path.realpath(link)).parts if _ADDRESS.fullmatch(p)]
    return parts[-1] if parts else ""


def _children(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def text(path: Path) -> str:
    """A small file's text, or "" where this kernel does not have it."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def number(path: Path, default: int) -> int:
    """A small file's number, or `default` where there is none."""
    found = text(path).strip()
    return int(found) if found.lstrip("-").isdigit() else default
