"""What the measured links between prefill and decode ranks mean: findings, and which ranks to pair. Pure.

    Link (a, b): alone   GB/s of the largest writes with nothing else on the fabric
                 together GB/s of the same while every other pair writes too
    yardsticks:  memcpy  one core copying the same bytes       tcp   one plain socket between the same two cores

The limits below separate kinds of faults, not good machines from better ones: each fault halves a rate or worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations
from statistics import median

HALVED = 0.6
"""Of the median link: below it a link is narrower, slower or longer than its neighbours."""

COLLAPSE = 0.5
"""All pairs together against one alone: below it they stop each other (posted writes under one switch do that)."""

LIKE_TCP = 1.3
"""A link of one host that is hardly faster than a socket is a socket."""

_MOST_SEATS = 8  # of which all pairings are tried


@dataclass(frozen=True)
class Link:
    """Rates in GB/s. `alone` by size of a write in bytes; `lane` is what the transport says it used."""

    source: int
    target: int
    alone: dict[int, float]
    lane: str
    together: float = 0.0

    @property
    def best(self) -> float:
        return max(self.alone.values(), default=0.0)


@dataclass(frozen=True)
class Fabric:
    """All pairs, measured in one run. `same_host`: peers could reach each other's memory."""

    links: tuple[Link, ...]
    memcpy: float
    tcp: float
    same_host: bool = True


@dataclass(frozen=True)
class Finding:
    kind: str  # fallback, halved, collapse
    text: str
    fix: str


@dataclass(frozen=True)
class Verdict:
    findings: tuple[Finding, ...] = ()
    pairing: dict[int, int] = field(default_factory=dict)  # target rank -> source rank


def judge(fabric: Fabric) -> Verdict:
    """What is wrong with these links, worst first, and the pairing with the best slowest link."""
    findings = [*_fallbacks(fabric), *_halved(fabric.links), *_collapse(fabric.links)]
    return Verdict(tuple(findings), pair_up(fabric.links))


def pair_up(links: Sequence[Link]) -> dict[int, int]:
    """A source for each target such that the slowest chosen link is as fast as can be; each source as often as needed.

    Exhaustive up to `_MOST_SEATS` places at sources, else each target takes the fastest source that is least used.
    """
    rate = {(link.source, link.target): link.best for link in links}
    sources = sorted({s for s, _ in rate})
    targets = sorted({t for _, t in rate})
    if not sources:
        return {}
    seats = sources * -(-len(targets) // len(sources))
    if len(seats) > _MOST_SEATS:
        return _greedy(rate, sources, targets)
    ways = (dict(zip(targets, way, strict=False)) for way in permutations(seats, len(targets)))
    return max(ways, key=lambda way: sorted(rate[s, t] for t, s in way.items()))


def _greedy(rate: dict[tuple[int, int], float], sources: list[int], targets: list[int]) -> dict[int, int]:
    used = dict.fromkeys(sources, 0)
    chosen = {}
    for target in targets:
        best = min(sources, key=lambda s: (used[s], -rate[s, target]))
        used[best] += 1
        chosen[target] = best
    return chosen


def _fallbacks(fabric: Fabric) -> list[Finding]:
    if not fabric.same_host:
        return []
    found = []
    for link in fabric.links:
        named = "tcp" in link.lane.lower()
        if named or (fabric.tcp and link.best < LIKE_TCP * fabric.tcp and link.best < HALVED * fabric.memcpy):
            why = f"over {link.lane}" if named else "no faster than a socket"
            found.append(
                Finding(
                    "fallback",
                    f"{_name(link)}: {link.best:.2f} GB/s {why}; tcp {fabric.tcp:.2f}, memcpy {fabric.memcpy:.2f}",
                    "let the processes share memory: one PID namespace, ptrace allowed (cma), /dev/shm large enough, "
                    'UCX_TLS unset or naming "sm"; on GPUs, cuda_ipc needs peer access',
                )
            )
    return found


def _halved(links: Sequence[Link]) -> list[Finding]:
    usual = median([link.best for link in links]) if links else 0.0
    return [
        Finding(
            "halved",
            f"{_name(link)}: {link.best:.2f} GB/s, the median pair has {usual:.2f}",
            "look at this link's width and speed (`splitserve topology`), its slot, and what else uses it",
        )
        for link in links
        if link.best < HALVED * usual
    ]


def _collapse(links: Sequence[Link]) -> list[Finding]:
    """All flows at once must carry at least a share of what one carries alone."""
    busy = [link for link in links if link.together]
    alone = max((link.best for link in busy), default=0.0)
    total = sum(link.together for link in busy)
    if len(busy) < 2 or total >= COLLAPSE * alone:
        return []
    text = f"{len(busy)} pairs at once carry {total:.2f} GB/s together, one alone {alone:.2f}"
    fix = (
        "writes of several pairs stop each other: pair ranks across switches, or let one pair write at a time"
    )
    return [Finding("collapse", text, fix)]


def _name(link: Link) -> str:
    return f"prefill rank {link.source} to decode rank {link.target}"
