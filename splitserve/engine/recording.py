"""Runs and records a pass of every size, the largest first, and keeps those that every rank of a group has."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from splitserve import log
from splitserve.layers.forward import Group

_log = log.get(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Recorded(Generic[T]):
    sizes: dict[int, T]
    seconds: float  # that it took


def record_sizes(
    sizes: Sequence[int],  # ascending
    record: Callable[[int, Any, Any], T],  # of a size, a pool of memory and a stream; both None on a CPU
    *,
    device: torch.device,
    tp: Group,
    what: str,
    progress: Callable[[float], None],
) -> Recorded[T]:
    """Sizes for which memory is short are left out, with a warning, on all ranks: they must sum the same passes."""
    begun = time.monotonic()
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    stream = torch.cuda.Stream(device) if pool else None
    found: dict[int, T] = {}
    for i, size in enumerate(reversed(sizes)):
        try:
            found[size] = record(size, pool, stream)
        except torch.cuda.OutOfMemoryError as e:
            _log.warning("no graph for %d %s, memory is short: %s", size, what, e)
        progress((i + 1) / len(sizes))
    here = torch.tensor([[float(s in found) for s in sizes]], device=device)
    everywhere = tp.all_gather(here, dim=0).amin(0).tolist()
    common = {s for s, there in zip(sizes, everywhere, strict=True) if there}
    if set(found) - common:
        _log.warning("no graphs for %s %s: another rank's memory is short", sorted(set(found) - common), what)
    return Recorded({s: r for s, r in found.items() if s in common}, time.monotonic() - begun)


class BySize(ABC, Generic[T]):
    """What is recorded once for every size; a pass takes the next larger one."""

    def __init__(self, sizes: tuple[int, ...], what: str, *, device: torch.device, tp: Group) -> None:
        """`sizes` ascend; `what` they count, for the log."""
        self._sizes = sizes
        self._what = what
        self._device = device
        self._tp = tp
        self._ready: dict[int, T] = {}

    @property
    def most(self) -> int:
        """The largest size that is ready; 0 before `prepare`."""
        return max(self._ready, default=0)

    @torch.inference_mode()
    def prepare(self, progress: Callable[[float], None] = lambda _: None) -> float:
        """Run every size once, so that nothing is compiled later, and record it; the largest first, for its memory.

        Returns the seconds it took. Sizes for which a rank's memory is short are left out, with a warning.
        """
        found = record_sizes(
            self._sizes, self._record, device=self._device, tp=self._tp, what=self._what, progress=progress
        )
        self._ready = found.sizes
        return found.seconds

    def close(self) -> None:
        """Let go of the graphs. Before their group leaves: NCCL waits a minute for graphs that hold its sums."""
        if self._ready and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._ready.clear()

    @abstractmethod
    def _record(self, size: int, pool: Any, stream: Any) -> T:
        """Run a pass of `size` and record it; without a pool, on a CPU, it is only made ready."""
