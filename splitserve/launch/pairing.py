"""Which seat each decode rank takes, so that the links over which its state comes are good ones. Pure.

    prefill ranks   0     1     2     3         a seat is a rank's GPU or cores; state goes from rank 0 to rank 0,
                    │     │     │     │         1 to 1 ... where both sides have as many ranks, else to the ranks over
    decode ranks    0     1     2     3         it when both groups are drawn on one ruler (transfer/layout.py)
    seats         gpu 6 gpu 7 gpu 4 gpu 5

Which GPUs and cores an engine has is placement's business; here only their order among its ranks changes. A link is
judged by what `doctor --fabric` measured, where it did, else by how near two GPUs are on the PCIe tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitserve.errors import ConfigError
from splitserve.launch.topology import Topology, how_near
from splitserve.numa import share_of, short_list
from splitserve.plan.fabric import best_order
from splitserve.types import Role

if TYPE_CHECKING:
    from splitserve.launch.procs import ProcSpec

Rates = Mapping[tuple[str, str], float]
"""GB/s by (name of a prefill rank's seat, of a decode rank's)."""

_NEARNESS = {"nvlink": 5.0, "switch": 4.0, "root": 3.0, "node": 2.0, "across": 1.0}


@dataclass(frozen=True)
class RankSeat:
    """One rank of a placed engine and what it computes on. `gpu` is -1 on cpus."""

    engine: str
    rank: int
    cpus: tuple[int, ...]
    gpu: int = -1

    @property
    def seat(self) -> str:
        return seat_name(self.cpus, self.gpu)

    @property
    def name(self) -> str:
        """As a person reads it: "prefill-0 rank 1 (gpu 5)"."""
        return f"{self.engine} rank {self.rank} ({self.seat})"


def seat_name(cpus: tuple[int, ...], gpu: int) -> str:
    """What a seat is called in files of measured rates."""
    return f"gpu {gpu}" if gpu >= 0 else f"cpus {short_list(cpus)}"


def seats_of(engine: str, cpus: tuple[int, ...], gpus: tuple[int, ...], tp: int) -> list[RankSeat]:
    """The ranks of one engine, which share out its cpus and GPUs in their order."""
    return [RankSeat(engine, r, share_of(cpus, r, tp), gpus[r] if gpus else -1) for r in range(tp)]


def rank_seats(specs: Sequence[ProcSpec]) -> tuple[tuple[RankSeat, ...], tuple[RankSeat, ...]]:
    """All prefill ranks and all decode ranks of a placed deployment. ConfigError where it has no pair."""
    found = []
    for role in (Role.PREFILL, Role.DECODE):
        ranks = [seat for s in specs if s.role == role for seat in seats_of(s.name, s.cpus, s.gpus, s.tp)]
        if not ranks:
            raise ConfigError(f"the deployment has no [{role}]: no state crosses in it", field=str(role))
        found.append(tuple(ranks))
    return found[0], found[1]


def carried(num_sources: int, num_targets: int) -> tuple[tuple[int, int], ...]:
    """(prefill rank, decode rank) of all links over which state goes between groups of these sizes."""
    return tuple(
        (i, j)
        for i in range(num_sources)
        for j in range(num_targets)
        if i * num_targets < (j + 1) * num_sources and j * num_sources < (i + 1) * num_targets
    )


def order_seats(
    sources: Sequence[Sequence[RankSeat]],
    seats: Sequence[RankSeat],
    topology: Topology,
    rates: Rates,
) -> tuple[tuple[int, ...], str]:
    """For one decode engine: the seat of each rank, as indices of `seats`, and what is won; unchanged for nothing.

    `sources` are the ranks of each prefill engine that may send to it. The slowest link that carries state is as
    good as it can be; measured rates count only where every pair of these was measured.
    """
    pairs = {(a.seat, b.seat) for group in sources for a in group for b in seats}
    measured = pairs <= set(rates)
    score = dict(rates) if measured else {}
    if not measured:
        score = {
            (a.seat, b.seat): _nearness(topology, a, b) for group in sources for a in group for b in seats
        }
    table = {
        (rank, at): min(
            (
                score[group[i].seat, seats[at].seat]
                for group in sources
                for i, j in carried(len(group), len(seats))
                if j == rank
            ),
            default=0.0,
        )
        for rank in range(len(seats))
        for at in range(len(seats))
    }
    order = best_order(table, len(seats))
    same = tuple(range(len(seats)))
    slowest = {o: min(table[rank, at] for rank, at in enumerate(o)) for o in (order, same)}
    if order == same or sorted(table[r, s] for r, s in enumerate(order)) == sorted(table[r, r] for r in same):
        return same, ""
    if measured:
        return (
            order,
            f"slowest measured link {slowest[order]:.2f} GB/s, in order of number {slowest[same]:.2f}",
        )
    return order, "each as near as can be to the prefill rank whose state it gets"


def _nearness(topology: Topology, one: RankSeat, other: RankSeat) -> float:
    gpus = {g.index: g for g in topology.gpus}
    if one.gpu in gpus and other.gpu in gpus:
        return _NEARNESS.get(how_near(topology, gpus[one.gpu], gpus[other.gpu]), 0.0)
    node_of = {cpu: core.node for core in topology.cores for cpu in core.cpus}
    nodes = [{node_of.get(cpu, -1) for cpu in seat.cpus} for seat in (one, other)]
    return _NEARNESS["node"] if nodes[0] == nodes[1] else _NEARNESS["across"]
