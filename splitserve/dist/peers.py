"""Sums between the GPUs of one host through memory that they all can read. Not for ranks on several hosts.

A step of decoding sums a few kilobytes dozens of times, and NCCL's start costs more than the bytes. Here every rank
copies its part into a buffer that the others have mapped, waits for them, and adds up all parts by itself:

    rank 0   copy x0 │ all have copied │ b0 + b1 │ all have read
    rank 1   copy x1 │                 │ b0 + b1 │

Each rank adds in rank order, so all hold the same bits. The buffers are torch's symmetric memory (NVLink, or peer
access over PCIe), without multicast, which not every box has. One kernel does it all, and a CUDA graph may hold it.

Above some size NCCL is faster, since here every rank reads everything: `choose` measures where, once, at the start.
Short sums that another kernel could make by the way get a `Mailbox` instead: memory of every rank that such a kernel
writes its part into (ops/triton/exchange.py), and no kernel of ours runs at all.
Ranks that share a GPU, as tests on one GPU do, cannot have NCCL at all: there everything goes this way, piece by piece.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from splitserve import log
from splitserve.dist.group import TorchGroup
from splitserve.errors import ConfigError, first_line

_log = log.get(__name__)

BUFFER = 4 << 20
"""Bytes that each rank shares; longer sums go in pieces of it where there is nothing else."""

MAIL = 1 << 19
"""Numbers of the longest sum that a mailbox takes: 64 rows of 8,192, in 4 MiB for each rank's part."""

PROGRAMS = 4096
"""Programs of a kernel that may use a mailbox, each its own places in it."""

SIZES = tuple(1 << k for k in range(13, 23))
"""Bytes of the sums that are timed, 8 KiB to 4 MiB."""

_DTYPES = (torch.bfloat16, torch.float32)  # what torch's kernel adds up


@dataclass(frozen=True)
class Mailbox:
    """Memory on each rank that all can write to, in two halves of a place for every rank's part."""

    rank: int
    size: int
    half: int  # pairs of bf16 numbers in the longest sum
    addresses: torch.Tensor  # [size] int64: where each rank's mailbox lies for this one
    turns: torch.Tensor  # [PROGRAMS] int32
    memory: torch.Tensor  # this rank's own, kept alive


