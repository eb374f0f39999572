"""Compiled loops own their scratch memory until they give it back: nothing takes an array's address and outlives it."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import splitserve.ops.cpu
from splitserve.ops.cpu import memory

PACKAGE = Path(splitserve.ops.cpu.__file__).parent
MAKERS = {"empty", "zeros", "ones", "full", "array", "arange", "empty_like", "zeros_like"}


def _compiled() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions that numba compiles: what is decorated so, and pieces.do, which is handed over."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                marks = {
                    d.func.id
                    for d in node.decorator_list
                    if isinstance(d, ast.Call) and isinstance(d.func, ast.Name)
                }
                if "compiled" in marks or (file.name, node.name) == ("pieces.py", "do"):
                    yield f"{file.relative_to(PACKAGE)}:{node.name}", node


FUNCTIONS = dict(_compiled())


def _calls(function: ast.FunctionDef) -> list[str]:
    found = [n.func for n in ast.walk(function) if isinstance(n, ast.Call)]
    return [
        f.id if isinstance(f, ast.Name) else f.attr for f in found if isinstance(f, ast.Name | ast.Attribute)
    ]


def test_the_loops_are_found():
    assert {"products.py:product", "paged.py:attend", "v4/products.py:mix", "pieces.py:do"} <= set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_loop_makes_arrays(name):
    """numba frees an array after the last line that names it, whoever still has its address."""
    function = FUNCTIONS[name]
    assert not [n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute) and n.attr == "ctypes"]
    assert not MAKERS & set(_calls(function))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_taken_is_given_back(name):
    """As often as it is taken, as the last thing that is done, and without a way out before."""
    function = FUNCTIONS[name]
    taken = sum(c in {"take_floats", "take_integers"} for c in _calls(function))
    if not taken or name.startswith("memory.py"):
        return
    last = [ast.unparse(s) for s in function.body[-taken:]]
    assert all(s.startswith("give_back(") for s in last), last
    assert len(set(last)) == taken
    assert not any(isinstance(n, ast.Return) for n in ast.walk(function))


def test_memory_is_aligned_and_as_long_as_asked_for():
    from splitserve.ops.cpu.compiled import compiled
    from splitserve.ops.cpu.vector import floats_at

    @compiled()
    def fill(count):
        at = memory.take_floats(count)
        numbers = floats_at(at)
        total = 0.0
        for i in range(count):
            numbers[i] = i
        for i in range(count):
            total += numbers[i]
        memory.give_back(at)
        return at, total

    for count in (0, 1, 15, 16, 17, 100_000):
        at, total = fill(count)
        assert at
        assert at % 64 == 0
        assert total == count * (count - 1) / 2


OVERWRITTEN = """
import torch
from splitserve.ops import cpu, ref
torch.manual_seed(0)
x, w = torch.randn(33, 64), torch.randn(50, 64)
torch.testing.assert_close(cpu.linear(x, w), ref.linear(x, w), atol=1e-4, rtol=1e-4)
view, pages = torch.randn(4, 2, 16, 32), torch.arange(4)
q = torch.randn(40, 4, 16)
mine = cpu.attend_prefill(q, view, cpu.plan_prefill(pages, 60, slice(0, 40), 16), 0.25)
theirs = ref.attend_prefill(q, view, ref.plan_prefill(pages, 60, slice(0, 40), 16), 0.25)
torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
"""


def test_results_stand_where_freed_memory_is_overwritten():
    """glibc fills what is freed with large numbers: scratch that was freed too early shows as a wrong result."""
    env = {**os.environ, "MALLOC_PERTURB_": "127", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", OVERWRITTEN], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
