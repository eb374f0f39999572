"""What an adapter is given and what it gives back: plain data, and the protocol that every adapter keeps.

A *seat* is one engine of a deployment once it has been placed: its role, cpus, GPUs and ports. An *adapter* turns it
into the command line and environment of another engine's server. Pure: nothing is started, opened or asked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from splitserve.config import EngineConfig, ServerConfig, TransferConfig
from splitserve.launch.commands import port_mark, reach
from splitserve.types import Role

OURS = "splitserve"
"""The name of the built-in engine, which needs no adapter."""


@dataclass(frozen=True)
class Program:
    """What serves the engines of one group, and what was given to it unread."""

    name: str = OURS
    python: str = ""  # interpreter that has it installed; "": the one that runs this
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()  # NAME=VALUE

    @property
    def foreign(self) -> bool:
        """Whether it is another engine than ours."""
        return self.name != OURS

    @property
    def environment(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for pair in self.env)


@dataclass(frozen=True)
class Seat:
    """One engine of a deployment, placed. `given` names the settings of `config` that are not mere defaults."""

    name: str
    role: Role
    config: EngineConfig
    transfer: TransferConfig
    server: ServerConfig
    program: Program
    given: frozenset[str] = frozenset()
    ready_timeout_s: float = 300.0
    num_prefills: int = 1  # of the deployment
    cpus: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    node: int | None = None
    memory: str = "none"  # policy of numa.py ...
    nodes: tuple[int, ...] = ()  # ... for these

    @property
    def split(self) -> bool:
        """One half of a pair."""
        return self.role is not Role.UNIFIED

    @property
    def address(self) -> str:
        """At which a peer on this host reaches it."""
        return reach(self.server.host)

    def port(self, key: str) -> str:
        """What stands for one of its ports until that is chosen."""
        return port_mark(self.name, key)

    def chosen(self, setting: str, flag: str, words: dict[str, str] | None = None) -> list[str]:
        """`flag` and the value of `setting` where it was given, in the engine's own `words`; else nothing.

        Only what was given: our defaults are for our engine, and the other has its own.
        """
        if setting not in self.given:
            return []
        value = str(getattr(self.config, setting))
        return [flag, (words or {}).get(value, value)]


class Adapter(Protocol):
    """How one kind of engine is started. Everything here is a table or a pure function."""

    @property
    def name(self) -> str:
        """As in `engine = "..."`."""

    @property
    def distributions(self) -> tuple[str, ...]:
        """What its version is asked of, by importlib.metadata; the first that is there."""

    @property
    def known_versions(self) -> tuple[str, ...]:
        """Beginnings of versions whose flags and protocol were read or run; others warn."""

    @property
    def install(self) -> str:
        """The command that installs it, for a person; {python} stands for the interpreter."""

    @property
    def settings(self) -> frozenset[str]:
        """Settings of [engine] that it can follow, beyond those that placement uses."""

    def ports(self, role: Role) -> tuple[str, ...]:
        """Keys of the ports that it listens on, beyond "http"."""

    def argv(self, seat: Seat) -> tuple[str, ...]:
        """After the interpreter; ports are marks."""

    def env(self, seat: Seat) -> dict[str, str]:
        """On top of the supervisor's own environment; ports are marks."""


HEALTH = "/health"
"""SGLang and vLLM answer it with 200 once they take requests. What counts after that is a token through a pair."""

METRICS = "/metrics"
"""Prometheus text, of both."""


def ucx_settings(transfer: TransferConfig) -> dict[str, str]:
    """[transfer] ucx as environment variables: "TLS=tcp,self" is UCX_TLS=tcp,self."""
    pairs = [text.split("=", 1) for text in transfer.ucx]
    return {f"UCX_{name.removeprefix('UCX_')}": value for name, value in pairs}


def gpu_settings(seat: Seat) -> dict[str, str]:
    """The GPUs it may see, in the order of its ranks."""
    return visible(seat.gpus)


def visible(gpus: Sequence[int]) -> dict[str, str]:
    """Environment of a process that sees these GPUs, in this order; {} for none.

    The numbers are NVML's, which follow the bus; CUDA's own order is the fastest first, another one in a mixed box.
    """
    if not gpus:
        return {}
    seen = dict.fromkeys(gpus)  # CUDA stops reading at a number that it has met before
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, seen))}
