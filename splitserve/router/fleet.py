"""The engines a router stands in front of, what is known of each, and which may be chosen. Pure: no I/O, no clock.

    unknown ──healthy──▶ serving ──drain──▶ draining ──▶ removed       (health, told by watch.py)
       ▲                    │
       └── num_bad checks ──┘

    closed ──failures──▶ open ──time──▶ half open ──one success──▶ closed   (circuit, told by the data plane)
                          ▲                 │
                          └──── failure ────┘

A pair (prefill, decode) is *proven* once a token has come through it; it loses that with either member's health. Only
proven pairs are routed to. A unified engine is proven alone. While every engine of one half is down, those of the other
that were part of a proven pair in this life are *left alone*: engines of ours compute a request without a room whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from splitserve.errors import ConfigError, InvariantError, NotFound
from splitserve.net.upstream import Origin, split_url
from splitserve.types import Role

from .rates import Rate


@dataclass(frozen=True)
class Endpoint:
    """Where an engine's HTTP server is, and its role.

    `bootstrap_port` is the rendezvous of a prefill engine; None: its /server_info says it.
    """

    url: str
    role: Role
    bootstrap_port: int | None = None

    @staticmethod
    def parse(text: str, role: Role) -> Endpoint:
        """`URL` or `URL,BOOTSTRAP_PORT`, as on the command line. ConfigError says what is wrong."""
        url, comma, port = text.partition(",")
        origin, target = split_url(url)
        if target != "/":
            raise ConfigError(f"{url!r} has a path", fix=f"write http://{origin.authority}")
        if comma and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ConfigError(f"{port!r} in {text!r} is no bootstrap port", fix=f"write {url},8998")
        return Endpoint(f"http://{origin.authority}", role, int(port) if comma else None)


@dataclass(frozen=True)
class LoadSnapshot:
    """What an engine last said of itself. Zeros where it does not say.

    `prompt_tokens` (computed, not taken from a cache or a peer) and `output_tokens` are totals of its life; an engine
    that tells no total of its output may tell a rate, in tokens a second. `lane`: what carries its state to peers.
    """

    num_running: int = 0
    num_waiting: int = 0
    queued_tokens: int = 0
    free_pages: int = 0
    total_pages: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    output_per_s: float = 0.0
    lane: str = ""


@dataclass(frozen=True)
class PairProblem:
    """What stopped a token on its way through a pair; `code` as in errors.py: "config_error" will not go away."""

    message: str
    code: str


@dataclass
class Circuit:
    """Consecutive failures of requests on one member; opens after `max_failures`, tries again after `open_s`."""

    max_failures: int = 5
    open_s: float = 5.0
    failures: int = 0
    opened_at: float | None = None
    trial: bool = False  # half open: one request is on its way

    def state(self, now: float) -> str:
        if self.opened_at is None:
            return "closed"
        return "open" if now - self.opened_at < self.open_s else "half_open"

    def allows(self, now: float) -> bool:
        state = self.state(now)
        return state == "closed" or (state == "half_open" and not self.trial)

    def begin(self, now: float) -> None:
        if self.opened_at is not None and self.state(now) == "half_open":
            self.trial = True

    def succeeded(self) -> None:
        self.failures, self.opened_at, self.trial = 0, None, False

    def failed(self, now: float) -> None:
        self.failures += 1
        self.trial = False
        if self.opened_at is not None or self.failures >= self.max_failures:
            self.opened_at = now

    def unknown(self) -> None:
        """A trial ended without telling anything (the client left)."""
        self.trial = False


@dataclass(eq=False)
class Member:
    """One engine. Fields are written by Fleet only."""

    id: str
    endpoint: Endpoint
    origin: Origin
    circuit: Circuit
    healthy: bool = False
    draining: bool = False
    proven: bool = False  # a token has come through it, with whichever partner, since it was last unwell
    num_bad: int = 0  # health checks failed in a row
    problem: str = "not checked yet"
    load: LoadSnapshot = field(default_factory=LoadSnapshot)
    prompt_rate: Rate = field(default_factory=Rate)
    output_rate: Rate = field(default_factory=Rate)
    bootstrap_port: int | None = None
    num_inflight: int = 0  # requests of this router
    inflight_cost: int = 0  # their work, in policy blocks
    num_others: int = 0  # requests at the engine that are not this router's, when it last told

    @property
    def role(self) -> Role:
        return self.endpoint.role

    @property
    def pressure(self) -> int:
        """Requests at the engine as well as this router can know."""
        return self.num_inflight + self.num_others

    @property
    def tokens_per_s(self) -> dict[str, float]:
        """Of prompts computed and of output, over the last seconds."""
        return {
            "prompt": self.prompt_rate.per_s,
            "output": self.output_rate.per_s or self.load.output_per_s,
        }

    def full(self, max_queued_tokens: int) -> bool:
        """Whether one more request would only wait: too many prompt tokens queued, or no pages and others waiting."""
        load = self.load
        starved = load.total_pages > 0 and load.free_pages * 50 < load.total_pages and load.num_waiting > 0
        return starved or load.queued_tokens > max_queued_tokens


class Route:
    """Where one request goes. `prefill` is None for an engine that computes all of it. `why` is for people."""

    __slots__ = ("answer", "members", "prefill", "warning", "why")

    def __init__(self, prefill: Member | None, answer: Member, why: str = "", warning: str = "") -> None:
        self.prefill = prefill
        self.answer = answer  # the engine whose bytes go to the client
        self.why = why
        self.warning = warning
        self.members = (answer,) if prefill is None else (prefill, answer)


@dataclass(frozen=True)
class Reject:
    """No engine can take the request now."""

    reason: str
    retry_after_s: float = 1.0


class Fleet:
    """All members and the proven pairs."""

    def __init__(self, *, max_bad: int = 3, max_failures: int = 5, open_s: float = 5.0) -> None:
        self._members: dict[str, Member] = {}
        self._proven: set[tuple[str, str]] = set()  # (prefill id or "", answering id)
        self._problems: dict[tuple[str, str], PairProblem] = {}
        self._num_made: dict[Role, int] = dict.fromkeys(Role, 0)
        self.version = 0  # changes with all that decides who can serve, but not with requests in flight
        self.tripped: set[str] = set()  # members whose circuit is not closed
        self._max_bad = max_bad
        self._max_failures = max_failures
        self._open_s = open_s

    # -------------------------------------------------------------- membership

    def add(self, endpoint: Endpoint) -> Member:
        """A new member, unknown and unproven. ConfigError when the URL is a member already."""
        for other in self:
            if other.endpoint.url == endpoint.url:
                raise ConfigError(f"{endpoint.url} is already here as {other.id}", field="url")
        origin, _ = split_url(endpoint.url)
        number = self._num_made[endpoint.role]
        self._num_made[endpoint.role] += 1
        member = Member(
            f"{endpoint.role.value}-{number}",
            endpoint,
            origin,
            Circuit(self._max_failures, self._open_s),
            bootstrap_port=endpoint.bootstrap_port,
        )
        self._members[member.id] = member
        self.version += 1
        return member

    def get(self, member_id: str) -> Member:
        """NotFound names the ids there are."""
        if member_id not in self._members:
            raise NotFound(f"no worker {member_id!r}; there are {', '.join(self._members) or 'none'}")
        return self._members[member_id]

    def drain(self, member_id: str) -> Member:
        """No new requests for this member; running ones end as they will."""
        member = self.get(member_id)
        member.draining = True
        self.version += 1
        return member

    def undrain(self, member_id: str) -> Member:
        member = self.get(member_id)
        member.draining = False
        self.version += 1
        return member

    def remove(self, member_id: str) -> Member:
        """No longer of the fleet; requests on it end as proxy.py says."""
        member = self.get(member_id)
        del self._members[member_id]
        self.tripped.discard(member_id)
        self._unprove(member)
        return member

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, member: Member) -> bool:
        return self._members.get(member.id) is member

    # -------------------------------------------------------------- health and proof

    def healthy(
        self, member: Member, load: LoadSnapshot, *, bootstrap_port: int | None = None, now: float = 0.0
    ) -> bool:
        """A health check succeeded. True when the member was not healthy before."""
        was = member.healthy
        self.version += 1
        member.healthy, member.num_bad, member.problem = True, 0, ""
        member.load = load
        member.prompt_rate.tell(load.prompt_tokens, now)
        member.output_rate.tell(load.output_tokens, now)
        member.num_others = max(0, load.num_running + load.num_waiting - member.num_inflight)
        if bootstrap_port is not None and member.endpoint.bootstrap_port is None:
            member.bootstrap_port = bootstrap_port
        return not was

    def unhealthy(self, member: Member, problem: str, *, certain: bool = False) -> bool:
        """A health check failed; `certain` when nobody listens there. True when this took the member's health."""
        member.num_bad += 1
        member.problem = problem
        if not member.healthy or not (certain or member.num_bad >= self._max_bad):
            return False
        member.healthy = member.proven = False
        member.bootstrap_port = member.endpoint.bootstrap_port  # what it told may change with its next life
        self._unprove(member)
        return True

    def _unprove(self, member: Member) -> None:
        self.version += 1
        self._proven = {pair for pair in self._proven if member.id not in pair}
        self._problems = {pair: why for pair, why in self._problems.items() if member.id not in pair}

    def prove(self, prefill: Member | None, answer: Member) -> None:
        """A token has come through this pair."""
        members = (answer,) if prefill is None else (prefill, answer)
        if all(m.healthy and m in self for m in members):  # else it came too late to count
            self._proven.add((prefill.id if prefill else "", answer.id))
            for m in members:
                m.proven = True
            self._problems.pop((prefill.id if prefill else "", answer.id), None)
            self.version += 1

    def disprove(self, prefill: Member | None, answer: Member, problem: PairProblem) -> bool:
        """No token came through this pair, and why. True where that is news."""
        pair = (prefill.id if prefill else "", answer.id)
        news = self._problems.get(pair) != problem
        self._problems[pair] = problem
        return news

    @property
    def problems(self) -> dict[str, PairProblem]:
        """Why no token comes through a pair, by "prefill+decode"."""
        return {"+".join(filter(None, pair)): why for pair, why in self._problems.items()}

    def is_proven(self, prefill: Member | None, answer: Member) -> bool:
        return (prefill.id if prefill else "", answer.id) in self._proven

    def unproven(self) -> list[tuple[Member | None, Member]]:
        """Pairs of healthy members through which no token has come yet."""
        up = [m for m in self if m.healthy]
        pairs: list[tuple[Member | None, Member]] = [(None, m) for m in up if m.role is Role.UNIFIED]
        decodes = [m for m in up if m.role is Role.DECODE]
        pairs += [(p, d) for p in up if p.role is Role.PREFILL for d in decodes]
        return [pair for pair in pairs if not self.is_proven(*pair)]

    @property
    def ready(self) -> bool:
        """Some route exists: a proven pair, or a proven unified engine, that is not draining."""
        return any(
            not self._members[answer].draining and (not prefill or not self._members[prefill].draining)
            for prefill, answer in self._proven
        )

    @property
    def left_alone(self) -> list[Member]:
        """Engines whose other half is down altogether, which have shown in a pair that they compute this model."""
        halves = {m.role for m in self if m.healthy} - {Role.UNIFIED}
        return [m for m in self if m.proven and m.role in halves] if len(halves) == 1 else []

    @property
    def num_proven(self) -> int:
        return len(self._proven)

    # -------------------------------------------------------------- requests

    def begin(self, route: Route, cost: int, now: float) -> None:
        """A request is on its way along `route`."""
        for member in route.members:
            member.num_inflight += 1
            member.inflight_cost += cost
            if member.id in self.tripped:
                member.circuit.begin(now)

    def end(self, route: Route, cost: int) -> None:
        """It no longer is. What it told of the members is told by `succeeded` and `failed`."""
        for member in route.members:
            member.num_inflight -= 1
            member.inflight_cost -= cost
            if member.id in self.tripped:
                member.circuit.unknown()

    def succeeded(self, member: Member) -> None:
        """Its part of a request came to a good end."""
        if member.circuit.failures:
            member.circuit.succeeded()
            self.tripped.discard(member.id)

    def failed(self, member: Member, now: float) -> None:
        """Its part of a request failed, by its own fault."""
        member.circuit.failed(now)
        if member.circuit.opened_at is not None and member in self:
            self.tripped.add(member.id)

    def check(self) -> None:
        """InvariantError when counts and names no longer agree."""
        for member in self:
            if member.num_inflight < 0 or member.inflight_cost < 0:
                raise InvariantError(
                    f"{member.id}: {member.num_inflight} in flight, cost {member.inflight_cost}"
                )
            if member.num_inflight == 0 and member.inflight_cost:
                raise InvariantError(f"{member.id}: nothing in flight, yet cost {member.inflight_cost}")
        tripped = {m.id for m in self if m.circuit.opened_at is not None}
        if tripped != self.tripped:
            raise InvariantError(f"circuits open of {sorted(tripped)}, noted {sorted(self.tripped)}")
        for prefill, answer in self._proven:
            for member_id in filter(None, (prefill, answer)):
                if member_id not in self._members or not self._members[member_id].healthy:
                    raise InvariantError(
                        f"pair ({prefill}, {answer}) is proven, but {member_id} is gone or unhealthy"
                    )
