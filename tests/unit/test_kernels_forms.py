"""Remembered forms of kernels: the one that Triton itself would start, whatever a call's pointers, sizes and constants.

Triton's own code decides; only its driver, and what compiles and loads, are stood in for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from splitserve.ops.kernels import forms
from splitserve.ops.kernels.forms import Forms

BYTES = torch.zeros(256, dtype=torch.uint8)
START = -BYTES.data_ptr() % 16  # BYTES[START:] is aligned


def _kernel(x, y, n, m, scale, flag, A: tl.constexpr, B: tl.constexpr = 7):  # type: ignore[no-untyped-def]
    pass


class Compiled:
    """A form: what it was compiled from, and the calls that started it."""

    packed_metadata = (4, 1, 0)

    def __init__(self, source: Any, options: dict[str, Any]) -> None:
        self.source, self.options = source, options
        self.function = id(self)
        self.calls: list[tuple[Any, ...]] = []

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *args: Any) -> None:
        self.calls.append(args)


class Driver:
    """Two devices of different architectures."""

    device = 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", (90, 120)[self.device], 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 100 + device


class Machine:
    """Kernels of a process on the stand-in, and how often Triton was asked."""

    def __init__(self, asked: list[str]) -> None:
        self.driver = Driver()
        self.asked = asked
        self.kernels = {
            "plain": JITFunction(_kernel),
            "loose": JITFunction(_kernel, do_not_specialize=["n", "m"], do_not_specialize_on_alignment=["y"]),
            "looser": JITFunction(_kernel, do_not_specialize=["x", "m"]),
        }
        self.forms = Forms()

    def own(self, kernel: str, args: tuple[Any, ...], constants: dict[str, Any]) -> Compiled:
        """The form that Triton starts."""
        found: Compiled = self.kernels[kernel][(3, 2)](*args, **constants)
        return found

    def started(self, kernel: str, args: tuple[Any, ...], constants: dict[str, Any]) -> list[Compiled]:
        """The forms that ours starts."""
        everything = [
            c
            for k in self.kernels.values()
            for caches in k.device_caches.values()
            for c in caches[0].values()
        ]
        before = {c.function: len(c.calls) for c in everything}
        self.forms.start(self.kernels[kernel], (3, 2), args, constants)
        return [c for c in everything if len(c.calls) > before[c.function]]


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """One for all: what one test has remembered must not mislead another."""
    asked: list[str] = []
    binder, run = JITFunction.create_binder, JITFunction.run

    def create_binder(self: Any) -> Any:
        made = binder(self)
        self.compile = lambda source, target, options, **_: Compiled(source, options)
        return made

    def counted(self: Any, *args: Any, **kw: Any) -> Any:
        asked.append(self.__name__)
        return run(self, *args, **kw)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "create_binder", create_binder)
        patch.setattr(JITFunction, "run", counted)
        found = Machine(asked)
        driver.set_active(found.driver)
        yield found
        driver.set_active(None)


def at(offset: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return BYTES[START + offset : START + offset + 64].view(dtype)


def call(n: int = 48, m: int = 5, *, x: int = 0, y: int = 0) -> tuple[Any, ...]:
    return (at(x), at(y), n, m, 0.5, True)


sizes = st.one_of(
    st.integers(0, 64),
    st.sampled_from([2**31 - 1, 2**31, 2**31 - 16, 2**32, 2**63 - 1, 2**63, -1, -16, -(2**31) - 1]),
)
tensors = st.builds(
    at, st.sampled_from([0, 8, 16, 24]), st.sampled_from([torch.uint8, torch.int64, torch.float32])
)
constants = st.fixed_dictionaries(
    {"A": st.sampled_from(["e4m3", "e2m1"])},
    optional={
        "B": st.sampled_from([7, 16]),
        "num_warps": st.sampled_from([4, 8]),
        "launch_pdl": st.booleans(),
        "enable_fp_fusion": st.booleans(),
    },
)
calls = st.tuples(
    st.sampled_from(["plain", "loose", "looser"]),
    st.sampled_from([0, 1]),
    st.tuples(
        st.one_of(tensors, st.none()), tensors, sizes, sizes, st.floats(allow_nan=False), st.booleans()
    ),
    constants,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(calls, min_size=1, max_size=12))
def test_starts_what_triton_would_start(machine: Machine, made: list[Any]) -> None:
    for kernel, device, args, given_ in made:
        machine.driver.device = device
        want = machine.own(kernel, args, given_)
        theirs = want.calls[-1]
        for _ in range(2):  # at the latest the second is remembered
            assert machine.started(kernel, args, dict(given_)) == [want]
        ours = want.calls[-1]
        assert ours[:6] == theirs[:6]  # grid, stream, function, metadata
        addresses = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in theirs[9:])
        assert ours[9:] == addresses


@pytest.mark.parametrize(
    "other",
    [
        {"n": 1},
        {"n": 49},
        {"n": 2**31},
        {"x": 8},
        {"y": 8},
        {"x": 8, "y": 8},
    ],
    ids=str,
)
def test_other_pointers_and_sizes_are_other_forms(machine: Machine, other: dict[str, int]) -> None:
    machine.driver.device = 0
    first = machine.own("plain", call(), {"A": "x"})
    second = machine.own("plain", call(**other), {"A": "x"})
    assert first is not second
    for _ in range(2):
        assert machine.started("plain", call(), {"A": "x"}) == [first]
        assert machine.started("plain", call(**other), {"A": "x"}) == [second]


def test_triton_is_asked_once_for_each_kind_of_call(machine: Machine) -> None:
    machine.driver.device = 0
    machine.forms.start(machine.kernels["plain"], (3, 2), call(16, 3), {"A": "once"})
    asked = len(machine.asked)
    for n in range(32, 320, 16):
        machine.forms.start(machine.kernels["plain"], (n, 1), call(n, 3), {"A": "once"})
    assert len(machine.asked) == asked


def test_what_a_kernel_does_not_specialise_makes_no_new_call(machine: Machine) -> None:
    machine.driver.device = 0
    machine.forms.start(machine.kernels["loose"], (3, 2), call(16, 3), {"A": "same"})
    asked = len(machine.asked)
    for args in (call(1, 16), call(17, 1), call(16, 3, y=8)):
        machine.forms.start(machine.kernels["loose"], (3, 2), args, {"A": "same"})
    assert len(machine.asked) == asked
    machine.forms.start(machine.kernels["loose"], (3, 2), call(16, 3, x=8), {"A": "same"})
    machine.forms.start(machine.kernels["loose"], (3, 2), call(2**40, 3), {"A": "same"})
    assert len(machine.asked) == asked + 2


def test_a_kernel_that_overlaps_is_not_the_one_that_does_not(machine: Machine) -> None:
    machine.driver.device = 0
    for _ in range(2):
        pdl = machine.own("plain", call(), {"A": "pdl", "launch_pdl": True})
        without = machine.own("plain", call(), {"A": "pdl"})
        assert (pdl.options["launch_pdl"], without.options["launch_pdl"]) == (True, False)
        assert machine.started("plain", call(), {"A": "pdl", "launch_pdl": True}) == [pdl]
        assert machine.started("plain", call(), {"A": "pdl"}) == [without]


def asks(machine: Machine, args: tuple[Any, ...], given_: dict[str, Any]) -> bool:
    """Whether a call that came before goes Triton's own way again."""
    machine.driver.device = 0
    machine.forms.start(machine.kernels["plain"], (1,), args, dict(given_))
    asked = len(machine.asked)
    machine.forms.start(machine.kernels["plain"], (1,), args, dict(given_))
    return len(machine.asked) > asked


