"""Compiled forms of kernels by the calls that lead to them. Triton works that out anew for every call, in 30 to 80 us.

    kernel, constants, types, devices, which pointers       the first time    Triton's own way, which compiles and tells
    are aligned, which sizes are 1 or multiples of 16  ──▶  from then on      the same form, started at once

Calls are told apart at least as finely as Triton tells them apart (its `specialize_impl`), and no finer where a kernel
does not want a parameter specialised: each call that is new here costs a step the 30 to 80 us once more. What Triton
reads from its settings (TRITON_DEBUG and the like) and from the globals that a kernel uses holds as it was at a form's
first call.

Everything else goes Triton's own way: the interpreter, hooks of profilers, arguments of other types, tensors of several
devices, versions of Triton that nobody has looked into.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, reduce
from operator import attrgetter, itemgetter, or_
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from splitserve import log
from splitserve.ops.kernels.archs import triton_version

_log = log.get(__name__)

FIRST_KNOWN, LAST_KNOWN = (3, 6), (3, 9)
"""Versions of Triton whose launcher takes what `Forms.start` gives it; 3.6 and 3.9 were read."""

ALIGNED = 16  # bytes of a pointer, or a size: what Triton specialises for
MOST_SIZES = 1 << 16  # that are remembered at once

_pointer, _device, _dtype = torch.Tensor.data_ptr, torch.Tensor.get_device, attrgetter("dtype")

_TENSORS = torch.Tensor, torch.nn.Parameter
_NUMBERS = int, float, bool, type(None)


class _Form(NamedTuple):
    """What Triton's launcher wants of it."""

    run: Any  # (x, y, z, stream, function, metadata, launch metadata, hook, hook, *arguments)
    function: int
    metadata: Any
    tail: tuple[Any, ...]  # the arguments after those of the call
    held: Any  # the kernel, whose number is in the key, and what Triton unloads when nobody holds it


def _width(size: int) -> int:
    """Bits of the type that Triton gives a size."""
    return next((b for b in (32, 64) if -(1 << b - 1) <= size < 1 << b - 1), 65)


def _kind(size: int) -> int:
    """What Triton makes of a size that it specialises: 1, or the width of its type, negative for multiples of 16."""
    return 1 if size == 1 else _width(size) if size % ALIGNED else -_width(size)


class _Remembered(dict[int, int]):
    """Of sizes that were met, what `work` says of them: a look-up is what a launch has time for."""

    def __init__(self, work: Callable[[int], int]) -> None:
        super().__init__()
        self._work = work

    def __missing__(self, size: int) -> int:
        if len(self) >= MOST_SIZES:
            self.clear()
        found = self[size] = self._work(size)
        return found


_kinds, _widths = _Remembered(_kind), _Remembered(_width)


class _Places:
    """Where the tensors and the sizes of a kernel's call are. Equal only to itself: it stands for both in keys."""

    def __init__(self, kernel: JITFunction[Any], types: tuple[type, ...]) -> None:
        self.kernel = kernel  # kept, so that nothing else gets its number
        tensors = [i for i, t in enumerate(types) if t in _TENSORS]
        others = [i for i, t in enumerate(types) if t not in _TENSORS]
        order = sorted(range(len(types)), key=[*tensors, *others].__getitem__)
        self.tensors, self.others, self.order = _picker(tensors), _picker(others), _picker(order)
        wanted = [not p.do_not_specialize for p in kernel.params]
        aligned = [wanted[i] and not kernel.params[i].do_not_specialize_on_alignment for i in tensors]
        self.aligned = _picker([j for j, a in enumerate(aligned) if a])  # among the tensors
        self.sizes = _picker([i for i, t in enumerate(types) if t is int and wanted[i]])
        self.widths = _picker([i for i, t in enumerate(types) if t is int and not wanted[i]])


def _places(kernel: Any, types: tuple[type, ...]) -> _Places | None:
    """None: not a kernel as it is known here, no tensors, or a type that nothing is known of."""
    known = type(kernel) is JITFunction and all(t in _TENSORS + _NUMBERS for t in types)
    if not known or not any(t in _TENSORS for t in types) or len(types) > len(kernel.params):
        return None
    return _Places(kernel, types)


