"""What the measured links between prefill and decode ranks mean: findings, a direction, and which ranks to pair. Pure.

    Link (a, b): alone    GB/s of single writes (PUT) by size, with nothing else on the fabric
                 together GB/s of the same while every other pair writes too
                 get, get_together   the same where the target reads (GET) from the source
    yardsticks:  copy     one core of the source copies the same bytes     tcp   a plain socket between the two

Which direction moves more, and which pairs are fast, depends on the board: posted writes of several devices under one
PCIe switch may stop each other where reads do not, and without NVLink UCX may send reads over TCP where it does not
send writes. So both are measured. The limits below separate kinds of faults, not good machines from better ones: each
fault halves a rate or worse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from statistics import median

from splitserve.transfer.lanes import PEER_MEMORY, large_lane, slow_lane

HALVED = 0.6
"""Of the median link: below it a link is narrower, slower or longer than its neighbours."""

COLLAPSE = 0.5
"""All pairs together against one alone: below it they stop each other (posted writes under one switch do that)."""

LIKE_TCP = 1.3
"""A link of one host that is hardly faster than a socket is one, unless its lane says otherwise: then it is slow."""

WORTH_READING = 1.25
"""Reads must carry so many times what writes carry to be chosen: a read begins with a message to who reads."""

PUT, GET = "put", "get"

HOST, GPU = "host", "gpu"
"""Kinds of memory that links join."""

_LANE_FIXES = {
    HOST: "let the processes share memory: one PID namespace, ptrace allowed (cma), /dev/shm large enough, "
    'UCX_TLS unset or naming "sm"; on GPUs, cuda_ipc needs peer access',
    GPU: f"`splitserve doctor` says whether the GPUs reach each other (peers, {PEER_MEMORY}); UCX_TLS and [transfer] "
    f"ucx must allow {PEER_MEMORY}; both engines in one container, or with --ipc=host and one PID namespace",
}

_MOST_SEATS = 8  # of which all pairings are tried


@dataclass(frozen=True)
class Link:
    """Rates in GB/s. `alone` and `get` by bytes moved at once; `lane` is what the transport says it writes through.

    `near` names the network cards nearest to the source, where that is known. 0.0 and {} are what was not measured.
    """

    source: int
    target: int
    alone: dict[int, float]
    lane: str
    together: float = 0.0
    get: dict[int, float] = field(default_factory=dict)
    get_together: float = 0.0
    copy: float = 0.0
    tcp: float = 0.0
    near: tuple[str, ...] = ()

    @property
    def best(self) -> float:
        return max(self.alone.values(), default=0.0)

    def sizes(self, direction: str) -> dict[int, float]:
        """GB/s by size, alone, in a direction."""
        return self.get if direction == GET else self.alone

    def shared(self, direction: str) -> float:
        """GB/s while all pairs move, 0.0 where this pair was not among them."""
        return self.get_together if direction == GET else self.together

    def rate(self, direction: str) -> float:
        """The fastest in a direction."""
        return max(self.sizes(direction).values(), default=0.0)


@dataclass(frozen=True)
class Fabric:
    """All pairs, measured in one run. `same_host`: peers could reach each other's memory; `nics`: the host's cards.

    `sources` and `targets` say what the ranks of the links are, "prefill-0 rank 0 (cpus 0)"; empty: numbers will do.
    `memory` is what was measured: HOST, GPU, or "gpu to host" where the sides differ.
    """

    links: tuple[Link, ...]
    memcpy: float
    tcp: float
    same_host: bool = True
    nics: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    memory: str = HOST

    def name(self, link: Link) -> str:
        """One pair as a person reads it."""
        source = self.sources[link.source] if self.sources else f"prefill rank {link.source}"
        target = self.targets[link.target] if self.targets else f"decode rank {link.target}"
        return f"{source} to {target}"


@dataclass(frozen=True)
class Finding:
    kind: str  # fallback, halved, wrong_nic, collapse; slow, which is a warning
    text: str
    fix: str


@dataclass(frozen=True)
class Verdict:
    findings: tuple[Finding, ...] = ()
    pairing: dict[int, int] = field(default_factory=dict)  # target rank -> source rank
    direction: str = PUT
    why: str = ""
    warnings: tuple[Finding, ...] = ()  # no faults: what is slower here than it could be


def judge(fabric: Fabric) -> Verdict:
    """What is wrong with these links, worst first; the better direction; the pairing with the best slowest link."""
    findings = [
        *_fallbacks(fabric),
        *_halved(fabric),
        *_wrong_nics(fabric),
        *_collapse(fabric.links),
    ]
    direction, why = choose_direction(fabric.links)
    return Verdict(tuple(findings), pair_up(fabric.links, direction), direction, why, tuple(_slow(fabric)))


def choose_direction(links: Sequence[Link]) -> tuple[str, str]:
    """(PUT or GET, why): what carries more when all pairs move at once, or alone where that was not measured."""
    put, get = (_carried(links, direction) for direction in (PUT, GET))
    if not get:
        return PUT, "reads were not measured"
    both = f"reads carry {get:.2f} GB/s, writes {put:.2f}"
    if get >= WORTH_READING * put:
        return GET, f"{both}: the decode side should fetch"
    return PUT, f"{both}: writes need no message before them"


def _carried(links: Sequence[Link], direction: str) -> float:
    busy = sum(link.shared(direction) for link in links)
    return busy or max((link.rate(direction) for link in links), default=0.0)


def pair_up(links: Sequence[Link], direction: str = PUT) -> dict[int, int]:
    """A source for each target such that the slowest chosen link is as fast as can be; each source as often as needed.

    Exhaustive up to `_MOST_SEATS` places at sources, else each target takes the fastest source that is least used.
    """
    rate = {(link.source, link.target): link.rate(direction) for link in links}
    sources = sorted({s for s, _ in rate})
    targets = sorted({t for _, t in rate})
    if not sources:
        return {}
    seats = sources * -(-len(targets) // len(sources))
    if len(seats) > _MOST_SEATS:
        return _greedy(rate, sources, targets)
    ways = (dict(zip(targets, way, strict=False)) for way in permutations(seats, len(targets)))
    return max(ways, key=lambda way: sorted(rate[s, t] for t, s in way.items()))


def best_order(rate: Mapping[tuple[int, int], float], num_seats: int) -> tuple[int, ...]:
    """The seat of each of `num_seats` ranks, so that the slowest of their links is as fast as can be.

    `rate[rank, seat]` is the slowest link of that rank if it sat there. Equal ways: the one nearest to the given order.
    """
    if num_seats > _MOST_SEATS:
        free, order = list(range(num_seats)), []
        for rank in range(num_seats):
            order.append(max(free, key=lambda seat: (rate[rank, seat], seat == rank)))
            free.remove(order[-1])
        return tuple(order)
    ways = permutations(range(num_seats))
    return max(ways, key=lambda way: sorted(rate[rank, seat] for rank, seat in enumerate(way)))


def _greedy(rate: dict[tuple[int, int], float], sources: list[int], targets: list[int]) -> dict[int, int]:
    used = dict.fromkeys(sources, 0)
    chosen = {}
    for target in targets:
        best = min(sources, key=lambda s: (used[s], -rate[s, target]))
        used[best] += 1
        chosen[target] = best
    return chosen


def _fallbacks(fabric: Fabric) -> list[Finding]:
    """Pairs of one host that go over what they need not: told by the lane, and by the rate where it has no name."""
    if not fabric.same_host:
        return []
    return [
        Finding(
            "fallback",
            f"{fabric.name(link)}: {link.best:.2f} GB/s {what}; {_beside(fabric, link)}",
            _LANE_FIXES.get(fabric.memory, _LANE_FIXES[HOST]),
        )
        for link in fabric.links
        if (what := _wrong_lane(fabric, link))
    ]


def _wrong_lane(fabric: Fabric, link: Link) -> str:
    """What gives a pair away, "" for nothing. GPUs without peer access have no better lane: only a slow one tells."""
    if "tcp" in large_lane(link.lane):
        return f"over {link.lane}"
    if fabric.memory == GPU and _below_copy(fabric, link) and slow_lane("", link.lane):
        return f"over {link.lane}, not over {PEER_MEMORY}"
    if not _known(link.lane) and _like_socket(fabric, link):
        return "no faster than a socket"
    return ""


def _slow(fabric: Fabric) -> list[Finding]:
    """Pairs that go over what they should, and slowly: two ranks that share a core, a busy machine, a narrow link."""
    return [
        Finding(
            "slow",
            f"{fabric.name(link)}: {link.best:.2f} GB/s over {link.lane}, no fallback; {_beside(fabric, link)}",
            "measure again with nothing else running; ranks that share a core are no faster than a socket",
        )
        for link in fabric.links
        if fabric.same_host
        and _known(link.lane)
        and not _wrong_lane(fabric, link)
        and _like_socket(fabric, link)
    ]


def _known(lane: str) -> bool:
    return lane not in ("", "unknown")


def _like_socket(fabric: Fabric, link: Link) -> bool:
    """Hardly faster than a socket, and far below a plain copy: a slow machine's copies are no faster than sockets."""
    tcp = link.tcp or fabric.tcp
    return bool(tcp) and link.best < LIKE_TCP * tcp and _below_copy(fabric, link)


