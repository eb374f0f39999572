"""How fast a plain copy between two GPUs is: what the fabric doctor holds a transport's rates against. Decides nothing.

The copy is torch's, in one process that sees both: over peer memory where the driver has it, else through the host.
"""

from __future__ import annotations

import time
from statistics import median

import torch

from splitserve.engine import device


def copy_rate(source: int, target: int, nbytes: int, seconds: float) -> float:
    """Median GB/s of single copies of `nbytes` for about `seconds`, each waited for, after one that nobody counts.

    `source` and `target` are CUDA's numbers in this process, -1 for page-locked host memory.
    Raises ConfigError where there is no such GPU, torch's RuntimeError where it is full.
    """
    here, there = _memory(source, nbytes), _memory(target, nbytes)
    gpus = [i for i in {source, target} if i >= 0]
    _copy(here, there, gpus)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        begun = time.perf_counter()
        _copy(here, there, gpus)
        times.append(time.perf_counter() - begun)
    return nbytes / median(times) / 1e9


def _memory(index: int, nbytes: int) -> torch.Tensor:
    if index < 0:
        return torch.ones(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    return torch.ones(nbytes, dtype=torch.uint8, device=device.take("cuda", rank=0, tp=1, gpus=(index,)))


def _copy(source: torch.Tensor, target: torch.Tensor, gpus: list[int]) -> None:
    target.copy_(source, non_blocking=True)
    for index in gpus:
        torch.cuda.synchronize(index)
