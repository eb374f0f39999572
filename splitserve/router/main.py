"""The router process: builds the parts, listens, prints one JSON line when it does, and leaves cleanly.

It listens before any engine is ready: /ready says when a token has come through a pair.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import sys
from collections.abc import Sequence

import msgspec

from splitserve import log
from splitserve.config import RouterConfig
from splitserve.net.client import Client
from splitserve.net.http import HttpServer, serve
from splitserve.net.keys import read_keys
from splitserve.net.request import Limits

from .app import RouterApp
from .dialects import dialect
from .fleet import Endpoint, Fleet
from .policy import Chooser
from .proxy import Proxy
from .watch import Watch

MAX_CONNECTIONS = 4096

_log = log.get(__name__)


class Router:
    """All parts of one router, in the running loop. `start`, then `close`."""

    def __init__(
        self, config: RouterConfig, workers: Sequence[Endpoint] = (), *, name: str = "router"
    ) -> None:
        self.config = config
        self.name = name
        loop = asyncio.get_running_loop()
        keys = read_keys(config.api_key_file)
        self.fleet = Fleet(max_failures=config.circuit_failures, open_s=config.circuit_open_s)
        for endpoint in workers:
            self.fleet.add(endpoint)
        self.client = Client()
        alone = config.alone and dialect(config.engine).serves_alone
        chooser = Chooser(config.policy, max_queued_tokens=config.max_queued_tokens, alone=alone)
        self.proxy = Proxy(config, self.fleet, chooser, now=loop.time)
        bearer = (("authorization", f"Bearer {keys[0].decode()}"),) if keys else ()
        self.watch = Watch(config, self.fleet, self.client, draw_room=self.proxy.draw_room, headers=bearer)
        self.app = RouterApp(
            config,
            name=name,
            fleet=self.fleet,
            proxy=self.proxy,
            watch=self.watch,
            client=self.client,
            keys=keys,
        )
        self.server: HttpServer | None = None

    @property
    def url(self) -> str:
        assert self.server is not None
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.config.host, self.config.host)
        return f"http://{host}:{self.server.port}"

    async def start(self) -> None:
        """Listen and begin to watch. PortTaken when somebody has the port."""
        limits = Limits(
            max_body_bytes=int(self.config.max_body_mb * (1 << 20)),
            head_timeout_s=self.config.head_timeout_s,
            body_timeout_s=self.config.head_timeout_s,
            idle_timeout_s=self.config.idle_timeout_s,
            max_connections=max(MAX_CONNECTIONS, 2 * self.config.max_requests),
        )
        self.server = await serve(self.app, host=self.config.host, port=self.config.port, limits=limits)
        self.watch.start()

    async def close(self, drain_s: float = 0.0) -> None:
        """Stop listening, let running requests end for `drain_s`, cut the rest with a typed error."""
        if self.server is not None:
            end = asyncio.get_running_loop().time() + drain_s
            self.server.stop_listening()
            while self.proxy.num_active and asyncio.get_running_loop().time() < end:
                await asyncio.sleep(0.02)
        await self.proxy.close()
        await self.watch.close()
        await self.client.close()
        if self.server is not None:
            await self.server.close(0.2)


def run(
    config: RouterConfig, *, workers: Sequence[Endpoint], alive_fd: int | None = None, name: str = "router"
) -> int:
    """Run until SIGTERM, SIGINT or the end of `alive_fd`; exit code 0. ConfigError and PortTaken are raised."""
    import uvloop

    log.setup(name, config.log_level)
    raise_file_limit()
    uvloop.run(_main(config, workers, alive_fd, name))
    return 0


async def _main(config: RouterConfig, workers: Sequence[Endpoint], alive_fd: int | None, name: str) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    orphaned = False

    def parent_left() -> None:
        nonlocal orphaned
        orphaned = True
        stop.set()

    if alive_fd is not None:
        loop.add_reader(alive_fd, parent_left)  # nobody writes to it: readable means its writer is gone
    router = Router(config, workers, name=name)
    try:
        await router.start()
        line = {
            "ready": True,
            "name": name,
            "url": router.url,
            "port": router.server.port if router.server else 0,
        }
        sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
        sys.stdout.flush()
        await stop.wait()
    finally:
        if alive_fd is not None:
            with contextlib.suppress(OSError, ValueError):
                loop.remove_reader(alive_fd)
        await router.close(0.0 if orphaned else config.drain_s)


def raise_file_limit() -> None:
    """As many open files as the system lets this process have: each request takes three sockets."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
