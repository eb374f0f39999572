"""Compiles every kernel for a list of architectures, without a GPU, into a cache that can be shipped.

The cache is Triton's own directory: an engine that starts with TRITON_CACHE_DIR set to it finds its kernels compiled,
as long as it has the same version of Triton.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from splitserve.ops.kernels.archs import ARCHS, FIRST_OVERLAP, SHARED_LIMIT
from splitserve.ops.kernels.machine_code import Code, inspect


@dataclass(frozen=True)
class Built:
    """One specialisation of one kernel."""

    case: str
    kernel: str
    arch: int
    constants: str  # what tells it from the kernel's others
    shared: int  # bytes
    code: Code
    is_matrix: bool
    follows: bool = True  # waits for the kernel before it, where one may start before that has ended
    error: str = ""  # the compiler's, where there is no code

    @property
    def problem(self) -> str:
        """What is wrong with it; empty: nothing."""
        if self.error:
            return self.error
        limit = SHARED_LIMIT[self.arch] * 1024
        if self.shared > limit:
            return f"needs {self.shared:,} bytes of shared memory; sm_{self.arch} has {limit:,}"
        if self.code.spilled:
            return f"spills {self.code.spilled} bytes of registers"
        if self.is_matrix and not self.code.tensor:
            return "has no instruction of the tensor cores"
        if self.arch >= FIRST_OVERLAP and not self.follows:
            return "does not call `follow`: it would read what the kernel before it has not written yet"
        return ""


def build(
    archs: Sequence[int] = ARCHS, *, cache: Path | None = None, jobs: int | None = None, quick: bool = False
) -> list[Built]:
    """Compiles all cases of the catalogue for all of `archs` in `jobs` processes (all cores, if not given).

    With `quick` only matrix kernels are compiled in each of their forms, and of others one form of each case.
    """
    if cache is not None:
        os.environ["TRITON_CACHE_DIR"] = str(cache)  # read by the compiler, here and in the processes
    from splitserve.ops.kernels.catalogue import cases

    work = [(case.name, arch, quick) for case in cases() for arch in archs]
    with ProcessPoolExecutor(jobs or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        return [built for some in pool.map(_build_case, work) for built in some]


def missing(built: Iterable[Built], archs: Sequence[int]) -> list[str]:
    """Kernels that exist and were not compiled for some architecture, with it."""
    from splitserve.ops.kernels.catalogue import kernels

    have = {(b.kernel, b.arch) for b in built}
    absent = {(name, arch) for name in kernels() for arch in archs} - have
    return sorted(f"{name} for sm_{arch}" for name, arch in absent if not (name in EIGHT_BITS and arch < 89))


EIGHT_BITS = {"weigh8"}
"""Kernels that need products of eight bits; elsewhere their work is done in bf16, with the same result."""


def _build_case(work: tuple[str, int, bool]) -> list[Built]:
    """In a process of its own: compiles one case for one architecture and looks at the result."""
    name, arch, quick = work
    from splitserve.ops.kernels.catalogue import cases, kernels
    from splitserve.ops.kernels.launch import compiling

    is_matrix = kernels()
    broken = []
    once = frozenset(k for k, matrix in is_matrix.items() if not matrix) if quick else frozenset()
    with compiling(arch, once=once) as tape:
        try:
            next(c for c in cases() if c.name == name).start(arch)
        except (CompilationError, OutOfResources, PTXASError, RuntimeError) as e:
            broken = [Built(name, "?", arch, "", 0, Code(0, 0, ()), False, error=_reason(e))]
    unique = {c.cubin: c for c in tape.compiled}
    return broken + [
        Built(
            name,
            c.kernel,
            arch,
            _short(c.constants),
            c.shared,
            inspect(c.cubin),
            is_matrix[c.kernel],
            "griddepcontrol.wait" in c.ptx,
        )
        for c in unique.values()
    ]


def _reason(e: BaseException) -> str:
    """The innermost error's last lines: Triton wraps one for each call."""
    while e.__cause__ is not None:
        e = e.__cause__
    return f"{type(e).__name__}: {str(e)[-400:]}"


def _short(constants: dict[str, object]) -> str:
    return " ".join(f"{k}={v}" for k, v in constants.items() if v not in (False, "", None))
