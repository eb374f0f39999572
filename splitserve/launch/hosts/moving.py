"""An engine whose host is gone gets another one that has room: planned, reserved, and its router told. Starts nothing.

    relay ends ─▶ supervisor asks `Mover` ─▶ host still there: None, start it again as it was
                                           └▶ host gone: another host's GPUs or cores, ports and command line

What might be left of the old one cannot answer as a double: its relay has waited until its crew, unasked, must have
ended it (crew.py, LEASE_S), and the router knows it no longer. Peers keep reserved what it might still write to.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitserve.errors import SplitserveError
from splitserve.launch.commands import url
from splitserve.launch.deployment import Deployment
from splitserve.launch.hosts.spread import rehouse
from splitserve.launch.procs import ROUTER, ProcSpec
from splitserve.net.client import Client
from splitserve.net.keys import bearer

if TYPE_CHECKING:
    from splitserve.launch.hosts.cluster import Cluster

TELL_S = 5.0
TRIES = 5
PAUSE_S = 1.0


@dataclass(frozen=True)
class Moved:
    """What the supervisor is to start instead, and the router's command line from its next start on."""

    spec: ProcSpec
    router: ProcSpec
    ports: dict[str, int]
    text: str


class Mover:
    """Called with an engine's name, in a thread, each time that it is to be started again."""

    def __init__(
        self,
        cluster: Cluster,
        deployment: Deployment,
        specs: Sequence[ProcSpec],
        ports: dict[str, int],
        *,
        key: Callable[[], str],
    ) -> None:
        """`specs` as placed, not as relayed; `key`: the router's, "" where it wants none."""
        self._cluster = cluster
        self._deployment = deployment
        self._specs = {s.name: s for s in specs}
        self._ports = dict(ports)
        self._key = key

    def __call__(self, name: str) -> Moved | None:
        """None where its host is there. CapacityError, with the sum, where no other has room."""
        old = self._specs[name]
        alive = self._cluster.alive()
        if any(host.name == old.host for host in alive):
            return None
        specs = list(self._specs.values())
        planned, router = rehouse(self._cluster.hosts, alive, self._deployment, specs, name)
        got = self._cluster.reserve_one(self._deployment, name, planned.host)
        if got != planned.host:
            only = [host for host in alive if host.name == got]
            planned, router = rehouse(self._cluster.hosts, only, self._deployment, specs, name)
        before = self._url(old)
        self._ports |= self._cluster.claim([planned])
        self._specs |= {name: planned, ROUTER: router}
        self._tell_router(planned, before)
        own = {w: n for w, n in self._ports.items() if w.startswith(f"{name}.")}
        text = f"from {before} to {self._url(planned)}: its host is gone"
        return Moved(self._cluster.relayed(planned, self._ports), router, own, text)

    def _url(self, spec: ProcSpec) -> str:
        wish = next(w for w in spec.ports if w.key == "http")
        return url(wish.host, self._ports[f"{spec.name}.http"])

    def _tell_router(self, spec: ProcSpec, before: str) -> None:
        """Where it cannot be told it is not there, and will be told by its next command line."""
        wish = next(w for w in self._specs[ROUTER].ports if w.key == "http")
        at = url(wish.host, self._ports[f"{ROUTER}.http"])
        new: dict[str, object] = {"url": self._url(spec), "worker_type": spec.role}
        if any(w.key == "bootstrap" for w in spec.ports):
            new["bootstrap_port"] = self._ports[f"{spec.name}.bootstrap"]
        for _ in range(TRIES):
            try:
                asyncio.run(_exchange(at, self._key(), before, new))
            except SplitserveError:
                time.sleep(PAUSE_S)
            else:
                return


async def _exchange(router: str, key: str, old: str, new: dict[str, object]) -> None:
    """Take one engine out of a router's fleet and another in."""
    headers = [("content-type", "application/json"), *bearer(key)]
    client = Client()
    try:
        told = await client.request("GET", f"{router}/workers", headers=headers, timeout_s=TELL_S)
        for worker in told.json["workers"] if told.status == 200 else []:
            if worker["url"] == old:
                where = f"{router}/workers/{worker['id']}"
                await client.request("DELETE", where, headers=headers, timeout_s=TELL_S)
        body = json.dumps(new).encode()
        await client.request("POST", f"{router}/workers", body=body, headers=headers, timeout_s=TELL_S)
    finally:
        await client.close()
