"""Big machines that nobody here has, put together by hand after public descriptions: their PCI trees, GPUs and cores.

    rtx-pro-6000-x8            two EPYC, each card on a root port of its own        no NVLink, peers reach each other
    rtx-pro-6000-x8-switches   two EPYC, two cards behind each of four switches     ACS redirects, as such boxes come
    rtx-4090-x4                two EPYC, each card on a root port of its own        the driver keeps peers apart
    dgx-h100                   two Xeon, a card and a network card on each switch   18 NVLinks to NVSwitches

`python -m tests.machines` writes them to tests/fixtures/topologies as `splitserve topology --json` would; a test compares.
"""

from __future__ import annotations

import json
from pathlib import Path

from splitserve.launch.nvml import Gpu, GpuPair
from splitserve.launch.pci import Nic, PciDevice
from splitserve.launch.topology import Core, Node, Topology

DIRECTORY = Path(__file__).parent / "fixtures" / "topologies"
GIB = 1 << 30
REDIRECTS = ("source validation", "request redirect", "completion redirect")
"""What firmware that leaves ACS on sets at a bridge."""

_APART = "the driver does not support it for this GPU"
_RTX = ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 96 * GIB, 95 * GIB, 120)
_GEFORCE = ("NVIDIA GeForce RTX 4090", 24 * GIB, 23 * GIB, 89)
_H100 = ("NVIDIA H100 80GB HBM3", 80 * GIB, 79 * GIB, 90)
_GPU_IDS = {_RTX[0]: "10de:2bb5", _GEFORCE[0]: "10de:2684", _H100[0]: "10de:2330"}
_NIC_IDS = "15b3:1021"
_CUDA = {"580.95.05": "13.0", "570.195.03": "12.8"}
_GROUP = {True: "passthrough", False: ""}


def slot(
    bus: int, node: int, *ends: tuple[str, str], gts: float, switch: bool, acs: tuple[str, ...] = ()
) -> list[PciDevice]:
    """A host bridge with one root port: its (kind, ids) directly below it, or behind a switch. The end buses follow."""
    host = f"pci0000:{bus:02x}"

    def make(address: str, kind: str, parent: str, ids: str) -> PciDevice:
        bridge = kind in ("root port", "switch up", "switch down")
        link = (gts, 16, gts, 16)
        return PciDevice(
            address, kind, parent, host, node, ids, *link, acs if bridge else None, _GROUP[not bridge]
        )

    root = make(f"0000:{bus:02x}:01.1", "root port", "", "1022:153e")
    if not switch:
        ((kind, ids),) = ends
        return [root, make(f"0000:{bus + 1:02x}:00.0", kind, root.address, ids)]
    up = make(f"0000:{bus + 1:02x}:00.0", "switch up", root.address, "1000:c030")
    found = [root, up]
    for n, (kind, ids) in enumerate(ends):
        down = make(f"0000:{bus + 2:02x}:{n:02x}.0", "switch down", up.address, "1000:c030")
        found += [down, make(f"0000:{bus + 3 + n:02x}:00.0", kind, down.address, ids)]
    return found


