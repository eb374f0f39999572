"""The device of one rank: which it is, what is free on it, and when its steps have ended. Runs nothing itself.

On the CPU a step has ended when its launch returns. On a GPU it runs on, and rows may leave, and freed rows may be
offered to a peer, only after it: a peer's write knows nothing of our stream. `Clock` tells, without ever waiting:

    launch(step n) ── kernels queued ── event n recorded          handoffs ask done(n): the event has passed, or not
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import psutil
import torch

from splitserve.engine.step import Step
from splitserve.engine.throttle import Launches, Pending
from splitserve.errors import CapacityError, ConfigError
from splitserve.ops.kernels.archs import ARCHS


def take(kind: str, *, rank: int, tp: int, gpus: Sequence[int] = ()) -> torch.device:
    """The rank's own device, made current, or the CPU.

    `gpus` has one of those that CUDA_VISIBLE_DEVICES lets it see for each rank, and may name one twice; empty: cuda:r.
    Raises ConfigError where there is no such GPU, or it is too old for bf16.
    """
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        built = torch.version.cuda or "no CUDA"
        raise ConfigError(
            f"device is cuda, and torch {torch.__version__} (built with {built}) finds no GPU",
            field="device",
            fix="look at `splitserve doctor`; a torch built for CUDA and its driver are needed, or device = 'cpu'",
        )
    _check_count(tp, count, gpus)
    device = torch.device("cuda", gpus[rank] if gpus else rank)
    torch.cuda.set_device(device)
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor < min(ARCHS):
        raise ConfigError(
            f"{torch.cuda.get_device_name(device)} is sm_{major}{minor}; sm_{min(ARCHS)} is the oldest that is served",
            field="device",
            fix="use a newer GPU, or device = 'cpu'",
        )
    return device


def _check_count(tp: int, count: int, gpus: Sequence[int]) -> None:
    if gpus and (len(gpus) != tp or max(gpus) >= count):
        raise ConfigError(
            f"gpus {list(gpus)} for {tp} ranks, {count} can be seen",
            field="gpus",
            fix=f"name one of 0 to {count - 1} for each rank, or leave gpus out",
        )
    if not gpus and tp > count:
        raise ConfigError(
            f"tp={tp} needs as many GPUs, {count} can be seen",
            field="tp",
            fix="lower tp, or let CUDA_VISIBLE_DEVICES name more",
        )


def sharers(gpus: Sequence[int], rank: int) -> int:
    """Ranks of this engine on the rank's GPU, itself included."""
    return gpus.count(gpus[rank]) if gpus else 1


def name_of(device: torch.device) -> str:
    """ "cpu", or the GPU's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def free_bytes(device: torch.device, *, ranks: int) -> int:
    """What one of the `ranks` on this device may have: its share of what nobody holds."""
    if device.type == "cpu":
        return psutil.virtual_memory().available // ranks
    torch.cuda.empty_cache()  # what loading has left in torch's hands is free as well
    return int(torch.cuda.mem_get_info(device)[0]) // ranks


def allocator(device: torch.device) -> Callable[[int], torch.Tensor]:
    """Memory that needs no transport's help. On a GPU NIXL registers what torch has allocated."""

    def allocate(nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)

    return allocate


@contextmanager
def in_memory(device: torch.device, what: str) -> Iterator[None]:
    """Turns a GPU that is full into a CapacityError with the sum."""
    try:
        yield
    except torch.OutOfMemoryError as e:
        free, total = torch.cuda.mem_get_info(device)
        ours = torch.cuda.memory_allocated(device)
        raise CapacityError(
            f"{what} does not fit on {name_of(device)}: of {total:,} bytes this rank holds {ours:,}, {free:,} are free",
            field="tp",
            fix="more GPUs (tp), a smaller model or fewer layers, or end what else runs on this GPU",
        ) from e


class Clock(Protocol):
    """Which steps have ended."""

    latest: int  # of the steps launched

    def done(self, index: int) -> bool:
        """Whether step `index`, and all before it, have ended. Never waits."""
        ...


class Clocked:
    """A Runner whose steps are followed by an event. One stream runs them, so they end in order."""

    def __init__(self, runner: Launches, *, event: Callable[[], torch.cuda.Event] = torch.cuda.Event) -> None:
        self._runner = runner
        self._event = event
        self._under_way: deque[tuple[int, torch.cuda.Event]] = deque()
        self.latest = -1

    def launch(self, step: Step) -> Pending:
        pending = self._runner.launch(step)
        event = self._event()
        event.record()
        self._under_way.append((step.index, event))
        self.latest = step.index
        self._forget()
        return pending

    def done(self, index: int) -> bool:
        self._forget()
        return not self._under_way or index < self._under_way[0][0]

    def _forget(self) -> None:
        while self._under_way and self._under_way[0][1].query():
            self._under_way.popleft()
