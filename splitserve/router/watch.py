"""Health, load and proof: a task for each member asks its /health and /get_load, one for each pair sends a token.

Tells the fleet; decides nothing. A refused connection is certain; a slow answer only counts, since a busy engine
machine answers late.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from splitserve import log
from splitserve.config import RouterConfig
from splitserve.errors import PeerLost, SplitserveError
from splitserve.net.client import Client, ClientResponse, Unreachable
from splitserve.types import Role

from .dialects import dialect
from .fleet import Fleet, LoadSnapshot, Member, PairProblem, Route
from .rewrite import prepare

PROBE_TIMEOUT_S = 60.0  # the first token of a cold engine takes long
HEALTH_TIMEOUT_S = 3.0  # a machine whose every core computes answers late; death is seen by other means

_log = log.get(__name__)


class _Refused(PeerLost):
    """An engine answered, with an error of its own."""

    def __init__(self, member_id: str, answer: ClientResponse) -> None:
        told = _error_of(answer)
        text = told.get("message") or answer.body[:300].decode(errors="replace")
        super().__init__(f"{member_id} answered {answer.status}: {text}")
        self.code_told = str(told.get("code") or self.code)


class Watch:
    """Background tasks over a fleet."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        client: Client,
        *,
        draw_room: Callable[[], int],
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._client = client
        self._draw_room = draw_room
        self._dialect = dialect(config.engine)
        self._headers = (*headers, ("content-type", "application/json"))
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._proving: dict[tuple[str, str], asyncio.Task[None]] = {}
        self.num_probes = 0

    def start(self) -> None:
        """Watch every member there is; `follow` those that come later."""
        for member in self._fleet:
            self.follow(member)

    def follow(self, member: Member) -> None:
        self._tasks[member.id] = asyncio.create_task(self._watch(member))

    def leave(self, member: Member) -> None:
        """Stop asking a removed member."""
        task = self._tasks.pop(member.id, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *self._proving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -------------------------------------------------------------- health

    async def _watch(self, member: Member) -> None:
        while True:
            await self.check(member)
            await asyncio.sleep(self._config.health_interval_s)

    async def check(self, member: Member) -> None:
        """One round of questions to one member."""
        timeout_s = max(HEALTH_TIMEOUT_S, self._config.health_interval_s)
        url = member.endpoint.url
        try:
            answer = await self._client.request(
                "GET", f"{url}/health", headers=self._headers, timeout_s=timeout_s
            )
            if answer.status >= 300:
                raise PeerLost(f"/health answered {answer.status}")
            load = await self._load(url, timeout_s)
            port = None
            if self._lacks_rendezvous(member):
                port = await self._bootstrap_port(url, timeout_s)
        except SplitserveError as e:
            if self._fleet.unhealthy(member, e.message, certain=isinstance(e, Unreachable)):
                _log.warning("%s at %s is down: %s", member.id, url, e.message)
            return
        if self._fleet.healthy(member, load, bootstrap_port=port, now=time.monotonic()):
            _log.info("%s at %s is up", member.id, url)
        self._prove_missing()

    async def _load(self, url: str, timeout_s: float) -> LoadSnapshot:
        answer = await self._client.request(
            "GET", url + self._dialect.load_path, headers=self._headers, timeout_s=timeout_s
        )
        return self._dialect.load(answer)

    async def _bootstrap_port(self, url: str, timeout_s: float) -> int | None:
        """What a prefill engine says of its own rendezvous; None where it does not say."""
        answer = await self._client.request(
            "GET", f"{url}/server_info", headers=self._headers, timeout_s=timeout_s
        )
        facts = _decoded(answer)
        port = facts.get("disaggregation_bootstrap_port") if isinstance(facts, dict) else None
        return port if isinstance(port, int) else None

    # -------------------------------------------------------------- proof

    def _prove_missing(self) -> None:
        """Begin with every pair that is neither proven nor on its way; a pair that hangs keeps no other waiting."""
        for prefill, answer in self._fleet.unproven():
            key = (prefill.id if prefill else "", answer.id)
            if key not in self._proving:
                task = self._proving[key] = asyncio.create_task(self._prove(prefill, answer))
                task.add_done_callback(partial(self._proved, key))

    def _proved(self, key: tuple[str, str], _: asyncio.Task[None]) -> None:
        self._proving.pop(key, None)

    async def _prove(self, prefill: Member | None, answer: Member) -> None:
        """Send one token through; say why not when that changes."""
        name = f"{prefill.id} and {answer.id}" if prefill else answer.id
        self.num_probes += 1
        try:
            await self._one_token(prefill, answer)
        except SplitserveError as e:
            code = e.code_told if isinstance(e, _Refused) else e.code
            if self._fleet.disprove(prefill, answer, PairProblem(e.message, code)):
                _log.warning("no token came through %s: %s", name, e.message)
            return
        self._fleet.prove(prefill, answer)
        _log.info("a token came through %s", name)

    def _lacks_rendezvous(self, member: Member) -> bool:
        return self._dialect.has_rendezvous and member.role is Role.PREFILL and member.bootstrap_port is None

    async def _one_token(self, prefill: Member | None, answer: Member) -> None:
        if prefill is not None and self._lacks_rendezvous(prefill):
            raise PeerLost(
                f"{prefill.id} has no bootstrap port: give it as --prefill {prefill.endpoint.url},PORT"
            )
        prepared = prepare(self._dialect.probe[1], seed=None)
        opening = self._dialect.opening(prepared, Route(prefill, answer), self._draw_room, b"")
        if prefill is None:
            await self._ask(answer, opening.to_answer)
        elif not opening.to_answer:  # decode's request is made of prefill's answer
            first = await self._ask(prefill, opening.to_prefill)
            await self._ask(answer, self._dialect.after_prefill(prepared, first, must_cross=True))
        else:
            await self._ask_both(prefill, answer, opening.to_answer)

    async def _ask_both(self, prefill: Member, answer: Member, body: bytes) -> None:
        legs = {asyncio.create_task(self._ask(member, body)) for member in (prefill, answer)}
        done, pending = await asyncio.wait(legs, return_when=asyncio.FIRST_EXCEPTION)
        for task in pending:  # the other half of a failed one would only wait
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            task.result()

    async def _ask(self, member: Member, body: bytes) -> bytes:
        url = member.endpoint.url + self._dialect.probe[0]
        found = await self._client.request(
            "POST", url, body=body, headers=self._headers, timeout_s=PROBE_TIMEOUT_S
        )
        if found.status != 200 or not found.body:
            raise _Refused(member.id, found)
        return found.body


def _error_of(answer: ClientResponse) -> dict[str, Any]:
    """The `error` object of an OpenAI error body; empty where there is none."""
    try:
        decoded = msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        return {}
    told = decoded.get("error") if isinstance(decoded, dict) else None
    return told if isinstance(told, dict) else {}


def _decoded(answer: ClientResponse) -> Any:
    if answer.status != 200:
        return None
    try:
        return msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        return None
