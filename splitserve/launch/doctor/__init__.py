"""`splitserve doctor`: what a deployment needs, checked one by one, each with a verdict and the exact fix.

    gather.py, lanes.py ─▶ Facts ─▶ CHECKS: host.py, gpus.py, software.py ─▶ findings
    setup.py: which builds suit this machine, and what installs them

Reading and judging are apart: every verdict is tried in tests with facts made by hand. docs/doctor.md has a row for
each check, and a test compares. How fast the links are is measured by launch/fabric.py, not here.
"""

from __future__ import annotations

from collections.abc import Callable

from splitserve.launch.doctor import gpus, host, software
from splitserve.launch.doctor.facts import Facts
from splitserve.launch.doctor.finding import Finding, Verdict

CHECKS: tuple[tuple[str, Callable[[Facts], Verdict]], ...] = (
    ("python", software.python),
    ("torch", software.torch),
    ("nixl", software.nixl),
    ("driver", gpus.driver),
    ("cuda", gpus.cuda),
    ("kernels", gpus.kernels),
    ("gpu memory", gpus.gpu_memory),
    ("links", gpus.links),
    ("peers", gpus.peers),
    ("acs", gpus.acs),
    ("iommu", gpus.iommu),
    ("cuda_ipc", gpus.cuda_ipc),
    ("ucx", software.ucx),
    ("lanes", software.lanes),
    ("spinning", software.spinning),
    ("cpus", host.cpus),
    ("memory", host.memory),
    ("huge pages", host.huge_pages),
    ("shm", host.shared_memory),
    ("memlock", host.locked_memory),
    ("open files", host.open_files),
    ("disk", host.disk),
    ("clock", host.clock),
    ("ports", host.ports),
    ("environment", software.environment),
    ("models", software.models),
    ("placement", software.plan),
)
"""In the order of their lines: what is installed, GPUs and the ways between them, the host, the file."""


def examine(facts: Facts) -> list[Finding]:
    """The verdict of every check on these facts."""
    told = ((subject, check(facts)) for subject, check in CHECKS)
    return [Finding(subject, v.level, v.text, v.fix) for subject, v in told]
