"""All that the doctor's checks look at, as plain data: read by gather.py, made by hand in tests. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from splitserve.launch.topology import Topology

UNLIMITED = -1


@dataclass(frozen=True)
class Software:
    """`packages` maps distributions to versions and lacks what is not installed. `torch_cuda`: "" for a CPU build."""

    python: tuple[int, int, int]
    executable: str
    packages: Mapping[str, str]
    torch_cuda: str = ""


@dataclass(frozen=True)
class Limits:
    """Limits of this process: open files, and bytes that may be locked. -1: none."""

    files: int
    files_most: int  # as far as a person may raise it without root
    locked: int


@dataclass(frozen=True)
class Disk:
    """A directory that a deployment writes to or reads from, and the bytes free there."""

    use: str  # run directory, temporary files ...
    path: str
    free: int
    writable: bool = True


@dataclass(frozen=True)
class Clock:
    """What the kernel says of its clock. `known` is False where it may not be asked; `error_s` is its own estimate."""

    known: bool
    synchronised: bool = False
    error_s: float = 0.0


@dataclass(frozen=True)
class HugePages:
    """`transparent` is always, madvise, never, or "" where the kernel has none; reserved pages of `size` bytes."""

    transparent: str
    reserved: int = 0
    free: int = 0
    size: int = 0


@dataclass(frozen=True)
class Port:
    """A port that somebody wants here. `trouble` is why it cannot be had, "" where it can.

    `holder` is the deployment of this user that is up and has it, "" where it is somebody else's.
    """

    name: str
    host: str
    port: int
    trouble: str = ""
    fix: str = ""
    holder: str = ""


@dataclass(frozen=True)
class Lanes:
    """What NIXL chose when it was tried, between two processes of this host. `trouble` is why it could not be."""

    trouble: str = ""
    ucx: str = ""  # version of the UCX in the wheel
    host: str = ""  # lanes of a put between host memories
    gpu: str = ""  # of a put between GPUs; "" where there are none, or torch has no CUDA


@dataclass(frozen=True)
class Model:
    """A model that a deployment file names. `trouble` and `fix` are what an engine would say of it."""

    name: str
    trouble: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Plan:
    """What a deployment file adds: its models, and whether a thread that spins would share a core with an engine.

    `trouble` is why the file cannot be placed on this machine, "" where it can.
    """

    path: str
    models: tuple[Model, ...] = ()
    uses_nixl: bool = True
    spins: bool = False
    warning: str = ""  # of another engine's version
    trouble: str = ""
    fix: str = ""
    name: str = ""  # of the deployment


@dataclass(frozen=True)
class Facts:
    """One machine, one installation, and perhaps one deployment file. `lanes` is None where NIXL was not tried."""

    topology: Topology
    software: Software
    limits: Limits
    disks: tuple[Disk, ...]
    clock: Clock
    huge: HugePages
    ports: tuple[Port, ...]
    ephemeral: tuple[int, int]  # the kernel gives ports between these to whoever asks for any
    environment: Mapping[str, str] = field(default_factory=dict)
    lanes: Lanes | None = None
    plan: Plan | None = None

    def version(self, distribution: str) -> str:
        """As installed here, "" where it is not."""
        return self.software.packages.get(distribution, "")

    def flag(self, name: str) -> str:
        """An environment variable, "" where it is not set."""
        return self.environment.get(name, "")
