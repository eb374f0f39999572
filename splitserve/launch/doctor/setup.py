"""`doctor --setup`: which builds of torch, NIXL and Triton suit the driver found here, and how to install them.

    driver runs CUDA   GPUs             torch                NIXL
    none               none             cpu                  nixl
    12.x               up to sm_90      cu126                nixl-cu12
    12.8, 12.9         sm_100, sm_120   cu128 (2.11 only)    nixl-cu12
    13.x               any              cu130                nixl-cu13

The choice is pure; `run` does what it says, by this interpreter's own pip, with no shell between. Which builds there
are is read from torch's index: 2.11 for cu126, cu128 and cu130; 2.12 and 2.13 for cu126, cu130 and cu132. Builds before
cu128 have no kernels for sm_100 and newer.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from splitserve.errors import ConfigError, FetchError
from splitserve.launch.doctor.facts import Software
from splitserve.launch.topology import Topology

TORCH_INDEX = "https://download.pytorch.org/whl"
TORCH, NIXL, TRITON, NVML = "torch>=2.11,<3", "nixl>=1.5,<2", "triton>=3.6", "nvidia-ml-py>=12.560"
"""The ranges of pyproject.toml, which a test compares."""

TORCH_CU128 = "torch>=2.11,<2.12"  # the last with a build for it
_BLACKWELL = 100


@dataclass(frozen=True)
class Setup:
    """What to install: the torch requirement and its build, NIXL's packages, and why."""

    torch: str
    build: str  # cpu, cu126, cu128, cu130: the last part of the index
    nixl: tuple[str, ...]
    extras: tuple[str, ...]  # beside them
    why: str
    replaces: bool = False  # another build of torch is here, which pip would take for good enough

    def commands(self, python: str) -> list[list[str]]:
        """argv of each step for an interpreter, in order."""
        pip = [python, "-m", "pip", "install"]
        index = ["--index-url", f"{TORCH_INDEX}/{self.build}"]
        gpu = [TRITON] if self.build != "cpu" else []
        steps = [[python, "-m", "pip", "uninstall", "--yes", "torch", "triton"]] if self.replaces else []
        steps.append(
            [*pip, *index, self.torch, *gpu]
        )  # together: Triton must be the one that this torch wants
        if self.build == "cpu":
            return [*steps, [*pip, *self.nixl]]
        # `nixl` asks for the builds of every CUDA; alone, with the one that is needed, it is half the size.
        return [*steps, [*pip, "--no-deps", *self.nixl], [*pip, *self.extras]]


def choose(topology: Topology, software: Software) -> Setup:
    """What suits this machine. ConfigError where its driver is too old for any build."""
    chosen = _choose(topology)
    here = f"cu{software.torch_cuda.replace('.', '')}" if software.torch_cuda else "cpu"
    return replace(chosen, replaces="torch" in software.packages and here != chosen.build)


def _choose(topology: Topology) -> Setup:
    gpus = topology.gpus
    if not gpus:
        return Setup(TORCH, "cpu", (NIXL,), (), f"no GPU that NVML tells of ({topology.no_gpus or 'none'})")
    newest = max(g.arch for g in gpus)
    why = f"driver {topology.driver or '?'} runs CUDA up to {topology.cuda or '?'}, newest GPU sm_{newest}"
    major, minor = _cuda(topology)
    if major >= 13:
        return Setup(TORCH, "cu130", (NIXL, _nixl(13)), (NVML,), why)
    if newest >= _BLACKWELL and (major, minor) >= (12, 8):
        return Setup(TORCH_CU128, "cu128", (NIXL, _nixl(12)), (NVML,), why)
    if newest < _BLACKWELL and major == 12:
        return Setup(TORCH, "cu126", (NIXL, _nixl(12)), (NVML,), why)
    raise ConfigError(
        f"{why}: no build of torch 2.11 or newer runs on it",
        field="driver",
        fix="install driver 580 or newer (CUDA 13)",
    )


def show(setup: Setup, python: str) -> list[str]:
    """The reason and the commands as a person would type them."""
    return [f"# {setup.why}", *(shlex.join(argv) for argv in setup.commands(python))]


def run(
    setup: Setup,
    python: str,
    *,
    say: Callable[[str], None],
    call: Callable[[Sequence[str]], int] = subprocess.call,
) -> None:
    """Every step, stopping at the first that fails: FetchError with the command to try by hand."""
    for argv in setup.commands(python):
        say(shlex.join(argv))
        code = call(argv)
        if code:
            raise FetchError(
                f"this step of the set-up failed with exit code {code}: {shlex.join(argv)}",
                fix="pip's own words stand above; in an environment that pip may not change, make a venv first",
            )


def _nixl(cuda: int) -> str:
    return NIXL.replace("nixl", f"nixl-cu{cuda}")


def _cuda(topology: Topology) -> tuple[int, int]:
    """(13, 0); (0, 0) where the driver does not say."""
    major, _, minor = topology.cuda.partition(".")
    return int(major or 0), int(minor or 0)
