"""Tensor parallel groups: one rank alone, or several over torch's process groups (gloo on CPU, NCCL on CUDA).

They meet at a TCP store that rank 0 opens. The process group is built directly and not through torch.distributed's
global one, so that two groups fit in one process. Groups implement `layers.forward.Group`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from splitserve.errors import ConfigError, PeerLost


class SoloGroup:
    """A group of one: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:  # noqa: ARG002 - a Group joins along it
        return x

    def close(self) -> None:
        return None


class TorchGroup:
    """One rank of a group of several. A peer that dies, or is silent past `timeout_s`, raises PeerLost: no hang."""

    def __init__(
        self, rank: int, size: int, *, host: str, port: int, device: str = "cpu", timeout_s: float = 60.0
    ) -> None:
        """Blocks until all ranks have come to the store at host:port. Raises PeerLost when they do not in time."""
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} of a group of {size}")
        self.rank, self.size = rank, size
        timeout = timedelta(seconds=timeout_s)
        try:
            store = torch.distributed.TCPStore(host, port, size, is_master=rank == 0, timeout=timeout)
            self._group = _process_group(store, rank, size, device=device, timeout=timeout)
        except RuntimeError as e:  # torch's DistNetworkError, DistStoreError and gloo's own are all of these
            raise PeerLost(
                f"rank {rank} of {size} did not meet its group at {host}:{port}: {_first_line(e)}"
            ) from e

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place; returns x."""
        self._wait("all_reduce", self._group.allreduce([x]))
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Parts of equal shape joined along `dim` in rank order."""
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._wait("all_gather", self._group.allgather([parts], [x.contiguous()]))
        return torch.cat(parts, dim)

    def close(self) -> None:
        """Leave the group; the others' next collective fails. Idempotent."""
        self._group.abort()

    def _wait(self, what: str, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as e:
            raise PeerLost(f"{what} on rank {self.rank} of {self.size} failed: {_first_line(e)}") from e


def make_group(
    rank: int, size: int, *, host: str = "127.0.0.1", port: int = 0, device: str = "cpu"
) -> SoloGroup | TorchGroup:
    """The group of a rank: alone when `size` is 1, else by way of host:port."""
    return SoloGroup() if size == 1 else TorchGroup(rank, size, host=host, port=port, device=device)


def _process_group(
    store: torch.distributed.Store, rank: int, size: int, *, device: str, timeout: timedelta
) -> Any:  # two classes that share methods and, in torch's stubs, no base
    if device == "cpu":
        return torch.distributed.ProcessGroupGloo(store, rank, size, timeout=timeout)
    options = torch.distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return torch.distributed.ProcessGroupNCCL(store, rank, size, options)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
