"""Where a process's memory comes from: set it before anything is allocated, and read back what holds. Linux only.

The words are numactl's: "bind" takes pages from one node and from nowhere else, "prefer" from it while it has some,
"interleave" from all nodes in turn, "none" leaves the system's choice (the node of the cpu that touches first). Threads
inherit a policy from the thread that starts them, so it must be set before a process has several.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from splitserve.errors import ConfigError

POLICIES = ("auto", "bind", "prefer", "interleave", "none")
_MODES = {"none": 0, "prefer": 1, "bind": 2, "interleave": 3}  # linux/mempolicy.h
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_WORD = 64


@dataclass(frozen=True)
class Binding:
    """What the kernel says of a running process: cpus it may use, and its memory policy, as "bind:0" or "default"."""

    cpus: tuple[int, ...]
    memory: str


def set_policy(policy: str, nodes: tuple[int, ...]) -> None:
    """Bind this thread and all that it will start. ConfigError where the system refuses; "none" does nothing."""
    if policy in ("auto", "none") or not nodes:
        return
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise ConfigError(
            f"memory_bind = {policy!r} is not known on {platform.machine()}",
            field="memory_bind",
            fix='memory_bind = "none"',
        )
    words = [0] * (max(nodes) // _WORD + 1)
    for node in nodes:
        words[node // _WORD] |= 1 << (node % _WORD)
    mask = (ctypes.c_ulong * len(words))(*words)
    libc = ctypes.CDLL(None, use_errno=True)
    # maxnode counts one bit more than the mask has: the kernel subtracts one (set_mempolicy(2), BUGS).
    if libc.syscall(number, _MODES[policy], mask, len(words) * _WORD + 1):
        error = os.strerror(ctypes.get_errno())
        raise ConfigError(
            f"memory cannot be bound ({policy} to node {short_list(nodes)}): {error}",
            field="memory_bind",
            fix='containers may forbid it (docker: --cap-add SYS_NICE); memory_bind = "none" does without',
        )


def online_nodes(root: Path = Path("/sys/devices/system/node")) -> tuple[int, ...]:
    """Nodes that have memory; (0,) where the kernel does not tell."""
    return tuple(parse_list(_text(root / "has_memory"))) or (0,)


def read_binding(pid: int, root: Path = Path("/proc")) -> Binding:
    """Cpus and memory policy of a process. Empty where it has gone; memory is "" where the kernel does not tell."""
    return Binding(_cpus(root / str(pid) / "status"), _policy(root / str(pid) / "numa_maps"))


def expected_policy(policy: str, nodes: tuple[int, ...]) -> str:
    """What `read_binding` should say after `set_policy`."""
    return "default" if policy in ("auto", "none") or not nodes else f"{policy}:{short_list(nodes)}"


def share_of(cpus: tuple[int, ...], rank: int, size: int) -> tuple[int, ...]:
    """The cpus of one rank: an equal part of the engine's, or all of them when there are fewer than ranks."""
    if len(cpus) < size:
        return cpus
    return cpus[len(cpus) * rank // size : len(cpus) * (rank + 1) // size]


def parse_list(text: str) -> list[int]:
    """The kernel's lists of numbers: '0-2,5' is [0, 1, 2, 5]; empty text is []."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        if part:
            low, _, high = part.partition("-")
            numbers.extend(range(int(low), int(high or low) + 1))
    return numbers


def _cpus(status: Path) -> tuple[int, ...]:
    for line in _text(status).splitlines():
        name, _, value = line.partition(":")
        if name == "Cpus_allowed_list":
            return tuple(parse_list(value))
    return ()


def _policy(numa_maps: Path) -> str:
    """Of the process's heap: libraries may set policies of their own for other ranges."""
    lines = [line.split() for line in _text(numa_maps).splitlines()]
    heap = [words[1] for words in lines if "heap" in words[2:]]
    first = [words[1] for words in lines if len(words) > 1][:1]
    return (heap or first or [""])[0].replace("prefer (many)", "prefer")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def short_list(numbers: tuple[int, ...]) -> str:
    """Short as the kernel writes it: (0, 1, 2, 5) is '0-2,5'."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and parts[-1][-1] == n - 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
