"""Runs and records a pass of every size, the largest first, and keeps those that every rank of a group has."""

from __future__ import annotations

import time
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
