"""Puts an engine together from its parts, in the order in which they need each other. The only place that knows all."""

from __future__ import annotations

import os
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch

from splitserve import log, wire
from splitserve.config import EngineConfig
from splitserve.dist.group import SoloGroup
from splitserve.engine import memory
from splitserve.engine.controls import Controls
from splitserve.engine.fencing import Fencing
from splitserve.engine.limits import Limits
from splitserve.engine.link import ServerLink
from splitserve.engine.loop import Loop
from splitserve.engine.runner import Model, Runner
from splitserve.engine.scheduler import Scheduler
from splitserve.engine.transfers import Transfers
from splitserve.kv.cache import Cache
from splitserve.kv.pool import Pool
from splitserve.models import registry
from splitserve.models.config import ModelConfig
from splitserve.models.read import read_config
from splitserve.spec import Layout, lay_out
from splitserve.transfer import transport as transports
from splitserve.transfer.faults import Faults
from splitserve.transfer.port import Port, PortGroup
from splitserve.transfer.receiver import Receiver
from splitserve.transfer.rendezvous import Rendezvous
from splitserve.transfer.sender import Sender
from splitserve.transfer.transport import Transport
from splitserve.weights.locate import Source, locate

if TYPE_CHECKING:
    from splitserve.engine.rank import Start

_log = log.get(__name__)


@dataclass
class Engine:
    loop: Loop
    max_len: int
    facts: dict[str, Any]
    closing: ExitStack

    def close(self) -> None:
        self.closing.close()


def assemble(start: Start, link: ServerLink, alive_fd: int | None) -> Engine:
    """Load, allocate, meet. Raises ConfigError and its kinds; what was opened before a failure is closed again."""
    with ExitStack() as closing:
        builder = Builder(start, link, closing)
        engine = builder.build(alive_fd)
        engine.closing = closing.pop_all()
    return engine


