"""The data plane: every request that engines answer, its connections, and what all of them share.

Runs on callbacks of net.connection and net.upstream: no task for a request unless a connection must be opened.
relay.py holds one request, leg.py one half of a try, policy.py decides.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from splitserve import log
from splitserve.config import RouterConfig
from splitserve.errors import EngineLost, NotFound, Overloaded, PeerLost, SplitserveError
from splitserve.net.request import Request, named
from splitserve.net.responder import Responder
from splitserve.net.upstream import Lost, Origin, Pool
from splitserve.types import Role

from .dialects import dialect
from .failure import Failure
from .fleet import Fleet, Member, Route
from .heads import request_id
from .leg import Leg
from .metrics import Metrics
from .policy import BLOCK, Chooser, Features, chain
from .relay import Relay
from .rewrite import ROOM_SPACE, prepare

GENERATING = frozenset(("/generate", "/v1/completions", "/v1/chat/completions"))
"""Paths that a pair answers together."""

TICK_S = 0.1
PREFIX = {"/generate": "", "/v1/completions": "cmpl-", "/v1/chat/completions": "chatcmpl-"}
"""How a drawn name begins: the engine makes it the answer's id."""

USUAL = frozenset(("ok", "client_error", "rejected"))
"""Outcomes that are no news: the answer itself says why, and metrics count them."""

SILENCE_S = 5.0  # an engine that is unhealthy and gave no byte for so long has failed the request
STRAGGLE_S = 10.0  # prefill may end its response so long after decode has ended the answer

_log = log.get(__name__)


