"""A tensor parallel group inside one test process: a thread for each rank, over real gloo or NCCL."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from splitserve.dist.group import TorchGroup


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def on_ranks(
    size: int, work: Callable[[TorchGroup], Any], *, timeout_s: float = 30.0, device: str = "cpu"
) -> list[Any]:
    """Results of `work` on each rank of a fresh group."""
    port = free_port()

    def rank(r: int) -> Any:
        group = TorchGroup(r, size, host="127.0.0.1", port=port, timeout_s=timeout_s, device=device)
        try:
            return work(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))
