"""Cures two faults of vLLM 0.32's NIXL pair on few cores, from outside: python reads this file where PYTHONPATH has it.

As shipped a pair on two cores decodes at a third of its speed (benchmarks/serve/vllm_pair.py starts it either way):

1. NIXL's Python API sets the pause of its progress thread to 0, so that it spins a whole core while nothing moves.
   Here it pauses 100 us.
2. vLLM's NIXL worker moves the engine's thread to the last core of each NUMA node, which overrides the binding that
   was asked for: prefill's and decode's compute share one core. Here that call does nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

PAUSE_US = 100
_BINDINGS = ("nixl_cu12._bindings", "nixl_cu13._bindings")
_MOVER = "vllm.distributed.kv_transfer"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds NIXL's bindings as python would, and changes them once they are loaded."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if fullname not in _BINDINGS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        sys.meta_path.insert(0, self)
        loader: Any = spec.loader if spec else None
        if loader is not None:
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                delay_progress(module)

            loader.exec_module = exec_module
        return spec


def delay_progress(bindings: Any) -> None:
    """Let every agent's progress thread pause, whatever its configuration is given."""
    plain = bindings.nixlAgentConfig

    class Paused(plain):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, max(value, PAUSE_US) if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Paused
    print(f"repaired: NIXL's progress thread pauses {PAUSE_US} us", file=sys.stderr, flush=True)


def keep_binding() -> None:
    """Refuse what vLLM's connector asks of the kernel; everybody else's calls are as before."""
    move = os.sched_setaffinity

    def set_affinity(pid: int, cores: Any, /) -> None:
        if sys._getframe(1).f_globals.get("__name__", "").startswith(_MOVER):
            print(f"repaired: not moved to {sorted(cores)}", file=sys.stderr, flush=True)
            return
        move(pid, cores)

    os.sched_setaffinity = set_affinity


sys.meta_path.insert(0, _Finder())
keep_binding()
