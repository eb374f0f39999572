"""Puts an engine together from its parts, in the order in which they need each other. The only place that knows all."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from splitserve import log, numa, wire
from splitserve.dist import peers
from splitserve.dist.group import SoloGroup, TorchGroup
from splitserve.dist.peers import PeerGroup
from splitserve.engine import device, memory
from splitserve.engine.channel import JOIN_S, Join, Joined, Line, Loaded, Poison, Ranks, Sized
from splitserve.engine.constraint import Constraints
from splitserve.engine.controls import Controls
from splitserve.engine.digests import DeviceDigests
from splitserve.engine.drafting import DraftingModel
from splitserve.engine.fencing import Fencing
from splitserve.engine.follower import Follower, Watched
from splitserve.engine.lifetimes import Lifetimes
from splitserve.engine.limits import Limits
from splitserve.engine.link import ServerLink
from splitserve.engine.loop import GPU_HANDOFF_POLL_S, Loop
from splitserve.engine.ready import Readiness
from splitserve.engine.runner import Model, Runner
from splitserve.engine.scheduler import Scheduler
from splitserve.engine.throttle import Launches, Throttled
from splitserve.engine.transfers import GPU_SEE_OFF_S, Transfers
from splitserve.errors import ConfigError
from splitserve.kv.cache import Cache
from splitserve.kv.pool import Pool
from splitserve.models import registry
from splitserve.models.read import read_config
from splitserve.spec import lay_out, page_tokens
from splitserve.text import tokenizer
from splitserve.text.grammar import Vocabulary
from splitserve.transfer import transport as transports
from splitserve.transfer.faults import Faults
from splitserve.transfer.judged import Judged
from splitserve.transfer.paced import Paced
from splitserve.transfer.port import Port, PortGroup
from splitserve.transfer.probed import Expectations
from splitserve.transfer.receiver import Receiver
from splitserve.transfer.rendezvous import Rendezvous
from splitserve.transfer.sender import Sender
from splitserve.transfer.transport import Transport
from splitserve.weights.fingerprint import fingerprint
from splitserve.weights.locate import locate
from splitserve.wire import Card

if TYPE_CHECKING:
    from splitserve.engine.rank import Start

_log = log.get(__name__)

TpGroup = SoloGroup | TorchGroup | PeerGroup


@dataclass
class Engine:
    """Rank 0, ready to run."""

    loop: Loop
    max_len: int
    facts: dict[str, Any]


def assemble(start: Start, link: ServerLink, alive_fd: int | None, closing: ExitStack) -> Engine:
    """Rank 0: load, allocate, meet. Raises ConfigError and its kinds; `closing` undoes whatever was done."""
    return Builder(start, closing, say=lambda stage, done: link.send(wire.Loading(stage, done))).rank0(
        link, alive_fd
    )


def assemble_follower(start: Start, line: Line, alive_fd: int | None, closing: ExitStack) -> Follower:
    """Any other rank: the same, to what rank 0 says in its Join."""
    return Builder(start, closing, say=lambda *_: None).follower(line, alive_fd)


class Builder:
    """One start of one rank. Each method makes one part; `closing` undoes them in reverse."""

    def __init__(self, start: Start, closing: ExitStack, *, say: Callable[[str, float], None]) -> None:
        self.start = start
        self.config = start.engine
        self.closing = closing
        self.say = say
        self.device = device.take(start.engine.device, rank=start.rank, tp=start.tp, gpus=start.engine.gpus)
        self.faults = Faults() if start.engine.allow_faults else None
        self.bootstrap_port = 0
        self._sums = ""
        self._progress: Callable[[], None] = _nothing
        self.source = locate(self.config.model)
        self.cfg = read_config(self.source)
        self.dtype = registry.encoding(self.cfg, self.config.dtype, device=self.config.device)
        self.drafts = self.config.speculative == "mtp"
        self.specs = registry.states(self.cfg, dtype=self.dtype, kv=self.config.kv_dtype, draft=self.drafts)
        self.config = replace(self.config, page_tokens=page_tokens(self.specs, self.config.page_tokens))
        self.layout = lay_out(self.specs, page_tokens=self.config.page_tokens, rank=start.rank, size=start.tp)
        torch.set_num_threads(self.config.threads or len(os.sched_getaffinity(0)))

    def rank0(self, link: ServerLink, alive_fd: int | None) -> Engine:
        self._capacity(self._free_bytes())  # raises for what cannot fit even before weights are read
        ranks = Ranks(self.start.run_dir, self.start.name, self.start.tp)
        self.closing.callback(ranks.close)
        listening = socket.create_server(("127.0.0.1", 0))
        # The engine's id is another one for each life, so that peers take a restarted engine for a new one.
        join = Join(f"{self.start.name}-{uuid.uuid4().hex[:12]}", listening.getsockname()[1])
        ranks.send(join)
        group = self._group(join.group_port, listening)
        model = self._load(group)
        capacity = self._capacity(min([self._free_bytes(), *ranks.free_bytes()]))
        sized = Sized(capacity.num_pages, capacity.num_slots + capacity.num_snapshots, capacity.max_len)
        ranks.send(sized)
        port, pool = self._memory(join.engine_id, sized)
        plain = self._runner(model, pool, group, self._between_layers)
        self._ready(plain, model, pool, group, sized)  # all ranks at once, so before they join
        cards = ranks.cards()
        scheduler = self._scheduler(capacity)
        runner: Launches = plain
        clock = None
        if port and self.device.type == "cuda":
            runner = clock = device.Clocked(runner)
        transfers = self._transfers(port, cards, ranks, scheduler, clock) if port else None
        if transfers:
            self._progress = transfers.progress
        if self.faults:
            runner = Throttled(runner, self.faults, progress=self._between_layers)
        controls = Controls(
            scheduler,
            AllPools(pool, ranks),
            transfers=transfers,
            faults=self.faults,
            lifetimes=Lifetimes(),
        )
        loop = Loop(
            link,
            scheduler,
            runner=runner,
            ranks=ranks,
            transfers=transfers,
            controls=controls,
            alive_fd=alive_fd,
        )
        loop.plan_ahead = self.config.plan_ahead or plain.replay is not None
        if self.device.type == "cuda":
            loop.handoff_poll_s = GPU_HANDOFF_POLL_S
        return Engine(loop, capacity.max_len, self._facts(join, capacity, meets=port is not None))

    def follower(self, line: Line, alive_fd: int | None) -> Follower:
        join = line.wait(JOIN_S)
        group = self._group(join.group_port, None)
        model = self._load(group)
        line.send(Loaded(self._free_bytes()))
        sized = line.wait(JOIN_S)
        port, pool = self._memory(join.engine_id, sized)
        watched = Watched(port)
        runner = self._runner(model, pool, group, watched.progress)
        self._ready(runner, model, pool, group, sized)
        line.send(Joined(self.start.rank, port.card if port else None))
        return Follower(line, runner, pool=pool, watched=watched, alive_fd=alive_fd)

    def _between_layers(self) -> None:
        """What a step does on its way, once there are transfers: they need the runner's clock, so they come later."""
        self._progress()

    def _free_bytes(self) -> int:
        on_gpu = self.device.type == "cuda"
        ranks = device.sharers(self.config.gpus, self.start.rank) if on_gpu else self.start.tp
        return device.free_bytes(self.device, ranks=ranks)

    def _capacity(self, free_bytes: int) -> memory.Capacity:
        return memory.size(self.config, self.layout, model_max_len=self.cfg.max_len, free_bytes=free_bytes)

    def _group(self, port: int, listening: socket.socket | None) -> TpGroup:
        """The TP group. Rank 0 hands over the socket that it has told the others, so that nobody else can take it."""
        if self.start.tp == 1:
            if listening is not None:
                listening.close()
            return SoloGroup()
        self.say("meeting the other ranks", 0.0)
        shared = len(set(self.config.gpus)) < len(self.config.gpus)
        group = TorchGroup(
            self.start.rank,
            self.start.tp,
            host="127.0.0.1",
            port=port,
            device="cpu" if shared else self.config.device,  # NCCL knows one rank for each GPU
            listening=listening,
        )
        self.closing.callback(group.close)
        if self.device.type == "cpu":
            return group
        self._sums = "NCCL"
        if self.config.sums == "nccl" and not shared:
            return group
        joined = peers.join(group, self.device, shared=shared)
        if isinstance(joined, PeerGroup):
            self._sums = joined.how
        return joined

    def _load(self, group: TpGroup) -> Model:
        with device.in_memory(self.device, f"the share of rank {self.start.rank} in the weights"):
            model = registry.build(
                self.cfg, group, dtype=self.dtype, device=str(self.device), draft=self.drafts
            )
            registry.load(
                model,
                self.cfg,
                self.source,
                dummy=self.config.dummy_weights,
                progress=lambda done: self.say("weights", done),
            )
        return model

    def _memory(self, engine_id: str, sized: Sized) -> tuple[Port | None, Pool]:
        """The slabs, in memory that the transport can register. A unified engine meets nobody and pays for none."""
        transport = self._transport(engine_id) if self.config.role != "unified" else None
        self.say("memory", 0.0)
        on_host = transport is not None and self.device.type == "cpu"
        pool = Pool(
            self.specs,
            layout=self.layout,
            num_pages=sized.num_pages,
            num_slots=sized.num_slots,
            device=self.device,
            allocate=transport.allocate if transport and on_host else device.allocator(self.device),
        )
        self.closing.callback(pool.close)
        if transport is None:
            return None, pool
        port = Port(
            transport,
            layout=self.layout,
            slabs=pool.slabs,
            engine=engine_id,
            rank=self.start.rank,
            size=self.start.tp,
            faults=self.faults,
            weights=self._fingerprint(),
        )
        if not on_host:
            digests = port.digests = DeviceDigests(pool.memory)
            digests.warm_up(port.card.fields, self.config.page_tokens)
        return port, pool

    def _transport(self, engine_id: str) -> Transport:
        """Made when the device is current and has been used: NIXL looks at it. Raises ConfigError."""
        name = self.start.transfer.transport
        if name == "local" and self.device.type == "cuda":
            raise ConfigError(
                "transport is local, which moves host memory only, and the state lies on a GPU",
                field="transport",
                fix="transport = 'nixl' (pip install nixl)",
            )
        self.say("transport", 0.0)
        transport = transports.make(
            name, agent_name=f"{engine_id}.{self.start.rank}", config=self.start.transfer
        )
        if self.faults:
            transport = Paced(transport, self.faults)
        if self.start.transfer.probed:
            transport = Judged(transport, Expectations(self.start.rank, self.start.transfer.probed))
        self.closing.callback(transport.close)
        return transport

    def _fingerprint(self) -> str:
        """Of the weights and of what else turns a token into the same state: the positions' angles."""
        if self.config.dummy_weights:
            return f"dummy {self.cfg.arch}"
        return fingerprint(self.source, context=repr(self.cfg.rope))

    def _runner(self, model: Model, pool: Pool, group: TpGroup, between_layers: Callable[[], None]) -> Runner:
        return Runner(
            model,
            pool,
            page_tokens=self.config.page_tokens,
            tp=group,
            device=self.device,
            between_layers=between_layers,
            constraints=Constraints(self._vocabulary),
            drafter=cast(DraftingModel, model) if self.drafts else None,
        )

    def _ready(self, runner: Runner, model: Model, pool: Pool, group: TpGroup, sized: Sized) -> None:
        readiness = Readiness(self.config, sized, model=model, pool=pool, tp=group, device=self.device)
        readiness.reach(runner, self.closing, self.say)

    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(tokenizer.load(self.source.path), self.cfg.vocab)

    def _scheduler(self, capacity: memory.Capacity) -> Scheduler:
        cache = Cache(
            num_pages=capacity.num_pages,
            page_tokens=self.config.page_tokens,
            num_slots=capacity.num_slots,
            num_snapshots=capacity.num_snapshots,
            prefix=self.config.prefix_cache,
        )
        limits = Limits(
            max_len=capacity.max_len,
            max_seqs=self.config.max_seqs,
            step_tokens=self.config.step_tokens,
            recompute_share=self.config.recompute_share,
        )
        return Scheduler(cache, limits)

    def _transfers(
        self,
        port: Port,
        cards: list[Card],
        ranks: Ranks,
        scheduler: Scheduler,
        clock: device.Clock | None,
    ) -> Transfers:
        fence = Fencing(self.start.fence_socket)
        self.closing.callback(fence.close)
        ports = PortGroup(port, cards=(port.card, *cards), send=ranks.send)
        config = self.start.transfer
        door = Rendezvous(host=config.bootstrap_host, port=config.bootstrap_port)
        self.bootstrap_port = door.port
        sender = Sender(ports, door, config=config, fence=fence)
        self.closing.callback(sender.close)
        receiver = Receiver(ports, config=config, fence=fence)
        self.closing.callback(receiver.close)
        transfers = Transfers(
            sender, receiver, ports=ports, scheduler=scheduler, deadline_s=config.deadline_s
        )
        transfers.clock = clock
        transfers.see_off_s = GPU_SEE_OFF_S if clock else 0.0
        return transfers

    def _facts(self, join: Join, capacity: memory.Capacity, *, meets: bool) -> dict[str, Any]:
        """What /server_info, the banner and `verify` tell about this engine."""
        return {
            "model": self.config.model,
            "arch": self.cfg.arch,
            "vocab_size": self.cfg.vocab,
            "num_layers": self.cfg.num_layers,
            "role": self.config.role,
            "tp": self.start.tp,
            "dtype": self.dtype,
            "kv_dtype": self.config.kv_dtype,
            "device": self.config.device,
            "device_name": device.name_of(self.device),
            "gpus": list(self.config.gpus),  # among those that it may see
            "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "sums": self._sums,
            "threads": torch.get_num_threads(),
            "cpus": sorted(os.sched_getaffinity(0)),
            "memory": numa.read_binding(os.getpid()).memory,
            "num_pages": capacity.num_pages,
            "page_tokens": self.config.page_tokens,
            "page_bytes": self.layout.page_bytes,
            "num_slots": capacity.num_slots,
            "num_snapshots": capacity.num_snapshots,
            "speculative": self.config.speculative,
            "slot_bytes": self.layout.slot_bytes,
            "step_tokens": self.config.step_tokens,
            "max_seqs": self.config.max_seqs,
            "transport": self.start.transfer.transport if meets else "",
            "bootstrap_host": self.start.transfer.bootstrap_host if meets else "",
            "bootstrap_port": self.bootstrap_port,
            "engine_id": join.engine_id,
            "allow_faults": self.config.allow_faults,
            "pid": os.getpid(),
        }


class AllPools:
    """The slabs of all ranks, for what must happen to each of them."""

    def __init__(self, pool: Pool, ranks: Ranks) -> None:
        self._pool = pool
        self._ranks = ranks

    def poison(self, page_ids: Sequence[int], slot_ids: Sequence[int] = ()) -> None:
        self._ranks.send(Poison(tuple(page_ids), tuple(slot_ids)))
        self._pool.poison(page_ids, slot_ids)


def _nothing() -> None:
    return None
