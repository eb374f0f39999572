"""The supervisor: an event loop that does what Lifecycle decides. One per deployment, in the foreground or detached.

    signals, SIGCHLD ─┐                          ┌─▶ start, signal and reap children (children.py)
    children's lines ─┼─▶ event ─▶ Lifecycle ─▶ actions ─▶ ask the router's /ready
    control socket ───┤           (pure)         ├─▶ state.json
    timer ────────────┘                          └─▶ report to whoever watches

It decides nothing about when to start, restart or stop, serves no request and holds no model. The ports stay held and
the alive pipe open for as long as it lives.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitserve import numa
from splitserve.errors import RequestError, SplitserveError
from splitserve.launch import children, control, logs, probe
from splitserve.launch.commands import fill, fill_word, url, with_flags
from splitserve.launch.deployment import Deployment
from splitserve.launch.fence import fence
from splitserve.launch.identity import Identity, descendants
from splitserve.launch.lifecycle import (
    Action,
    Event,
    Exited,
    Finish,
    Kill,
    Lifecycle,
    Line,
    Overall,
    Phase,
    Probe,
    Probed,
    Restart,
    Signal,
    Spawn,
    Stop,
    Tell,
    Tick,
)
from splitserve.launch.procs import ProcSpec
from splitserve.launch.rundir import RunDir

if TYPE_CHECKING:
    from splitserve.launch.hosts.moving import Moved

Report = Callable[[dict[str, Any]], None]
"""Called with {"event": kind, ...}: kinds of Tell, with "done" where loading and "url" where ready or up."""

Move = Callable[[str], "Moved | None"]
"""Asked in a thread, before a process of another host is started again: None, or what to start elsewhere instead."""

LOG_CHECK_S = 1.0
ORPHAN_S = 2.0
"""How long ranks may take to leave when their server has died; a stopped one never does."""
ORPHAN_PAUSE_S = 0.02
TAIL_LINES = 20


_ALIVE = (Phase.STARTING, Phase.READY, Phase.STOPPING)
"""Phases of a child that the lifecycle believes to be there: it is told of an end when the ranks are gone too."""


@dataclass(frozen=True)
class Outcome:
    """How it ended: the exit code, why, and the last words of the process at fault."""

    code: int
    why: str
    log: str = ""
    tail: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Supervisor:
    """Runs one placed deployment. `run()` returns when every process is gone.

    `command` begins every child's command line: the `splitserve` program, or what stands in for it in a test.
    """

    def __init__(
        self,
        deployment: Deployment,
        specs: Sequence[ProcSpec],
        *,
        run_dir: RunDir,
        ports: Mapping[str, int],
        report: Report,
        command: tuple[str, ...],
        move: Move | None = None,
    ) -> None:
        self._deployment = deployment
        self._specs = {spec.name: spec for spec in specs}
        self._run_dir = run_dir
        self._ports = dict(ports)
        self._report = report
        self._command = command
        self._move = move
        self._lifecycle = Lifecycle([(s.name, s.role, s.stage) for s in specs], deployment.config)
        self._running: dict[str, children.Running] = {}
        self._alive = children.AlivePipe()
        self._events: deque[Event] = deque()
        self._acting = False
        self._unwritten = ""  # why state.json is behind, as told last
        self._finished: asyncio.Future[int] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_dead: Path | None = None
        self._since = time.time()

    @property
    def url(self) -> str:
        """The router's address, as a client on this host writes it."""
        return url(self._deployment.router.host, self._ports["router.http"])

    async def run(self) -> Outcome:
        """Start everything, keep it running, stop it; leaves no process behind whatever is raised meanwhile."""
        loop = asyncio.get_running_loop()
        self._finished = loop.create_future()
        children.adopt_orphans()
        self._listen_to_signals(loop)
        server = await control.serve(self._run_dir.control, self._answer)
        self._spawn_task(self._bound_logs())
        try:
            self._act(self._lifecycle.start(time.monotonic()))
            code = await self._finished
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for running in self._running.values():
                if not running.ended:
                    running.signal(signal.SIGKILL)
                    running.reap()
            for orphan in children.orphans({}):
                orphan.kill()
            self._alive.close()
        return self._outcome(code)

    def state(self) -> dict[str, Any]:
        """What `status` shows and state.json keeps."""
        own = Identity.of(os.getpid())
        return {
            "name": self._deployment.name,
            "file": os.path.abspath(self._deployment.path),
            "overall": str(self._lifecycle.overall),
            "why": self._lifecycle.why,
            "since": self._since,
            "url": self.url,
            "api_key_file": _absolute(self._deployment.router.api_key_file),
            "engine_key_file": _absolute(self._deployment.server.api_key_file),
            "stop_within_s": self._deployment.config.drain_s + 2 * self._deployment.config.kill_after_s,
            "supervisor": asdict(own) if own else {},
            "processes": [self._process_state(name) for name in self._specs],
        }

    # -- events in, actions out

    def _feed(self, event: Event) -> None:
        """Hand one event to the lifecycle and act. Events that acting causes wait their turn."""
        self._events.append(event)
        if not self._acting:
            self._act([])

    def _act(self, first: list[Action]) -> None:
        """Do `first`, then what waits and what comes of it."""
        self._acting = True
        try:
            self._do(first)
            while self._events:
                self._do(self._lifecycle.handle(self._events.popleft(), time.monotonic()))
        finally:
            self._acting = False

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Spawn(name) if self._move and self._specs[name].host and name in self._running:
                    self._spawn_task(self._start_somewhere(name, self._move))
                case Spawn(name):
                    self._start(self._specs[name])
                case Signal(name, number):
                    self._running[name].signal(number)
                case Probe():
                    self._spawn_task(self._probe())
                case Tell():
                    self._tell(action)
                case Finish(code):
                    if self._finished and not self._finished.done():
                        self._finished.set_result(code)
        self._lifecycle.check()
        self._keep_state()
        self._arm()

    def _keep_state(self) -> None:
        """Write state.json. Where that fails (a full disk), serve on and say so once."""
        try:
            self._run_dir.write_state(self.state())
            self._unwritten = ""
        except OSError as e:
            if self._unwritten != (why := f"cannot write state.json: {e.strerror}"):
                self._unwritten = why
                self._report({"event": "trouble", "name": "supervisor", "text": why})

    def _arm(self) -> None:
        """One timer, at the lifecycle's next deadline."""
        if self._timer:
            self._timer.cancel()
        at = self._lifecycle.next_deadline()
        loop = asyncio.get_running_loop()
        pause = None if at is None else max(0.0, at - time.monotonic())
        self._timer = None if pause is None else loop.call_later(pause, self._feed, Tick())

    async def _start_somewhere(self, name: str, move: Move) -> None:
        """Where it was, or on another host where that one is gone."""
        try:
            moved = await asyncio.to_thread(move, name)
        except SplitserveError as e:
            self._report({"event": "trouble", "name": name, "text": f"cannot be moved: {e.message}"})
            self._feed(Exited(name, 1))
            return
        if moved is not None:
            self._specs |= {name: moved.spec, moved.router.name: moved.router}
            self._ports |= moved.ports
            self._report({"event": "moved", "name": name, "text": moved.text})
        if self._lifecycle.children[name].phase is not Phase.STARTING:  # told to stop meanwhile
            self._feed(Exited(name, 0))
            return
        self._start(self._specs[name])
        self._act([])

    def _start(self, spec: ProcSpec) -> None:
        words = fill(spec.argv, self._ports)
        own = self._run_dir.path / spec.name
        if spec.stage == 0:  # engines keep sockets of their own, and may ask to have a silent peer fenced
            words = with_flags(words, ("--run-dir", str(own), "--control", str(self._run_dir.control)))
        try:
            if spec.stage == 0:
                own.mkdir(mode=0o700, exist_ok=True)
            running = children.start(
                words,
                self._run_dir.log(spec.name),
                alive=self._alive,
                cpus=spec.front_cpus,
                env=children.child_env(
                    {name: fill_word(value, self._ports) for name, value in spec.env.items()}, os.environ
                ),
                command=self._command,
            )
        except (
            OSError
        ) as e:  # no process, memory or disk to be had: that may pass, so this is no wrong setting
            self._report({"event": "died", "name": spec.name, "text": f"cannot be started: {e}"})
            self._events.append(Exited(spec.name, 1))
            return
        self._running[spec.name] = running
        self._spawn_task(running.read_lines(lambda message: self._on_message(spec.name, running, message)))

    def _on_message(self, name: str, running: children.Running, message: dict[str, Any]) -> None:
        if self._running.get(name) is running:  # and not one that has been replaced since
            running.ranks = descendants(running.pid) if message.get("ready") else running.ranks
            self._feed(Line(name, message))

    def _reap(self) -> None:
        """SIGCHLD: collect every child that has exited, until there is none."""
        while True:
            gone = children.exited(self._known())
            if not gone:
                return
            for name in gone:
                running = self._running[name]
                if self._lifecycle.overall is not Overall.STOPPING:
                    self._last_dead = running.log
                self._spawn_task(self._bury(name, running.reap()))

    async def _bury(self, name: str, code: int) -> None:
        """A child is gone once its ranks are: they see their pipe end and leave, and are killed if they do not."""
        until = time.monotonic() + ORPHAN_S
        while left := children.orphans(self._known()):
            if time.monotonic() > until:
                for who in left:
                    who.kill()
            await asyncio.sleep(ORPHAN_PAUSE_S)
        self._feed(Exited(name, code))

    def _known(self) -> dict[int, str]:
        return {r.pid: name for name, r in self._running.items() if not r.ended}

    def _listen_to_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number, why, code in (
            (signal.SIGINT, "Ctrl-C", 130),
            (signal.SIGTERM, "SIGTERM", 0),
            (signal.SIGHUP, "the terminal was closed", 0),
        ):
            loop.add_signal_handler(number, self._asked_to_stop, why, code)

    def _asked_to_stop(self, why: str, code: int) -> None:
        if self._lifecycle.overall is Overall.STOPPING:
            self._feed(Kill(f"{why} again"))
        else:
            self._feed(Stop(why, code))

    # -- the outside

    async def _probe(self) -> None:
        """Ask the router until a token has come through every pair."""
        port = self._ports["router.http"]
        while not (found := await probe.ask(self._deployment.router.host, port)).ready:
            if found.hopeless:
                self._feed(Stop(f"no token can come through: {found.hopeless}", 2))
                return
            await asyncio.sleep(probe.PAUSE_S)
        self._feed(Probed())

    async def _bound_logs(self) -> None:
        most = int(self._deployment.config.log_mb * 1e6)
        while True:
            await asyncio.sleep(LOG_CHECK_S)
            for path in self._run_dir.logs.glob("*.log"):
                logs.bound(path, most)

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """One operation of the control socket; see control.py for their list."""
        match request:
            case {"op": "status"}:
                return {"ok": True, "state": self.state()}
            case {"op": "stop"}:
                kill = bool(request.get("kill"))
                asyncio.get_running_loop().call_soon(
                    self._feed, Kill("down --kill") if kill else Stop("splitserve down")
                )
                return {"ok": True}
            case {"op": "restart", "name": str(name)} if name in self._specs:
                self._feed(Restart(name))
                return {"ok": True}
            case {"op": "restart"}:
                raise RequestError(
                    f"{self._deployment.name} has no process {request.get('name')!r}",
                    field="name",
                    fix=f"one of {', '.join(self._specs)}",
                )
            case {"op": "fence", "pid": int(pid), "start": int(start)}:
                answer = await fence(Identity(pid, start), self._known())
                if answer["name"]:
                    self._report(
                        {"event": "fenced", "name": answer["name"], "text": f"pid {pid}, asked by a peer"}
                    )
                return answer
            case _:
                raise RequestError("unknown operation", field="op", fix="one of status, stop, restart, fence")

    def _tell(self, told: Tell) -> None:
        event: dict[str, Any] = {"event": told.kind, "name": told.name, "text": told.text}
        if told.kind == "loading":
            event["done"] = self._lifecycle.children[told.name].done
        if told.kind == "up":
            event |= {"url": self.url, "state": self.state()}
        self._report(event)

    def _process_state(self, name: str) -> dict[str, Any]:
        spec, child, running = self._specs[name], self._lifecycle.children[name], self._running.get(name)
        here = running is not None and not running.ended
        dying = running is not None and not here and child.phase in _ALIVE
        return {
            "name": name,
            "role": spec.role,
            "host": spec.host,
            "phase": "dying" if dying else str(child.phase),
            "loading": "" if dying else child.loading,
            "done": child.done,
            "pid": running.pid if running and here else None,
            "start": running.identity.start if running and here else None,
            "ranks": [asdict(who) for who in running.ranks] if running and here else [],
            "ports": {w.key: self._ports[f"{name}.{w.key}"] for w in spec.ports},
            "url": child.url,
            "cpus": list(spec.cpus or spec.front_cpus),
            "gpus": list(spec.gpus),
            "memory": spec.memory,
            "misbound": _misbound(spec, running) if running and here else [],
            "restarts": child.num_restarts,
            "log": str(self._run_dir.log(name)),
        }

    def _outcome(self, code: int) -> Outcome:
        # Where nobody died, no token came through: the router says in its log how that went.
        at_fault = (self._last_dead or self._run_dir.log("router")) if code in (1, 2) else None
        tail = tuple(logs.tail(at_fault, TAIL_LINES)) if at_fault else ()
        return Outcome(code, self._lifecycle.why, str(at_fault or ""), tail)

    def _spawn_task(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        """A task that failed is a bug of ours: end the run with it instead of going on half blind."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() and self._finished and not self._finished.done():
            self._finished.set_exception(task.exception() or RuntimeError())


def _absolute(path: str) -> str:
    """Of a file that settings name relative to here; "" where they name none."""
    return os.path.abspath(path) if path else ""


def _misbound(spec: ProcSpec, running: children.Running) -> list[str]:
    """How the ranks' bindings, as the kernel tells them, differ from what was placed; libraries may change them."""
    found = []
    for who in running.ranks:
        actual = numa.read_binding(who.pid)
        if spec.cpus and not set(actual.cpus) <= set(spec.cpus):
            found.append(f"pid {who.pid} may run on cpus {','.join(map(str, actual.cpus))}")
        if actual.memory and spec.memory not in ("default", actual.memory):
            found.append(f"pid {who.pid} takes memory by {actual.memory}, not {spec.memory}")
    return found
