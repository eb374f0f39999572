"""What `doctor --fabric FILE` found, kept for `up FILE`: rates of every pair of ranks, direction and pairing.

    $XDG_STATE_HOME/splitserve/fabric/NAME-HASH.json      (default ~/.local/state); HASH is of FILE's full path

The rates belong to a machine, and a deployment file may go to many, so they do not lie beside it. They are good for the
devices and [transfer] settings that they were measured with: `stale` says what has changed since. Measures nothing.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from splitserve.config import TransferConfig
from splitserve.errors import ConfigError
from splitserve.launch.deployment import Deployment
from splitserve.launch.pairing import RankSeat, carried
from splitserve.launch.topology import Topology
from splitserve.plan.fabric import HOST, Fabric, Verdict
from splitserve.transfer.probed import probed_word

FORMAT = 2
"""1 called pairs fallbacks by their rate, whatever their lane."""


@dataclass(frozen=True)
class Rate:
    """One pair in the chosen direction: GB/s alone by size, and while all pairs move (0.0: not measured)."""

    source: str  # name of the prefill rank's seat, "gpu 0" or "cpus 0-3"
    target: str
    alone: dict[int, float]
    together: float
    lane: str = ""


@dataclass(frozen=True)
class Measured:
    """One run of the doctor on one deployment."""

    format: int
    file: str
    taken: str  # UTC, ISO
    devices: dict[str, str]  # what kinds of devices there were, by kind
    direction: str
    why: str
    rates: tuple[Rate, ...]
    pairing: dict[str, str]  # decode rank's seat -> prefill rank's
    findings: tuple[str, ...] = ()
    memory: str = HOST  # what kind the links join, as in Fabric

    @property
    def best(self) -> dict[tuple[str, str], float]:
        """The fastest of each pair, in GB/s."""
        return {(r.source, r.target): max(r.alone.values(), default=0.0) for r in self.rates}

    def expected(self, prefill: Sequence[RankSeat], decodes: Sequence[Sequence[RankSeat]]) -> tuple[str, ...]:
        """What a prefill engine may expect of its links, as TransferConfig.probed has it.

        For each pair of rank numbers over which state goes, the slowest of all decode engines; at each size no more
        than what the pair had while all moved. Nothing for pairs that were not measured.
        """
        known = {(r.source, r.target): r for r in self.rates}
        found: dict[tuple[int, int], dict[int, float]] = {}
        for ranks in decodes:
            for i, j in carried(len(prefill), len(ranks)):
                rate = known.get((prefill[i].seat, ranks[j].seat))
                slowest = found.setdefault((i, j), {})
                for size, alone in rate.alone.items() if rate else ():
                    usual = min(alone, rate.together) if rate and rate.together else alone
                    slowest[size] = min(usual, slowest.get(size, usual))
        return tuple(probed_word(i, j, sizes) for (i, j), sizes in sorted(found.items()) if sizes)


def path_of(deployment: Deployment, base: Path | None = None) -> Path:
    """Where the rates of a deployment file are kept for this user; `base` stands in for $XDG_STATE_HOME."""
    base = base or Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    full = os.path.abspath(deployment.path)
    mark = hashlib.blake2b(full.encode(), digest_size=4).hexdigest()
    return base / "splitserve" / "fabric" / f"{Path(full).stem}-{mark}.json"


def of(
    deployment: Deployment,
    topology: Topology,
    fabric: Fabric,
    verdict: Verdict,
    seats: tuple[Sequence[RankSeat], Sequence[RankSeat]],
) -> Measured:
    """A run of the doctor as it is kept."""
    sources, targets = ([s.seat for s in side] for side in seats)
    return Measured(
        FORMAT,
        os.path.abspath(deployment.path),
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        devices(topology, deployment.transfer),
        verdict.direction,
        verdict.why,
        tuple(
            Rate(
                sources[link.source],
                targets[link.target],
                link.sizes(verdict.direction),
                link.shared(verdict.direction),
                link.lane,
            )
            for link in fabric.links
        ),
        {targets[t]: sources[s] for t, s in verdict.pairing.items()},
        tuple(f"{f.kind}: {f.text}" for f in verdict.findings),
        fabric.memory,
    )


def keep(found: Measured, path: Path) -> None:
    """Write it whole or not at all. ConfigError where the place cannot be written."""
    temporary = path.with_suffix(".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
        temporary.rename(path)
    except OSError as e:
        raise ConfigError(
            f"cannot write {path}: {e.strerror}", fix="set XDG_STATE_HOME to a directory of yours"
        ) from e


def find(deployment: Deployment) -> Measured | None:
    """What was kept for this file; None where nothing was, or by a version that wrote it otherwise."""
    try:
        found = msgspec.json.decode(path_of(deployment).read_bytes(), type=Measured)
    except (OSError, msgspec.DecodeError):
        return None
    return found if found.format == FORMAT else None


def fresh(deployment: Deployment, topology: Topology) -> tuple[Measured | None, str]:
    """What was measured for this deployment on these devices, and a line about it: why it is not used, too."""
    found = find(deployment) if deployment.split else None
    if found is None:
        return None, ""
    changed = stale(found, topology, deployment.transfer)
    return (None if changed else found), note(found, changed, deployment)


def stale(found: Measured, topology: Topology, transfer: TransferConfig) -> str:
    """What has changed since, "" where the rates still hold."""
    now = devices(topology, transfer)
    return ", ".join(kind for kind in now if now[kind] != found.devices.get(kind))


def devices(topology: Topology, transfer: TransferConfig) -> dict[str, str]:
    """All that rates depend on, by what a person calls it; long lists as their digests."""
    return {
        "cores": _digest([(c.node, c.cpus) for c in topology.cores]),
        "GPUs": _digest([(g.index, g.uuid, g.bus, g.node) for g in topology.gpus]),
        "links between GPUs": _digest([(p.a, p.b, p.p2p, p.nvlinks) for p in topology.pairs]),
        "PCI tree": _digest([(d.address, d.parent, d.kind, d.acs) for d in topology.pci]),
        "driver": topology.driver,
        "[transfer]": f"{transfer.transport} {transfer.backend} {' '.join(transfer.ucx)}".strip(),
    }


def note(found: Measured | None, changed: str, deployment: Deployment) -> str:
    """One line for `up` and `--dry-run`; "" where nothing was measured."""
    if found is None:
        return ""
    again = f"run `splitserve doctor --fabric {deployment.path}` again"
    if changed:
        return f"measured {found.taken}, not used: {changed} changed since; {again}"
    pairs = f"{len(found.rates)} pairs, {found.memory} memory"
    text = f"measured {found.taken}: {pairs}, direction {found.direction} ({found.why})"
    return "; ".join([text, *found.findings])


def _digest(what: object) -> str:
    return hashlib.blake2b(repr(what).encode(), digest_size=8).hexdigest() if what else ""
