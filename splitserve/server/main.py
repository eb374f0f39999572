"""The server process of one engine, from its first socket to its last: what `splitserve serve` runs.

    listen ─▶ start ranks, load tokenizer ─▶ Hello ─▶ one token ─▶ {"ready": true} ─▶ ... ─▶ drain ─▶ stop ranks
      │  /health 503 and {"loading": ...} lines meanwhile                        │
      └─ port taken: exit 2                 engine dies: open requests fail with engine_lost, exit 1

stdout carries one JSON object a line, for whoever started this process; people read stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from splitserve import log
from splitserve.config import EngineConfig, ServerConfig, TransferConfig, to_dict
from splitserve.errors import ConfigError
from splitserve.net import http
from splitserve.text import tokenizer as tokenizers
from splitserve.types import Role
from splitserve.weights.locate import Source, locate
from splitserve.wire import Hello, Loading

from .access import Access
from .app import App
from .conversation import ChatModel, chat_of
from .engine_link import EngineLink, engine_lost
from .health import Health
from .intake import Intake
from .params import ModelLimits
from .ranks import Argv, Ranks, describe, rank_argv
from .rooms import Place
from .service import Service, Settings

_log = log.get(__name__)

DRAIN_S = 4.0
"""Time for running requests after SIGTERM: less than a supervisor's default patience of 5 s."""

LAST_WORDS_S = 0.3
"""An engine that fails at its start says why and exits; both arrive by different ways."""

MAX_SOCKET_PATH = 100  # of 107 that the kernel takes

Say = Callable[[dict[str, Any]], None]


def run(
    engine: EngineConfig,
    transfer: TransferConfig,
    server: ServerConfig,
    *,
    alive_fd: int | None = None,
    run_dir: str = "",
    control: str = "",
    argv: Argv = rank_argv,
) -> int:
    """Serve until told to stop; returns the exit status (0, or 130 after Ctrl-C).

    `alive_fd` ends when the parent dies, and then so does this process. `run_dir` holds sockets and files; without
    one a fresh one is made and removed. `control` is the supervisor's socket, for engines that must have a peer
    fenced. Raises ConfigError before serving, EngineLost when the engine dies.
    """
    import uvloop

    with contextlib.ExitStack() as closing:
        path = Path(run_dir) if run_dir else _fresh_run_dir(closing)
        log.setup(path.name if run_dir else engine.role, server.log_level)
        process = ServerProcess(engine, transfer, server, run_dir=path, control=control, argv=argv)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(process.serve(alive_fd))


def say(message: dict[str, Any]) -> None:
    """One JSON line on stdout. A reader that has gone is not our end: the alive pipe tells."""
    with contextlib.suppress(OSError):
        print(json.dumps(message), flush=True)