def cores(sockets: int, each: int) -> tuple[Core, ...]:
    """Two threads a core, numbered as Linux does; a node for each socket."""
    total = sockets * each
    return tuple(Core(n // each, n // each, n % each, (n, n + total)) for n in range(total))


def assemble(
    kind: tuple[str, int, int, int],
    pci: list[PciDevice],
    *,
    each: int,
    memory: int,
    p2p: str = "ok",
    nvlinks: int = 0,
    nics: tuple[Nic, ...] = (),
    driver: str = "580.95.05",
) -> Topology:
    """The whole machine, from its tree: GPUs in bus order, all pairs alike."""
    name, total, free, arch = kind
    devices = tuple(sorted(pci, key=lambda d: d.address))
    cards = [d for d in devices if d.kind == "gpu"]
    gpus = tuple(
        Gpu(n, name, f"GPU-{n:08d}", total, free, f"0000{d.address}", d.node, arch)
        for n, d in enumerate(cards)
    )
    count = range(len(gpus))
    cuda = _CUDA[driver]
    return Topology(
        cores=cores(2, each),
        nodes=(Node(0, memory // 2, memory // 2 - 14 * GIB), Node(1, memory // 2, memory // 2 - 14 * GIB)),
        gpus=gpus,
        cpu_quota=0.0,
        memory_total=memory,
        memory_free=memory - 28 * GIB,
        shm_free=memory // 2,
        pairs=tuple(GpuPair(a, b, p2p, nvlinks) for a in count for b in count if a < b),
        pci=devices,
        nics=nics,
        iommu="passthrough",
        driver=driver,
        cuda=cuda,
    )


def nic(name: str, device: PciDevice, layer: str, speed: float) -> Nic:
    return Nic(name, device.address, device.node, layer, speed, True, name if name.startswith("mlx") else "")


def rtx_pro_6000_x8() -> Topology:
    slots = [(b, 0) for b in (0x00, 0x10, 0x20, 0x30)] + [(b, 1) for b in (0x80, 0x90, 0xA0, 0xB0)]
    pci = [d for b, node in slots for d in slot(b, node, ("gpu", _GPU_IDS[_RTX[0]]), gts=32.0, switch=False)]
    lan = slot(0x40, 0, ("nic", "8086:1572"), gts=8.0, switch=False)
    return assemble(
        _RTX, pci + lan, each=32, memory=768 * GIB, nics=(nic("eno1", lan[-1], "ethernet", 10.0),)
    )


def rtx_pro_6000_x8_switches() -> Topology:
    two = [("gpu", _GPU_IDS[_RTX[0]])] * 2
    slots = [(0x00, 0), (0x10, 0), (0x80, 1), (0x90, 1)]
    pci = [d for b, node in slots for d in slot(b, node, *two, gts=32.0, switch=True, acs=REDIRECTS)]
    return assemble(_RTX, pci, each=64, memory=1536 * GIB)


def rtx_4090_x4() -> Topology:
    slots = [(0x00, 0), (0x10, 0), (0x80, 1), (0x90, 1)]
    pci = [
        d for b, node in slots for d in slot(b, node, ("gpu", _GPU_IDS[_GEFORCE[0]]), gts=16.0, switch=False)
    ]
    return assemble(_GEFORCE, pci, each=32, memory=768 * GIB, p2p=_APART, driver="570.195.03")


def dgx_h100() -> Topology:
    buses = [0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF]
    ends = (("gpu", _GPU_IDS[_H100[0]]), ("nic", _NIC_IDS))
    pci = [d for n, b in enumerate(buses) for d in slot(b - 3, n // 4, *ends, gts=32.0, switch=True)]
    pci += [
        d
        for b in (0x04, 0x07, 0x0A, 0x0D)
        for d in slot(b, 0, ("nvswitch", "10de:22a3"), gts=16.0, switch=False)
    ]
    cards = sorted((d for d in pci if d.kind == "nic"), key=lambda d: d.address)
    nics = tuple(nic(f"mlx5_{n}", d, "infiniband", 400.0) for n, d in enumerate(cards))
    return assemble(_H100, pci, each=56, memory=2048 * GIB, nvlinks=18, nics=nics)


MACHINES = {
    "rtx-pro-6000-x8": rtx_pro_6000_x8,
    "rtx-pro-6000-x8-switches": rtx_pro_6000_x8_switches,
    "rtx-4090-x4": rtx_4090_x4,
    "dgx-h100": dgx_h100,
}


def written(name: str) -> str:
    """The file of one machine."""
    return json.dumps(MACHINES[name]().to_dict(), separators=(",", ":")) + "\n"


if __name__ == "__main__":
    for each_name in MACHINES:
        (DIRECTORY / f"{each_name}.json").write_text(written(each_name))
