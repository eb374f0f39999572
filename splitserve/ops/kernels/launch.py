"""How a kernel is started, or only compiled: the one place where tensors meet Triton.

    CUDA tensors             the kernel runs on their device
    meta tensors             the kernel is compiled for the architecture that `compiling` names, and put on its tape
    CPU tensors              the interpreter runs it (TRITON_INTERPRET=1 must be set before the first import)

Launchers in ops/triton are the same code in all three cases, so that what is compiled ahead of time is what will run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from splitserve.ops.kernels.archs import FIRST_OVERLAP
from splitserve.ops.kernels.forms import Forms

WARP = 32

_OVERLAP: ContextVar[bool] = ContextVar("overlap", default=True)

_FORMS = Forms()

_STARTED: ContextVar[list[str] | None] = ContextVar("started", default=None)
"""Where names of kernels that run are put; None: nowhere."""


@dataclass(frozen=True)
class Compiled:
    """One specialisation of a kernel for one architecture."""

    kernel: str
    arch: int
    constants: dict[str, Any]  # constexprs and options as the launcher gave them
    cubin: bytes
    ptx: str
    shared: int  # bytes of shared memory
    num_warps: int


@dataclass
class Tape:
    """What launchers asked for while compiling; `device` is the number under which Triton knows the architecture."""

    arch: int
    once: frozenset[str] | None = (
        None  # a case's first form of each kernel is enough, and of these one of all cases
    )
    compiled: list[Compiled] = field(default_factory=list)
    begun: int = 0  # where the case at hand began

    def next_case(self) -> int:
        """How many forms there were before it."""
        self.begun = len(self.compiled)
        return self.begun

    def wants(self, kernel: str) -> bool:
        """Whether another form of it is to be compiled."""
        if self.once is None:
            return True
        since = 0 if kernel in self.once else self.begun
        return all(c.kernel != kernel for c in self.compiled[since:])


_TAPE: ContextVar[Tape | None] = ContextVar("tape", default=None)
"""The architecture that meta tensors stand for, in this thread; None outside `compiling`."""


class _Compiler:
    """Stands in for Triton's driver where there is no GPU: knows a target, loads and runs nothing."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, WARP)

    def get_current_device(self) -> int:
        return self.arch  # any number that differs between architectures: Triton caches by it

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextmanager
def compiling(arch: int, *, once: frozenset[str] | None = None) -> Iterator[Tape]:
    """Inside, launches with meta tensors compile for `arch` (90 is sm_90) and are recorded; nothing else may launch."""
    tape = Tape(arch, once)
    token = _TAPE.set(tape)
    driver.set_active(_Compiler(arch))
    try:
        yield tape
    finally:
        driver.set_active(None)  # the real one, when somebody asks for it
        _TAPE.reset(token)


@contextmanager
def one_by_one() -> Iterator[None]:
    """Inside, kernels start only when the one before has ended (see ops/triton/overlap.py for what is normal)."""
    token = _OVERLAP.set(False)
    try:
        yield
    finally:
        _OVERLAP.reset(token)


@contextmanager
def listing() -> Iterator[list[str]]:
    """The names of the kernels that are started inside, in order."""
    names: list[str] = []
    token = _STARTED.set(names)
    try:
        yield names
    finally:
        _STARTED.reset(token)


def on_compile(tell: Callable[[str], None] | None) -> None:
    """Call `tell` with the name of every kernel form that this process gets ready from now on; None: no more.

    A form that lies in Triton's cache on disk counts too: it is read and loaded while a step waits for it.
    """

    def hook(*, fn: Any, **_: Any) -> None:
        if tell is not None:
            tell(str(fn.name).rsplit(".", 1)[-1])

    triton.knobs.runtime.jit_post_compile_hook = hook if tell else None


def launch(
    kernel: Any,  # of triton.jit
    grid: tuple[int, ...],
    *args: Any,
    **constants: Any,  # constexprs, num_warps, num_stages
) -> None:
    """Start `kernel` on a grid of programs. Empty grids start nothing, except that they compile on meta tensors."""
    constants.setdefault(
        "enable_fp_fusion", True
    )  # else Triton's own default, which changes between versions
    first = (
        args[0] if isinstance(args[0], torch.Tensor) else next(a for a in args if isinstance(a, torch.Tensor))
    )
    if _OVERLAP.get() and arch_of(first) >= FIRST_OVERLAP:
        constants["launch_pdl"] = True
    if first.is_meta:
        _compile(kernel, grid, args, constants)
    elif min(grid) > 0:
        if (names := _STARTED.get()) is not None:
            names.append(kernel.__name__)
        if first.is_cuda:
            _FORMS.start(kernel, grid, args, constants)
        else:
            kernel[grid](*args, **constants)


def arch_of(x: torch.Tensor) -> int:
    """90 for a tensor on an sm_90; what is being compiled for meta tensors; 0 on the CPU (the interpreter)."""
    if x.is_cuda:
        return _arch_of(x.get_device())
    tape = _TAPE.get()
    return tape.arch if tape is not None and x.is_meta else 0


def num_processors(x: torch.Tensor) -> int:
    """Multiprocessors of x's device, for choosing how far to split; a large GPU's number where there is none."""
    return _num_processors(x.get_device()) if x.is_cuda else 132


@cache
def _arch_of(device: int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def _num_processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def interpreted() -> bool:
    """Whether TRITON_INTERPRET is set; kernels are what it was when they were defined."""
    return bool(triton.knobs.runtime.interpret)


def _compile(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    tape = _TAPE.get()
    if tape is None:
        raise RuntimeError(f"{kernel.__name__}: meta tensors outside `compiling`")
    if not tape.wants(kernel.__name__):
        return
    result = kernel.warmup(*args, grid=grid, **constants)
    names = [p.name for p in kernel.params if p.is_constexpr]
    given = dict(zip(kernel.arg_names, args, strict=False))
    values = {n: constants.get(n, given.get(n)) for n in names}
    options: dict[str, Any] = {n: constants[n] for n in ("num_warps", "num_stages") if n in constants}
    tape.compiled.append(
        Compiled(
            kernel.__name__,
            tape.arch,
            {**values, **options},
            result.asm["cubin"],
            result.asm["ptx"],
            result.metadata.shared,
            result.metadata.num_warps,
        )
    )
