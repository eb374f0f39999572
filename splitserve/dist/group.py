"""Tensor parallel groups: one rank alone, or several over torch's process groups (gloo on CPU, NCCL on CUDA).

They meet at a TCP store that rank 0 opens, on the given address only: the store and gloo know no passwords. The process
group is built directly and not through torch.distributed's global one, so that two groups fit in one process. Groups
implement `layers.forward.Group`.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch

from splitserve.errors import ConfigError, PeerLost, PortTaken, first_line


class SoloGroup:
    """A group of one: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:  # noqa: ARG002 - a Group joins along it
        return x

    def mailbox(self, x: torch.Tensor) -> None:
        return None

    def close(self) -> None:
        return None


class TorchGroup:
    """One rank of a group of several. A peer that dies, or is silent past `timeout_s`, raises PeerLost: no hang."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        host: str,
        port: int,
        device: str = "cpu",
        timeout_s: float = 60.0,
        listening: socket.socket | None = None,
    ) -> None:
        """Blocks until all ranks have met at host:port. Raises PeerLost when they do not in time, PortTaken.

        `listening` is rank 0's own socket at that address, where it has bound it before.
        """
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} of a group of {size}")
        self.rank, self.size = rank, size
        timeout = timedelta(seconds=timeout_s)
        try:
            self.store = _meet(rank, size, host=host, port=port, timeout=timeout, listening=listening)
            make = _gloo if device == "cpu" else _nccl
            self._group = make(self.store, rank, size, host=host, timeout=timeout)
        except RuntimeError as e:  # torch's DistNetworkError, DistStoreError and gloo's own are all of these
            raise PeerLost(
                f"rank {rank} of {size} did not meet its group at {host}:{port}: {first_line(e)}"
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

    def mailbox(self, x: torch.Tensor) -> None:  # noqa: ARG002 - dist/peers.py looks at it
        """No kernel reaches the other ranks by itself."""
        return None

    def tell(self, what: str, word: str) -> list[str]:
        """What every rank says about `what`, in rank order; once for each `what`. Goes by the store."""
        try:
            self.store.set(f"told/{what}/{self.rank}", word)
            return [self.store.get(f"told/{what}/{r}").decode() for r in range(self.size)]
        except RuntimeError as e:
            raise PeerLost(f"rank {self.rank} of {self.size} heard nothing: {first_line(e)}") from e

    def close(self) -> None:
        """Leave the group; the others' next collective fails. Idempotent."""
        self._group.abort()

    def _wait(self, what: str, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as e:
            raise PeerLost(f"{what} on rank {self.rank} of {self.size} failed: {first_line(e)}") from e


def make_group(
    rank: int, size: int, *, host: str = "127.0.0.1", port: int = 0, device: str = "cpu"
) -> SoloGroup | TorchGroup:
    """The group of a rank: alone when `size` is 1, else by way of host:port."""
    return SoloGroup() if size == 1 else TorchGroup(rank, size, host=host, port=port, device=device)


def _meet(
    rank: int, size: int, *, host: str, port: int, timeout: timedelta, listening: socket.socket | None
) -> torch.distributed.TCPStore:
    """The store of the group. torch would listen on every address, so rank 0 hands it a socket that is bound to one."""
    if rank:
        return torch.distributed.TCPStore(host, port, size, is_master=False, timeout=timeout)
    try:
        listening = listening or socket.create_server((host, port))
    except OSError as e:
        raise PortTaken(f"rank 0 cannot listen at {host}:{port}: {e.strerror or e}", field="port") from e
    return torch.distributed.TCPStore(
        host, port, size, is_master=True, timeout=timeout, master_listen_fd=listening.detach()
    )


# The two classes share methods and, in torch's stubs, no base: hence Any.


def _gloo(store: torch.distributed.Store, rank: int, size: int, *, host: str, timeout: timedelta) -> Any:
    gloo: Any = torch.distributed.ProcessGroupGloo  # its options are missing from torch's stubs
    options = gloo._Options()
    options._timeout = timeout
    # On one host stay on its loopback; else gloo's choice, the interface of the host's name.
    options._devices = [
        gloo.create_device(hostname=host) if _is_loopback(host) else gloo.create_default_device()
    ]
    return gloo(store, rank, size, options)


def _nccl(store: torch.distributed.Store, rank: int, size: int, *, host: str, timeout: timedelta) -> Any:  # noqa: ARG001
    options = torch.distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return torch.distributed.ProcessGroupNCCL(store, rank, size, options)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