def _below_copy(fabric: Fabric, link: Link) -> bool:
    copy = link.copy or fabric.memcpy
    return not copy or link.best < HALVED * copy


def _beside(fabric: Fabric, link: Link) -> str:
    return f"tcp {link.tcp or fabric.tcp:.2f}, copy {link.copy or fabric.memcpy:.2f}"


def _halved(fabric: Fabric) -> list[Finding]:
    usual = median([link.best for link in fabric.links]) if fabric.links else 0.0
    return [
        Finding(
            "halved",
            f"{fabric.name(link)}: {link.best:.2f} GB/s, the median pair has {usual:.2f}",
            "look at this link's width and speed (`splitserve topology`), its slot, and what else uses it",
        )
        for link in fabric.links
        if link.best < HALVED * usual
    ]


def _wrong_nics(fabric: Fabric) -> list[Finding]:
    """Links that go through a network card, and not through one beside the source."""
    found = []
    for link in fabric.links:
        through = {part.split(":")[0] for part in link.lane.split("/")} & set(fabric.nics)
        if link.near and through and not through & set(link.near):
            found.append(
                Finding(
                    "wrong_nic",
                    f"{fabric.name(link)}: goes through {', '.join(sorted(through))}, "
                    f"but {', '.join(link.near)} is nearest",
                    f'[transfer] ucx = ["NET_DEVICES={link.near[0]}:1"]; `splitserve topology` shows the tree',
                )
            )
    return found


def _collapse(links: Sequence[Link]) -> list[Finding]:
    """All flows at once must carry at least a share of what one carries alone."""
    busy = [link for link in links if link.together]
    alone = max((link.best for link in busy), default=0.0)
    total = sum(link.together for link in busy)
    if len(busy) < 2 or total >= COLLAPSE * alone:
        return []
    text = f"{len(busy)} pairs at once carry {total:.2f} GB/s together, one alone {alone:.2f}"
    fix = (
        "writes of several pairs stop each other: pair ranks across switches, let one pair write at a time, or let "
        "decode read"
    )
    return [Finding("collapse", text, fix)]