def _picker(places: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Takes a tuple's elements at these places, as fast as Python can."""
    if len(places) > 1:
        return itemgetter(*places)
    start, stop = (places[0], places[0] + 1) if places else (0, 0)
    return itemgetter(slice(start, stop))


class Forms:
    """Those of one process. Several threads may start kernels: at worst two remember the same."""

    def __init__(self) -> None:
        self._forms: dict[Any, _Form] = {}
        self._places: dict[tuple[int, tuple[type, ...]], _Places] = {}

    def start(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        """As `kernel[grid](*args, **constants)`, for tensors on a GPU. Raises what Triton raises."""
        types = tuple(map(type, args))
        places = self._places.get((id(kernel), types)) or self._learn(kernel, types)
        if places is None:
            kernel[grid](*args, **constants)
            return
        tensors = places.tensors(args)
        pointers, devices = tuple(map(_pointer, tensors)), tuple(map(_device, tensors))
        aligned = places.aligned(pointers)
        askew = reduce(or_, aligned, 0) % ALIGNED and tuple(p % ALIGNED > 0 for p in aligned)
        active = driver.active
        device = active.get_current_device()
        key = (
            device, places, devices, askew, tuple(map(_dtype, tensors)),
            tuple(map(_kinds.__getitem__, places.sizes(args))), tuple(map(_widths.__getitem__, places.widths(args))),
            tuple(constants), tuple(constants.values()),
        )  # fmt: skip
        form = self._forms.get(key)
        if form is None or kernel.pre_run_hooks or not _idle():
            compiled = kernel[grid](*args, **constants)
            if form is None and len(set(devices)) == 1:
                self._remember(key, kernel, compiled, len(args), constants)
            return
        run, function, metadata, tail, _ = form
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        values = places.order(pointers + places.others(args))
        run(x, y, z, active.get_current_stream(device), function, metadata, None, None, None, *values, *tail)

    def _learn(self, kernel: Any, types: tuple[type, ...]) -> _Places | None:
        places = _places(kernel, types)
        if places is not None:
            self._places[id(kernel), types] = places
        return places

    def _remember(
        self, key: Any, kernel: Any, compiled: Any, count: int, constants: Mapping[str, Any]
    ) -> None:
        """`compiled` is what a call with `count` arguments led to."""
        given, rest = kernel.params[:count], kernel.params[count:]
        if compiled is None or any(p.is_constexpr for p in given) or not all(p.is_constexpr for p in rest):
            return
        tail = tuple(constants.get(p.name, p.default) for p in rest)
        self._forms[key] = _Form(
            compiled.run, compiled.function, compiled.packed_metadata, tail, (kernel, compiled)
        )


def _idle() -> bool:
    """Whether Triton would start a kernel and do nothing else, as far as its hooks go."""
    runtime, chains = triton.knobs.runtime, _idle_hooks()
    return (
        chains is not None
        and not (chains[0].calls or chains[1].calls)
        and runtime.launch_enter_hook is chains[0]
        and runtime.launch_exit_hook is chains[1]
        and runtime.add_stages_inspection_hook is None
    )


@cache
def _idle_hooks() -> tuple[Any, Any] | None:
    """Triton's chains of hooks before and after launches; None where Triton is not as this module expects it."""
    version = triton_version()
    try:
        known = FIRST_KNOWN <= tuple(int(n) for n in version.split(".")[:2]) <= LAST_KNOWN
        runtime = triton.knobs.runtime
        chains = runtime.launch_enter_hook, runtime.launch_exit_hook
        if (
            known
            and all(isinstance(c.calls, list) for c in chains)
            and hasattr(runtime, "add_stages_inspection_hook")
        ):
            return chains
    except (ValueError, AttributeError):
        pass
    _log.debug(
        "Triton %s is not known here: every kernel is started its own way, 30 us and more a call", version
    )
    return None