def test_hooks_are_called(machine: Machine) -> None:
    assert not asks(machine, call(), {"A": "hooks"})
    seen: list[Any] = []
    enter = triton.knobs.runtime.launch_enter_hook
    enter.add(seen.append)
    try:
        assert asks(machine, call(), {"A": "hooks"})
    finally:
        enter.remove(seen.append)
    machine.kernels["plain"].add_pre_run_hook(lambda *_, **__: None)
    try:
        assert asks(machine, call(), {"A": "hooks"})
    finally:
        machine.kernels["plain"].pre_run_hooks.clear()
    assert not asks(machine, call(), {"A": "hooks"})


def test_what_is_not_understood_goes_its_own_way(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asks(machine, (*call(), "positional"), {})  # a constant: its value counts, not its kind
    assert asks(machine, (*call(), 16), {})
    assert asks(machine, call()[:-1], {"flag": True, "A": "keyword"})
    monkeypatch.setattr(forms, "_device", lambda tensor: tensor.storage_offset())
    assert asks(machine, call(x=0, y=16), {"A": "two devices"})
    assert not asks(machine, call(x=16, y=16), {"A": "two devices"})


@pytest.mark.parametrize("version", ["3.5.1", "4.0.0", "", "3.x"])
def test_an_unknown_triton_is_left_alone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert not asks(machine, call(), {"A": "version"})
    forms._idle_hooks.cache_clear()
    monkeypatch.setattr(forms, "triton_version", lambda: version)
    with caplog.at_level("DEBUG", "splitserve"):
        assert asks(machine, call(), {"A": "version"})
    forms._idle_hooks.cache_clear()
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [f"Triton {version} is not known here"]
