"""Our own engine as a child of the supervisor: the words of `splitserve serve`. A pure function."""

from __future__ import annotations

from dataclasses import replace

from splitserve.config import TransferConfig
from splitserve.launch.commands import port_mark, to_flags
from splitserve.launch.engines.seat import Seat, gpu_settings
from splitserve.types import Role


def ports(role: Role) -> tuple[str, ...]:
    """Keys of the ports beyond "http"."""
    return ("bootstrap",) if role is Role.PREFILL else ()


def words(seat: Seat) -> tuple[str, ...]:
    """After `splitserve`; ports are marks."""
    config = replace(
        seat.config,
        cpus=seat.cpus,
        gpus=_visible(seat.gpus),
        node=-1 if seat.node is None else seat.node,
        memory_bind=seat.memory,
    )
    found = ["serve", config.model, *to_flags(config, skip=("model",))]
    found += [*to_flags(seat.server, skip=("port",)), "--port", seat.port("http")]
    found += to_flags(_allow(seat.transfer, seat.address), skip=("bootstrap_port",))
    if seat.role is Role.PREFILL:
        found += ["--bootstrap-port", seat.port("bootstrap")]
    elif seat.num_prefills == 1:
        found += ["--peer-port", port_mark("prefill-0", "bootstrap")]  # a null can mean no other
    return tuple(found)


def env(seat: Seat) -> dict[str, str]:
    """On top of the supervisor's own environment."""
    threads = seat.config.threads or max(1, len(seat.cpus) // seat.config.tp)
    return {"OMP_NUM_THREADS": str(threads), **gpu_settings(seat)}


def _visible(gpus: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks' GPUs among those of CUDA_VISIBLE_DEVICES, where ranks share one; else their order there says it."""
    seen = list(dict.fromkeys(gpus))
    return tuple(seen.index(g) for g in gpus) if len(seen) < len(gpus) else ()


def _allow(transfer: TransferConfig, host: str) -> TransferConfig:
    """Let requests name `host` as their rendezvous: the router takes it from the engines' URLs."""
    known = transfer.allow_hosts
    return transfer if host in known else replace(transfer, allow_hosts=(*known, host))
