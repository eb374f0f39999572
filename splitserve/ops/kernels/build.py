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

    With `quick` a case compiles the first form only of each kernel, and what multiplies nothing is compiled once.
    """
    if cache is not None:
        os.environ["TRITON_CACHE_DIR"] = str(cache)  # read by the compiler, here and in the processes
    from splitserve.ops.kernels.catalogue import cases

    names = [case.name for case in cases()]
    work: list[Work] = [(arch, (name,), False) for name in names for arch in archs]
    if quick:  # one process for each architecture, which knows what it has compiled
        work = [(arch, tuple(names), True) for arch in archs]
    with ProcessPoolExecutor(jobs or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        return [built for some in pool.map(_build_cases, work) for built in some]


def missing(built: Iterable[Built], archs: Sequence[int]) -> list[str]:
    """Kernels that exist and were not compiled for some architecture, with it."""
    from splitserve.ops.kernels.catalogue import kernels

    have = {(b.kernel, b.arch) for b in built}
    absent = {(name, arch) for name in kernels() for arch in archs} - have
    return sorted(f"{name} for sm_{arch}" for name, arch in absent if not (name in EIGHT_BITS and arch < 89))


EIGHT_BITS = {"weigh8", "weigh_many", "weigh_lanes", "round_places"}
"""Kernels that need products of eight bits; elsewhere their work is done in bf16, with the same result."""


Work = tuple[int, tuple[str, ...], bool]  # architecture, names of cases, quick


def _build_cases(work: Work) -> list[Built]:
    """In a process of its own: compiles cases for one architecture and looks at the results."""
    arch, names, quick = work
    from splitserve.ops.kernels.catalogue import cases, kernels
    from splitserve.ops.kernels.launch import Compiled, compiling

    is_matrix = kernels()
    once = frozenset(name for name, matrix in is_matrix.items() if not matrix)
    found: list[Built] = []
    made: dict[bytes, tuple[str, Compiled]] = {}
    with compiling(arch, once=once if quick else None) as tape:
        for case in (c for c in cases() if c.name in names):
            begun = tape.next_case()
            try:
                case.start(arch)
            except (CompilationError, OutOfResources, PTXASError, RuntimeError) as e:
                found.append(Built(case.name, "?", arch, "", 0, Code(0, 0, ()), False, error=_reason(e)))
            made |= {c.cubin: (case.name, c) for c in tape.compiled[begun:] if c.cubin not in made}
    for name, c in made.values():
        matrix = is_matrix[c.kernel]
        code, follows = inspect(c.cubin, is_matrix=matrix), "griddepcontrol.wait" in c.ptx
        found.append(Built(name, c.kernel, arch, _short(c.constants), c.shared, code, matrix, follows))
    return found


def _reason(e: BaseException) -> str:
    """The innermost error's last lines: Triton wraps one for each call."""
    while e.__cause__ is not None:
        e = e.__cause__
    return f"{type(e).__name__}: {str(e)[-400:]}"


def _short(constants: dict[str, object]) -> str:
    return " ".join(f"{k}={v}" for k, v in constants.items() if v not in (False, "", None))