class Peers:
    """A buffer on each rank of `group`, mapped by all of them. Collective: all ranks make it, and call it, alike."""

    def __init__(
        self, group: TorchGroup, device: torch.device, *, shared: bool, nbytes: int = BUFFER
    ) -> None:
        """Raises RuntimeError where the GPUs cannot read each other's memory. `shared`: several ranks on one GPU."""
        if shared:
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        # Slow to import, and only for several GPUs. Its names are typed differently from one torch to the next.
        symmetric: Any = import_module("torch.distributed._symmetric_memory")
        c10d: Any = import_module("torch._C._distributed_c10d")

        self.rank, self.size = group.rank, group.size
        self._name = group.tell("peers", f"splitserve-{uuid.uuid4().hex}")[0]
        store = torch.distributed.PrefixStore(self._name, group.store)
        # torch looks for the store by the group's name; nothing else of this group is ever used.
        self._known = torch.distributed.ProcessGroup(store, group.rank, group.size)
        c10d._register_process_group(self._name, self._known)
        raw = symmetric.empty(nbytes // 4, dtype=torch.float32, device=device)
        self._memory: Any = symmetric.rendezvous(raw, self._name)
        box = symmetric.empty(2 * group.size * MAIL // 2, dtype=torch.int64, device=device).zero_()
        known = symmetric.rendezvous(box, self._name)
        self.mailbox = Mailbox(
            group.rank,
            group.size,
            MAIL // 2,
            torch.tensor(known.buffer_ptrs, dtype=torch.int64, device=device),
            torch.zeros(PROGRAMS, dtype=torch.int32, device=device),
            box,
        )
        torch.cuda.synchronize(device)
        group.tell("mailbox", "empty")  # nobody writes into one that its owner has yet to clear
        self._nbytes = nbytes
        self._buffers = {dtype: raw.view(dtype) for dtype in _DTYPES}

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place; returns x. x: contiguous, bf16 or float32, any length."""
        buffer = self._buffers[x.dtype]
        for part in x.view(-1).split(len(buffer)):
            torch.ops.symm_mem.one_shot_all_reduce_copy_out(
                buffer[: len(part)], part, "sum", self._name, out=part
            )
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Parts of equal shape joined along `dim` in rank order."""
        flat = x.contiguous().view(-1)
        found = torch.empty(self.size, len(flat), dtype=x.dtype, device=x.device)
        step = self._nbytes // x.element_size()
        for start in range(0, len(flat), step):
            part = flat[start : start + step]
            self._mine(part).copy_(part)
            self._memory.barrier(channel=0)
            for r in range(self.size):
                found[r, start : start + len(part)] = self._memory.get_buffer(r, (len(part),), x.dtype)
            self._memory.barrier(channel=1)
        return torch.cat(list(found.view(self.size, *x.shape)), dim)

    def _mine(self, like: torch.Tensor) -> torch.Tensor:
        return self._memory.get_buffer(self.rank, like.shape, like.dtype)  # type: ignore[no-any-return]


class PeerGroup:
    """A group of GPUs of one host: short sums through peers' memory, long ones and joins through the group itself."""

    def __init__(self, plain: TorchGroup, peers: Peers, *, upto: int, shared: bool) -> None:
        """`upto`: bytes of the longest sum that goes through peers' memory. `shared`: all of them have to."""
        self.rank, self.size = plain.rank, plain.size
        self._plain = plain
        self._peers = peers
        self._upto = upto
        self._shared = shared
        self._width = 0  # of the rows that the mailbox is for: its places are told apart by it

    @property
    def how(self) -> str:
        """For people: which way the sums go."""
        if self._shared:
            return "peer memory of one GPU that ranks share"
        return f"peer memory up to {self._upto:,} bytes, NCCL above" if self._upto else "NCCL"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place; returns x."""
        if self._shared or (x.nbytes <= self._upto and x.dtype in _DTYPES and x.is_contiguous()):
            return self._peers.all_reduce(x)
        return self._plain.all_reduce(x)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Parts of equal shape joined along `dim` in rank order."""
        return (self._peers if self._shared else self._plain).all_gather(x, dim)

    def mailbox(self, x: torch.Tensor) -> Mailbox | None:
        """For a kernel that sums rows like `x`, [T, width] bf16, by itself; always of one width. None: all_reduce."""
        if (
            not (self._upto or self._shared)
            or x.dtype != torch.bfloat16
            or x.numel() > MAIL
            or x.shape[1] % 2
        ):
            return None
        self._width = self._width or x.shape[1]
        return self._peers.mailbox if self._width == x.shape[1] else None

    def close(self) -> None:
        """Leave the group; the others' next collective fails. Idempotent."""
        self._plain.close()


def join(plain: TorchGroup, device: torch.device, *, shared: bool) -> PeerGroup | TorchGroup:
    """`plain` with peers' memory where that works on every rank; the reason is logged where it does not.

    Raises ConfigError for ranks that share a GPU and cannot share its memory.
    """
    reason = "" if shared else _no_access(device, plain.size)
    peers = None
    if not any(plain.tell("access", reason)):
        try:
            peers = Peers(plain, device, shared=shared)
        except (RuntimeError, ImportError, AttributeError) as e:
            reason = first_line(e)
    reasons = sorted(set(plain.tell("joined", reason)) - {""})
    if peers is None or reasons:
        if shared:
            raise ConfigError(
                f"ranks share a GPU, and its memory cannot be shared: {'; '.join(reasons)}",
                field="gpus",
                fix="one GPU for each rank",
            )
        _log.warning("sums go through NCCL alone: %s", "; ".join(reasons))
        return plain
    upto = 0 if shared else choose(peers.all_reduce, plain.all_reduce, tell=plain.tell, device=device)
    group = PeerGroup(plain, peers, upto=upto, shared=shared)
    _log.info("sums between ranks: %s", group.how)
    return group


Reduce = Callable[[torch.Tensor], torch.Tensor]


def choose(
    ours: Reduce,
    theirs: Reduce,
    *,
    tell: Callable[[str, str], list[str]],
    device: torch.device,
    time: Callable[[Reduce, torch.Tensor], float] | None = None,
) -> int:
    """Bytes up to which `ours` is no slower than `theirs` on any rank; the same number on every rank.

    A size counts only if all smaller ones do: one disturbed reading costs speed, never agreement.
    """
    time = time or _time
    took = []
    for nbytes in SIZES:
        x = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device)
        took.append((time(ours, x), time(theirs, x)))
    told = [
        [tuple(map(float, pair.split("/"))) for pair in text.split(",")]
        for text in tell("speed", ",".join(f"{a:.3f}/{b:.3f}" for a, b in took))
    ]
    upto = 0
    for i, nbytes in enumerate(SIZES):
        if max(rank[i][0] for rank in told) > max(rank[i][1] for rank in told):
            break
        upto = nbytes
    return upto


def _time(reduce: Reduce, x: torch.Tensor, *, calls: int = 16, repeats: int = 5) -> float:
    """Microseconds of one call inside a CUDA graph, as decoding makes it: the best of `repeats`, since disturbances only
    add.
    """
    stream = torch.cuda.Stream(x.device)
    with torch.cuda.stream(stream):
        reduce(x)
        torch.cuda.synchronize(x.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(calls):
                reduce(x)
        found = []
        for _ in range(repeats + 1):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record(stream)
            graph.replay()
            ended.record(stream)
            ended.synchronize()
            found.append(1e3 * begun.elapsed_time(ended) / calls)
    return min(found[1:])


def _no_access(device: torch.device, size: int) -> str:
    """Why this rank's GPU cannot read all the others' memory, or nothing. The ranks' GPUs are those that it may see."""
    for other in range(min(size, torch.cuda.device_count())):
        if other != device.index and not torch.cuda.can_device_access_peer(device, other):
            return f"{device} has no peer access to cuda:{other}"
    return ""
