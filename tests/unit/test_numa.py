"""Memory policies, set for real in child processes and read back from the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve import numa

CHILD = """
import os, sys
from splitserve import numa
from splitserve.errors import ConfigError
try:
    numa.set_policy(sys.argv[1], tuple(map(int, sys.argv[2].split(","))))
except ConfigError as e:
    print("refused", e.field, e.fix)
else:
    held = [bytearray(1 << 20)]
    print(numa.read_binding(os.getpid()).memory)
"""

has_numa_maps = pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="a kernel without NUMA")


def child(policy: str, nodes: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, policy, nodes], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


@has_numa_maps
@pytest.mark.parametrize("policy", ["bind", "prefer", "interleave", "none"])
def test_a_policy_that_was_set_is_what_the_kernel_shows(policy: str) -> None:
    node = numa.online_nodes()[0]
    shown = child(policy, str(node))
    if shown.startswith("refused"):
        assert "memory_bind" in shown  # a container may forbid it, and is told what to do
        pytest.skip(shown)
    assert shown == numa.expected_policy(policy, (node,))


@has_numa_maps
def test_a_node_that_is_not_there_is_refused_with_the_fix() -> None:
    assert child("bind", "63").startswith("refused memory_bind")


def test_the_binding_of_a_process_is_read_from_proc() -> None:
    assert set(numa.read_binding(os.getpid()).cpus) == os.sched_getaffinity(0)
    assert numa.read_binding(2**22 + 1) == numa.Binding((), "")


@given(st.sets(st.integers(0, 300)))
def test_lists_are_written_as_the_kernel_writes_them(numbers: set[int]) -> None:
    assert set(numa.parse_list(numa.short_list(tuple(numbers)))) == numbers