class Proxy:
    """Owns the relays, the pools and the metrics; reads and tells the fleet."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        chooser: Chooser,
        *,
        now: Callable[[], float],
        rng: random.Random | None = None,
    ) -> None:
        self.config = config
        self.fleet = fleet
        self.chooser = chooser
        self.dialect = dialect(config.engine)
        self.metrics = Metrics()
        self.now = now
        self.loop = asyncio.get_running_loop()
        self.silence_s = SILENCE_S
        self._rng = rng or random.Random(random.SystemRandom().getrandbits(128))
        self._log = log.RequestLog(_log, slow_s=config.slow_request_s, clock=now)
        self._relays: set[Relay] = set()
        self._pools: dict[Origin, Pool] = {}
        self._authorities: dict[Origin, bytes] = {}
        self._stragglers: dict[Leg, float] = {}
        self._leaving: dict[Member, float] = {}  # no longer of the fleet; when what still runs there is cut
        self._connecting: set[asyncio.Task[None]] = set()
        self._ticker = self.loop.call_later(TICK_S, self._tick)

    @property
    def num_active(self) -> int:
        return len(self._relays)

    # -------------------------------------------------------------- requests

    def handle(self, request: Request, responder: Responder) -> None:
        """Route one generating request. RequestError and Overloaded are raised; all else is answered later."""
        if len(self._relays) >= self.config.max_requests:
            self.metrics.count("rejected")
            raise Overloaded(
                f"{self.config.max_requests} requests are running, the most allowed", retry_after_s=1.0
            )
        if request.path not in self.dialect.paths:
            self.metrics.count("client_error")
            raise NotFound(f"{self.dialect.name} has no {request.path}", fix="use /v1/completions")
        # /generate keeps it inside sampling_params: engines use the room
        has_seed = self.dialect.adds_seed and request.path.startswith("/v1/")
        wants_chain = self.chooser.wants_chain(self.fleet)
        try:
            prepared = prepare(
                request.body,
                seed=self._rng.getrandbits(62) if has_seed else None,
                rid=self._namer(request),
                read_prompt=wants_chain,
            )
        except SplitserveError:
            self.metrics.count("client_error")
            raise
        hashes = chain(prepared.prompt_text) if wants_chain else ()
        features = Features(num_blocks=max(1, len(request.body) // BLOCK), chain=hashes)
        relay = Relay(self, request, responder, prepared, features)
        self._relays.add(relay)
        relay.begin()

    def _namer(self, request: Request) -> Callable[[], str] | None:
        """What draws a name for `request`, as its answer's id would be; None where engines are not given one."""
        if not self.dialect.adds_rid or request_id(request.raw_headers):
            return None
        prefix = PREFIX[request.path]
        return lambda: f"{prefix}{self._rng.getrandbits(96):024x}"

    def routed(self, route: Route, features: Features) -> None:
        """Told by a relay for each of its tries."""
        self.metrics.num_warnings += bool(route.warning)
        self.metrics.num_alone += route.prefill is None and route.answer.role is not Role.UNIFIED
        self.fleet.begin(route, features.num_blocks, self.now())
        self.chooser.chosen(route, features)

    def blamed(self, told: Failure) -> None:
        """A member has failed a try by its own fault."""
        self.fleet.failed(told.member, self.now())
        self.heard(told)

    def heard(self, told: Failure) -> None:
        """A member that says its engine has died is not asked again."""
        if told.code == EngineLost.code:
            self._down(told.member, "its engine has died")

    def _down(self, member: Member, why: str) -> None:
        """Known before the next health check is due: what still runs looks for another engine at once."""
        if self.fleet.unhealthy(member, why, certain=True):
            _log.warning("%s at %s is down: %s", member.id, member.endpoint.url, why)

    def finished(self, relay: Relay, outcome: str) -> None:
        """Told by a relay, once, while its route still stands."""
        self._relays.discard(relay)
        self.metrics.count(outcome)
        seconds = self.now() - relay.started_at
        self.metrics.total_s.observe(seconds)
        self._log.ended(
            lambda: f"{self._described(relay)}: {outcome}, {seconds:.3f} s",
            seconds=seconds,
            usual=outcome in USUAL,
        )

    def _described(self, relay: Relay) -> str:
        """Its name, path and engines, and what went wrong last."""
        request = relay.request
        name = named(relay.prepared.rid, request_id(request.raw_headers).decode("latin-1"))
        members = "+".join(m.id for m in self.fleet if relay.uses(m)) or "no engine"
        wrong = f" (last failure: {relay.last_failure.error.message})" if relay.last_failure else ""
        return f"request {name} ({request.path}, {members}){wrong}"

    def draw_room(self) -> int:
        """63 bits, never 0, with space for one room a choice above it."""
        return min(max(self._rng.getrandbits(63), 1), (1 << 63) - ROOM_SPACE)

    # -------------------------------------------------------------- connections

    def authority(self, member: Member) -> bytes:
        """Value of the Host header for a member."""
        found = self._authorities.get(member.origin)
        if found is None:
            found = self._authorities[member.origin] = member.origin.authority.encode()
        return found

    def send(self, leg: Leg, request: bytes) -> None:
        """Start a leg on a kept connection, at once, or on a new one as soon as it is open."""
        pool = self._pool(leg.member.origin)
        upstream = pool.take()
        if upstream is not None:
            leg.start(upstream, request)
            return
        task = self.loop.create_task(self._connect(pool, leg, request))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, pool: Pool, leg: Leg, request: bytes) -> None:
        try:
            upstream = await pool.connect()
        except OSError as e:
            if isinstance(e, ConnectionRefusedError):
                self._down(leg.member, "nobody listens there")
            if not leg.ended:
                reason = (
                    "no answer to the connection attempt"
                    if isinstance(e, TimeoutError)
                    else e.strerror or str(e)
                )
                leg.on_lost(Lost(f"cannot connect: {reason}", connected=False))
            return
        if leg.ended:
            pool.give(upstream)
        else:
            leg.start(upstream, request)

    def _pool(self, origin: Origin) -> Pool:
        pool = self._pools.get(origin)
        if pool is None:
            idle = self.config.max_requests
            pool = self._pools[origin] = Pool(origin, max_idle=idle, connect_timeout_s=0.5)
        return pool

    def detach(self, leg: Leg) -> None:
        """A leg whose end nobody waits for: its connection is used again if it ends in time."""
        leg.detach()
        self._stragglers[leg] = self.now() + STRAGGLE_S

    # -------------------------------------------------------------- time

    def _tick(self) -> None:
        self._ticker = self.loop.call_later(TICK_S, self._tick)
        now = self.now()
        for relay in list(self._relays):
            relay.tick(now, self.silence_s)
        for leg, until in list(self._stragglers.items()):
            if leg.ended or now > until:
                leg.stop()
                del self._stragglers[leg]
        self._see_off(now)

    def removed(self, member: Member) -> None:
        """`member` left the fleet: requests on it may end within `drain_s`, then they are cut with an error."""
        self._leaving[member] = self.now() + self.config.drain_s
        self._see_off(self.now())

    def _see_off(self, now: float) -> None:
        """Close the connections of removed members that have nothing left to do, or no time."""
        for member, until in list(self._leaving.items()):
            running = [r for r in self._relays if r.uses(member)]
            if running and now < until:
                continue
            for relay in running:
                limit = f"{self.config.drain_s:g} s"
                relay.cancel(
                    PeerLost(f"{member.id} was removed; this request had {limit} to end, and did not")
                )
            del self._leaving[member]
            if not any(m.origin == member.origin for m in (*self.fleet, *self._leaving)):
                pool = self._pools.pop(member.origin, None)
                if pool is not None:
                    pool.close()

    async def close(self) -> None:
        """Cut what still runs with a typed error and close all connections to engines."""
        self._ticker.cancel()
        if self._relays:
            _log.warning("stopping with %d requests unfinished", len(self._relays))
        for relay in list(self._relays):
            relay.cancel(Overloaded("the router is stopping"))
        for task in list(self._connecting):
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for pool in self._pools.values():
            pool.close()

    def check(self) -> None:
        """InvariantError when the fleet's counts differ from the relays'; for tests, when nothing runs."""
        self.fleet.check()
        assert self._relays or all(m.num_inflight == 0 for m in self.fleet), [
            m.num_inflight for m in self.fleet
        ]
