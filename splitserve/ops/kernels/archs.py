"""The architectures that kernels are built for, their limits, and the path that kernels take on a GPU, in one line.

Imports neither torch nor Triton: `up` and `doctor` show the line before anything heavy is loaded.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

from splitserve.errors import ConfigError

ARCHS = (80, 89, 90, 100, 120)
MEASURED = frozenset((90,))  # whose tiles were chosen by measurement
FIRST_FP8 = 89  # the first with products of eight bits
FIRST_OVERLAP = 90  # the first on which a kernel may start before its forerunner has ended

SHARED_LIMIT = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that one block may have."""


def parse_archs(text: str) -> tuple[int, ...]:
    """ "80,90" -> (80, 90). Raises ConfigError for what is no architecture that kernels are built for."""
    try:
        archs = tuple(int(part) for part in text.split(","))
    except ValueError:
        archs = ()
    unknown = [a for a in archs if a not in SHARED_LIMIT]
    if not archs or unknown:
        known = ",".join(map(str, ARCHS))
        raise ConfigError(
            f"--arch {text}: not a list of architectures", field="arch", fix=f"for instance --arch {known}"
        )
    return archs


def triton_version() -> str:
    """Of the installed Triton; empty: there is none."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


def is_tuned(arch: int) -> bool:
    """Whether the tiles for `arch` were measured on it; the others' are the default, smaller where that spills."""
    return arch in MEASURED


def kernel_path(
    gpus: Sequence[tuple[str, int]],  # name and architecture, 90 for sm_90, 0 where it is not known
) -> str:
    """One line: which kernels run on these GPUs, and on whose tiles."""
    if not gpus:
        return "on the CPU: compiled ones for float32, plain torch for other types"
    return "; ".join(_one(name, arch) for name, arch in dict.fromkeys(gpus))


def _one(name: str, arch: int) -> str:
    version = triton_version()
    if not version:
        return f"plain torch on {name}: Triton is not installed"
    if not arch:
        return f"{name}: its architecture is not known"
    if arch < min(ARCHS):
        return f"plain torch on {name}: it is sm_{arch}, and kernels need sm_{min(ARCHS)}"
    tiles = "own tiles" if is_tuned(arch) else "default tiles"
    eight = "e4m3 products" if arch >= FIRST_FP8 else "bf16 products of e4m3 numbers"
    where = f"Triton {version} on {name} (sm_{arch}, {tiles}, {eight})"
    return f"{where} for models in bf16, plain torch for others"
