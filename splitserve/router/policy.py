"""Which engine takes a request. Pure: features, fleet and time in, Route or Reject out; a policy's memory is its own.

Never chosen: an unhealthy or draining member, an unproven pair, a member that is full. An open circuit is avoided as
long as another member can do it; the last of its role stays selectable, with a warning, so that a burst of failures
never takes a whole service down in silence. An engine left alone by its other half computes requests whole, where its
kind can and the settings let it: slower than a pair, but an answer.

cache_aware keeps, for each block-aligned beginning of a prompt, who has seen it, as a hash chain

    h0 = hash(seed, block 0)    h1 = hash(h0, block 1)    h2 = hash(h1, block 2) ...

over the prompt's JSON text as it came: no tokenising, no rendering, and a conversation that grows keeps its beginning.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence

import msgspec

from splitserve.errors import ConfigError
from splitserve.types import Role

from .fleet import Fleet, Member, Reject, Route

BLOCK = 256  # bytes of prompt text: about 64 tokens, a page
MAX_BLOCKS = 256  # of a chain; two prompts alike for 64 KiB are alike


class Features(msgspec.Struct, frozen=True):
    """What routing may know of a request."""

    num_blocks: int = 1  # its prompt, in blocks
    chain: tuple[int, ...] = ()  # hash chain of the whole blocks; empty when no policy wants it


class View(msgspec.Struct, frozen=True):
    """Who can serve, for one version of a fleet."""

    answers: list[Member]  # healthy, not draining, not full, proven with somebody of whom the same holds
    partners: dict[str, list[Member]]  # answering id -> prefills proven with it; [] for one that needs none
    has_choice: bool = False  # of some kind of engine there are several, well or not


def chain(prompt: bytes) -> tuple[int, ...]:
    """Hash chain of the whole blocks of `prompt` (its JSON text).

    Python's keyed hash: fast, and nobody outside this process can make collisions.
    """
    hashes = []
    link = 0
    for start in range(0, min(len(prompt) - BLOCK + 1, MAX_BLOCKS * BLOCK), BLOCK):
        link = hash((link, prompt[start : start + BLOCK]))
        hashes.append(link)
    return tuple(hashes)


class SeenPrefixes:
    """Who has seen which beginnings: hash -> set of members as a bit mask. Bounded; the longest unused go first."""

    def __init__(self, max_entries: int = 1 << 17) -> None:
        self._masks: dict[int, int] = {}  # insertion order is age
        self._bits: dict[str, int] = {}
        self._max_entries = max_entries

    def __len__(self) -> int:
        return len(self._masks)

    def depths(self, hashes: Sequence[int], members: Sequence[Member]) -> list[int]:
        """For each member, how many leading blocks it has seen."""
        bits = [self._bits.get(m.id, 0) for m in members]
        found = [0] * len(members)
        for depth, link in enumerate(hashes, 1):
            mask = self._masks.get(link, 0)
            alive = False
            for i, bit in enumerate(bits):
                if mask & bit and found[i] == depth - 1:
                    found[i] = depth
                    alive = True
            if not alive:
                break
        return found

    def saw(self, hashes: Sequence[int], members: Sequence[Member]) -> None:
        """`members` now have these beginnings."""
        bits = 0
        for member in members:
            bits |= self._bits.setdefault(member.id, 1 << len(self._bits))
        masks = self._masks
        for link in hashes:
            masks[link] = masks.pop(link, 0) | bits
        if len(self._masks) > self._max_entries:
            for link in list(self._masks)[: self._max_entries // 8]:
                del self._masks[link]

    def forget(self) -> None:
        """Caches were flushed."""
        self._masks.clear()


Pick = Callable[[Sequence[Member], Features], tuple[Member, str]]


class Chooser:
    """One policy with its memory: a turn for each role, random numbers, seen prefixes."""

    def __init__(
        self,
        policy: str,
        *,
        max_queued_tokens: int = 1 << 18,
        alone: bool = False,  # whether halves may answer alone
        rng: random.Random | None = None,
    ) -> None:
        picks: dict[str, Pick] = {
            "round_robin": self._round_robin,
            "random": self._random,
            "least_loaded": self._least_loaded,
            "power_of_two": self._power_of_two,
            "cache_aware": self._cache_aware,
        }
        if policy not in picks:
            raise ConfigError(f"no policy {policy!r}", field="policy", fix=f"one of {', '.join(picks)}")
        self._pick = picks[policy]
        self._max_queued_tokens = max_queued_tokens
        self._alone = alone
        self._rng = rng or random.Random()
        self._turns = dict.fromkeys(Role, 0)
        self._view = View([], {})
        self._viewed: Fleet | None = None
        self._version = -1
        self._hashes = policy == "cache_aware"
        self.seen = SeenPrefixes()

    # -------------------------------------------------------------- the decision

    def choose(
        self, features: Features, fleet: Fleet, now: float, *, avoid: Collection[str] = ()
    ) -> Route | Reject:
        """A route along members that can serve now; those in `avoid` have just failed and come last."""
        view = self._see(fleet)
        if not view.answers:
            return self._reject(fleet)
        careful = bool(avoid) or bool(fleet.tripped)
        answers, warning = self._prefer(view.answers, now, avoid) if careful else (view.answers, "")
        answer, why = self._pick(answers, features) if len(answers) > 1 else (answers[0], "only one")
        prefills = view.partners[answer.id]
        if not prefills:
            return Route(None, answer, why if answer.role is Role.UNIFIED else f"left alone; {why}", warning)
        partners, other = self._prefer(prefills, now, avoid) if careful else (prefills, "")
        prefill, why_prefill = (
            self._pick(partners, features) if len(partners) > 1 else (partners[0], "only one")
        )
        return Route(prefill, answer, f"{why_prefill}; {why}", f"{other} {warning}".strip())

    def wants_chain(self, fleet: Fleet) -> bool:
        """Whether a prompt's hash chain decides anything: not where there is one engine of each kind."""
        return self._hashes and self._see(fleet).has_choice

    def _see(self, fleet: Fleet) -> View:
        if self._viewed is not fleet or self._version != fleet.version:
            self._view = self._look(fleet)
            self._viewed, self._version = fleet, fleet.version
        return self._view

    def _look(self, fleet: Fleet) -> View:
        roomy = [m for m in fleet if m.healthy and not m.draining and not m.full(self._max_queued_tokens)]
        prefills = [m for m in roomy if m.role is Role.PREFILL]
        partners: dict[str, list[Member]] = {}
        for m in roomy:
            if m.role is Role.UNIFIED and fleet.is_proven(None, m):
                partners[m.id] = []
            elif m.role is Role.DECODE and (found := [p for p in prefills if fleet.is_proven(p, m)]):
                partners[m.id] = found
        if self._alone and not partners:
            alone = fleet.left_alone
            partners = {m.id: [] for m in roomy if m in alone}
        roles = [m.role for m in fleet]
        several = len(roles) > len(set(roles))
        return View([m for m in roomy if m.id in partners], partners, several)

    def chosen(self, route: Route, features: Features) -> None:
        """The route was taken: its members will have this prompt's beginning in their caches."""
        if features.chain:
            self.seen.saw(features.chain, route.members)

    @staticmethod
    def _prefer(members: list[Member], now: float, avoid: Collection[str]) -> tuple[list[Member], str]:
        """Leave out open circuits, then `avoid`, each only while somebody is left."""
        closed = [m for m in members if m.circuit.allows(now)]
        warning = ""
        if not closed:
            closed = members
            warning = f"every circuit of {members[0].role.value} is open: {', '.join(m.id for m in members)}"
        return [m for m in closed if m.id not in avoid] or closed, warning

    def _reject(self, fleet: Fleet) -> Reject:
        """Say what is missing, most useful first."""
        serving = [m for m in fleet if m.healthy and not m.draining]
        full = [m for m in serving if m.full(self._max_queued_tokens)]
        if full:
            queued = max(m.load.queued_tokens for m in full)
            names = ", ".join(
                f"{m.id} ({m.load.num_waiting} waiting, {m.load.free_pages} pages free)" for m in full
            )
            return Reject(f"the fleet is full: {names}", max(1.0, queued / self._max_queued_tokens))
        if not len(fleet):
            return Reject("no engine is registered here", 5.0)
        down = [f"{m.id} ({'draining' if m.draining else m.problem})" for m in fleet if m not in serving]
        if down:
            return Reject(f"no ready pair: {', '.join(down)}", 1.0)
        return Reject("no ready pair: no token has come through one yet", 1.0)

    # -------------------------------------------------------------- policies

    def _round_robin(self, members: Sequence[Member], features: Features) -> tuple[Member, str]:  # noqa: ARG002
        role = members[0].role
        turn = self._turns[role]
        self._turns[role] = turn + 1
        return members[turn % len(members)], "round_robin"

    def _random(self, members: Sequence[Member], features: Features) -> tuple[Member, str]:  # noqa: ARG002
        return self._rng.choice(members), "random"

    def _least_loaded(self, members: Sequence[Member], features: Features) -> tuple[Member, str]:
        least = min((m.pressure, m.load.queued_tokens) for m in members)
        equal = [m for m in members if (m.pressure, m.load.queued_tokens) == least]
        member, _ = self._round_robin(equal, features)
        return member, f"least_loaded pressure={least[0]}"

    def _power_of_two(self, members: Sequence[Member], features: Features) -> tuple[Member, str]:
        two = self._rng.sample(members, 2) if len(members) > 2 else members
        member, _ = self._least_loaded(two, features)
        return member, f"power_of_two pressure={member.pressure}"

    def _cache_aware(self, members: Sequence[Member], features: Features) -> tuple[Member, str]:
        """Least work ahead of this prompt's last token: what is in flight there and what is not cached there.

        A decode engine computes none of the prompt; for it a seen prefix only breaks ties.
        """
        depths = self.seen.depths(features.chain, members)
        if all(m.role is Role.DECODE for m in members):
            costs = [(m.pressure, -depth) for m, depth in zip(members, depths, strict=True)]
        else:
            costs = [(m.inflight_cost - depth, m.pressure) for m, depth in zip(members, depths, strict=True)]
        least = min(costs)
        equal = [i for i, cost in enumerate(costs) if cost == least]
        chosen = equal[0]
        if len(equal) > 1:
            member, _ = self._round_robin([members[i] for i in equal], features)
            chosen = members.index(member)
        return members[chosen], f"cache_aware seen={depths[chosen]}/{features.num_blocks}"