class ServerProcess:
    def __init__(
        self,
        engine: EngineConfig,
        transfer: TransferConfig,
        server: ServerConfig,
        *,
        run_dir: Path,
        control: str = "",
        argv: Argv = rank_argv,
        tell: Say = say,
    ) -> None:
        self._engine = engine
        self._transfer = transfer
        self._server = server
        self._run_dir = run_dir
        self._control = control
        self._argv = argv
        self._say = tell
        self._name = run_dir.name
        self._told: tuple[str, int] | None = None
        self._stop: asyncio.Future[str] | None = None

    async def serve(self, alive_fd: int | None = None) -> int:
        """The whole life; see run()."""
        access = Access(self._server.api_key_file)
        source = locate(self._engine.model)
        self._stop = asyncio.get_running_loop().create_future()
        async with self._signals(alive_fd), self._link() as link:
            service = Service(link, self._settings(source), health=Health(link))
            app = App(service, access)
            async with self._listening(app) as listener, self._ranks(link) as ranks:
                watch = asyncio.create_task(service.health.watch())
                try:
                    await self._start(ranks, app, source=source, link=link)
                    if not self._stop.done():
                        service.ready = True
                        self._tell_ready(service, listener.port)
                    stalled = asyncio.create_task(self._give_up_when_stalled(service))
                    try:
                        return await self._until_stopped(service, listener)
                    finally:
                        stalled.cancel()
                finally:
                    watch.cancel()

    # ------------------------------------------------------------------ start

    async def _start(self, ranks: Ranks, app: App, *, source: Source, link: EngineLink) -> None:
        """Everything up to the first token; returns early when told to stop."""
        link.on_loading = self._tell_loading
        self._tell_loading(Loading("engine", 0.0))
        await ranks.start(self._rank_configs(link.endpoint), threads=self._engine.threads)
        both = asyncio.gather(link.greeting(), asyncio.to_thread(_load_text, source))
        loaded = await self._or_stop(both)
        if loaded is None:
            return
        hello, (tokenizer, chat) = loaded
        app.service.intake = self._intake(tokenizer, chat, hello=hello, source=source)
        self._tell_loading(Loading("first token", 0.0))
        await self._or_stop(app.operator.probe(within_s=300.0))

    def _intake(
        self, tokenizer: tokenizers.Tokenizer, chat: ChatModel, *, hello: Hello, source: Source
    ) -> Intake:
        facts = hello.facts
        served = self._engine.served_name or _name_of(source.path)
        return Intake(
            names=tuple(dict.fromkeys([served, self._engine.model, str(source.path)])),
            tokenizer=tokenizer,
            chat=chat,
            limits=ModelLimits(
                max_len=hello.max_len,
                vocab_size=int(facts.get("vocab_size") or tokenizer.num_tokens),
                eos_ids=tokenizer.eos_ids,
            ),
            place=Place(
                role=Role(self._engine.role),
                host=str(facts.get("bootstrap_host") or self._server.host),
                port=int(facts.get("bootstrap_port") or 0),
                allow_hosts=self._transfer.allow_hosts,
                peer_port=self._transfer.peer_port,
            ),
        )

    def _rank_configs(self, endpoint: str) -> list[dict[str, Any]]:
        shared = {
            "engine": to_dict(self._engine),
            "transfer": to_dict(self._transfer),
            "server_endpoint": endpoint,
            "tp": self._engine.tp,
            "run_dir": str(self._run_dir),
            "name": self._name,
            "fence_socket": self._control,
        }
        return [{**shared, "rank": rank} for rank in range(self._engine.tp)]

    def _settings(self, source: Source) -> Settings:
        about: dict[str, Any] = {
            "name": self._name,
            "model_path": str(source.path.resolve()),
            "tp_size": self._engine.tp,
            "dp_size": 1,
            "transport": self._transfer.transport,
            "pid": os.getpid(),
        }
        if source.path.is_dir():
            about["tokenizer_path"] = str(source.path.resolve())
        return Settings(
            max_requests=self._server.max_requests,
            deadline_s=self._server.request_deadline_s,
            slow_s=self._server.slow_request_s,
            allow_faults=self._engine.allow_faults,
            about=about,
        )

    # ------------------------------------------------------------------ end

    async def _until_stopped(self, service: Service, listener: http.HttpServer) -> int:
        """Wait for a signal, the parent's end or the engine's; then let requests end, as far as that makes sense."""
        assert self._stop is not None
        why = await self._stop
        service.draining = True
        _log.info("stopping: %s, %d requests open", why, len(service.runs))
        if why == "engine lost":
            await listener.close(drain_s=1.0)  # every request has its error; let it reach the client
            assert service.link.lost is not None
            raise service.link.lost.with_traceback(None)
        await listener.close(drain_s=0.0 if why == "parent gone" else DRAIN_S)
        return 130 if why == "SIGINT" else 0

    async def _give_up_when_stalled(self, service: Service) -> None:
        """An engine that will not answer any more is as good as dead: fail its requests, kill it, leave."""
        why = await service.health.stalled()
        service.link.fail(engine_lost(f"it has been {why}"))
        self._ask_to_stop("engine lost")

    def _ask_to_stop(self, why: str) -> None:
        if self._stop is not None and not self._stop.done():
            self._stop.set_result(why)

    async def _or_stop(self, work: Any) -> Any:
        """The result of `work`, or None when told to stop first. An engine that is lost meanwhile raises."""
        assert self._stop is not None
        task = asyncio.ensure_future(work)
        await asyncio.wait({task, self._stop}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # what it raises on its way out is nobody's news
        return None

    # ------------------------------------------------------------------ what is opened and closed

    @contextlib.asynccontextmanager
    async def _signals(self, alive_fd: int | None) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ask_to_stop, number.name)
        if alive_fd is not None:
            loop.add_reader(alive_fd, self._ask_to_stop, "parent gone")  # nobody writes: readable means ended
        try:
            yield
        finally:
            if alive_fd is not None:
                loop.remove_reader(alive_fd)

    @contextlib.asynccontextmanager
    async def _link(self) -> AsyncIterator[EngineLink]:
        path = self._run_dir / "engine.sock"
        if len(str(path)) > MAX_SOCKET_PATH:
            raise ConfigError(
                f"run directory {self._run_dir} is {len(str(path)) - MAX_SOCKET_PATH} characters too long for a socket",
                field="run_dir",
                fix="choose one with a shorter path",
            )
        path.unlink(missing_ok=True)
        link = EngineLink(f"ipc://{path}")
        try:
            yield link
        finally:
            link.close()
            path.unlink(missing_ok=True)

    @contextlib.asynccontextmanager
    async def _listening(self, app: App) -> AsyncIterator[http.HttpServer]:
        limits = http.Limits(max_body_bytes=int(self._server.max_body_mb * 2**20))
        listener = await http.serve(app, host=self._server.host, port=self._server.port, limits=limits)
        try:
            yield listener
        finally:
            await listener.close()

    @contextlib.asynccontextmanager
    async def _ranks(self, link: EngineLink) -> AsyncIterator[Ranks]:
        ranks = Ranks(self._run_dir, self._name, argv=self._argv)

        def died(rank: int, status: int) -> None:
            _log.error("%s", describe(rank, status))
            wait_s = 0.0 if link.hello else LAST_WORDS_S
            asyncio.get_running_loop().call_later(wait_s, lost, describe(rank, status))

        def lost(how: str) -> None:
            link.fail(engine_lost(how))
            self._ask_to_stop("engine lost")

        ranks.on_death = died
        try:
            yield ranks
        finally:
            await ranks.stop()

    # ------------------------------------------------------------------ lines on stdout

    def _tell_loading(self, loading: Loading) -> None:
        """Each new stage, and every twentieth of one."""
        step = (loading.stage, int(loading.done * 20))
        if step == self._told:
            return
        self._told = step
        self._say({"loading": loading.stage, "done": round(loading.done, 3)})

    def _tell_ready(self, service: Service, port: int) -> None:
        host = f"[{self._server.host}]" if ":" in self._server.host else self._server.host
        found = service.model()
        ready = {"ready": True, "url": f"http://{host}:{port}", "bootstrap_port": found.place.port or None}
        self._say({**ready, "model": found.names[0], "max_len": found.limits.max_len})


def _load_text(source: Source) -> tuple[tokenizers.Tokenizer, ChatModel]:
    tokenizer = tokenizers.load(source.path)
    return tokenizer, chat_of(source, tokenizer)


def _name_of(path: Path) -> str:
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def _fresh_run_dir(closing: contextlib.ExitStack) -> Path:
    path = Path(tempfile.mkdtemp(prefix="splitserve-"))  # mode 0700
    closing.callback(shutil.rmtree, path, ignore_errors=True)
    return path