class Builder:
    """One start of one rank. Each method makes one part; `closing` undoes them in reverse."""

    def __init__(self, start: Start, link: ServerLink, closing: ExitStack) -> None:
        self.start = start
        self.config = start.engine
        self.link = link
        self.closing = closing
        self.device = torch.device(start.engine.device)
        self.engine_id = ""
        self.bootstrap_port = 0
        self.faults = Faults() if start.engine.allow_faults else None

    def build(self, alive_fd: int | None) -> Engine:
        torch.set_num_threads(self.config.threads or len(os.sched_getaffinity(0)))
        source = locate(self.config.model)
        cfg = read_config(source)
        dtype = dtype_of(self.config, cfg)
        layout = self._layout(cfg, dtype)
        capacity = memory.size(
            self.config,
            layout,
            model_max_len=cfg.max_len,
            free_bytes=psutil.virtual_memory().available,
        )
        model = self._load(cfg, source, dtype)
        transport = self._transport()
        pool = self._pool(registry.states(cfg, dtype=dtype), layout, capacity, transport)
        scheduler = self._scheduler(capacity)
        transfers = self._transfers(transport, pool, layout, scheduler) if transport else None
        runner = Runner(
            model,
            pool,
            page_tokens=self.config.page_tokens,
            tp=SoloGroup(),
            device=self.device,
            between_layers=transfers.progress if transfers else _nothing,
        )
        controls = Controls(scheduler, pool, transfers=transfers, faults=self.faults)
        loop = Loop(
            self.link, scheduler, runner=runner, transfers=transfers, controls=controls, alive_fd=alive_fd
        )
        facts = self._facts(cfg, dtype=dtype, layout=layout, capacity=capacity, transfers=transfers)
        return Engine(loop, capacity.max_len, facts, self.closing)

    def _layout(self, cfg: ModelConfig, dtype: str) -> Layout:
        specs = registry.states(cfg, dtype=dtype)
        return lay_out(specs, page_tokens=self.config.page_tokens, rank=self.start.rank, size=self.start.tp)

    def _load(self, cfg: ModelConfig, source: Source, dtype: str) -> Model:
        model = registry.build(cfg, SoloGroup(), dtype=dtype, device=self.config.device)
        model.load(source, lambda done: self.link.send(wire.Loading("weights", done)))
        return model

    def _transport(self) -> Transport | None:
        """A unified engine meets nobody and does not pay for a transport."""
        if self.config.role == "unified":
            return None
        self.link.send(wire.Loading("transport", 0.0))
        name = f"{self.start.name}-{uuid.uuid4().hex[:12]}"  # another one for each life of the engine
        transport = transports.make(
            self.start.transfer.transport,
            agent_name=f"{name}.{self.start.rank}",
            config=self.start.transfer,
        )
        self.closing.callback(transport.close)
        self.engine_id = name
        return transport

    def _pool(
        self, specs: list[Any], layout: Layout, capacity: memory.Capacity, transport: Transport | None
    ) -> Pool:
        self.link.send(wire.Loading("memory", 0.0))
        pool = Pool(
            specs,
            layout=layout,
            num_pages=capacity.num_pages,
            num_slots=capacity.num_slots,
            device=self.device,
            allocate=transport.allocate if transport else _plain_memory,
        )
        self.closing.callback(pool.close)
        return pool

    def _scheduler(self, capacity: memory.Capacity) -> Scheduler:
        cache = Cache(
            num_pages=capacity.num_pages,
            page_tokens=self.config.page_tokens,
            num_slots=capacity.num_slots,
            prefix=self.config.prefix_cache,
        )
        limits = Limits(
            max_len=capacity.max_len,
            max_seqs=self.config.max_seqs,
            step_tokens=self.config.step_tokens,
            recompute_share=self.config.recompute_share,
        )
        return Scheduler(cache, limits)

    def _transfers(self, transport: Transport, pool: Pool, layout: Layout, scheduler: Scheduler) -> Transfers:
        port = Port(
            transport,
            layout=layout,
            slabs=pool.slabs,
            engine=self.engine_id,
            rank=self.start.rank,
            size=self.start.tp,
            faults=self.faults,
        )
        fence = Fencing(self.start.fence_socket)
        self.closing.callback(fence.close)
        ports = PortGroup(port)
        config = self.start.transfer
        door = Rendezvous(host=config.bootstrap_host, port=config.bootstrap_port)
        self.bootstrap_port = door.port
        sender = Sender(ports, door, config=config, fence=fence)
        self.closing.callback(sender.close)
        receiver = Receiver(ports, config=config, fence=fence)
        self.closing.callback(receiver.close)
        return Transfers(sender, receiver, ports=ports, scheduler=scheduler, deadline_s=config.deadline_s)

    def _facts(
        self,
        cfg: ModelConfig,
        *,
        dtype: str,
        layout: Layout,
        capacity: memory.Capacity,
        transfers: Transfers | None,
    ) -> dict[str, Any]:
        """What /server_info, the banner and `verify` tell about this engine."""
        return {
            "model": self.config.model,
            "arch": cfg.arch,
            "vocab_size": cfg.vocab,
            "num_layers": cfg.num_layers,
            "role": self.config.role,
            "tp": self.start.tp,
            "dtype": dtype,
            "device": self.config.device,
            "threads": torch.get_num_threads(),
            "cpus": sorted(os.sched_getaffinity(0)),
            "num_pages": capacity.num_pages,
            "page_tokens": self.config.page_tokens,
            "page_bytes": layout.page_bytes,
            "num_slots": capacity.num_slots,
            "slot_bytes": layout.slot_bytes,
            "step_tokens": self.config.step_tokens,
            "max_seqs": self.config.max_seqs,
            "transport": self.start.transfer.transport if transfers else "",
            "bootstrap_host": self.start.transfer.bootstrap_host if transfers else "",
            "bootstrap_port": self.bootstrap_port,
            "engine_id": self.engine_id,
            "allow_faults": self.config.allow_faults,
            "pid": os.getpid(),
        }


def dtype_of(config: EngineConfig, cfg: ModelConfig) -> str:
    """The encoding of weights and state: as told, else the checkpoint's on a GPU and what is fast on this CPU."""
    if config.dtype != "auto":
        return config.dtype
    if config.device == "cuda":
        return cfg.encoding if cfg.encoding in ("bf16", "f16") else "bf16"
    return "bf16" if _cpu_has_bf16() else "f32"


def _cpu_has_bf16() -> bool:
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as f:
        flags = next((line for line in f if line.startswith("flags")), "").split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _plain_memory(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def _nothing() -> None:
    return None
