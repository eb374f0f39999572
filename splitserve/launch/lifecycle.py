"""When to start, restart, give up and stop each process: events in, actions out. No process, socket or clock in here.

    WAITING ──start──▶ STARTING ──{"ready"}──▶ READY ──exit──▶ BACKOFF ──time──▶ STARTING ...
       │                  │ exit                                  │ too many restarts
       │                  ▼                                       ▼
       │      before the deployment was up: stop all        FAILED, and stop all unless
       │      after: as from READY                          another of its role still serves
       └──────stop──────▶ GONE ◀──exit── STOPPING ◀──stop── STARTING, READY

Stages start one after another (engines, then the router) and stop in the opposite order: the router first, for it
finishes what runs, then the engines. Before the deployment has been up once, any exit is final: a person is waiting,
and the log says more than another try would.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from splitserve.config import DeploymentConfig
from splitserve.errors import InvariantError

FIRST_BACKOFF_S = 0.25
MOST_BACKOFF_S = 10.0


class Phase(StrEnum):
    """Where one process stands."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    BACKOFF = "backoff"
    STOPPING = "stopping"
    GONE = "gone"
    FAILED = "failed"


class Overall(StrEnum):
    """Where the deployment stands."""

    STARTING = "starting"
    UP = "up"
    STOPPING = "stopping"
    DOWN = "down"


@dataclass(frozen=True)
class Line:
    """A child printed one JSON line."""

    name: str
    message: dict[str, Any]


@dataclass(frozen=True)
class Exited:
    """A child is gone. `code` is its exit code, or minus the signal that killed it."""

    name: str
    code: int


@dataclass(frozen=True)
class Probed:
    """The router's /ready answered 200: a token has come through every pair."""


@dataclass(frozen=True)
class Stop:
    """Stop everything; running requests may end. `code` is what the supervisor will exit with."""

    why: str
    code: int = 0


@dataclass(frozen=True)
class Kill:
    """Stop everything now."""

    why: str


@dataclass(frozen=True)
class Restart:
    """Stop one child and start it again."""

    name: str


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Line | Exited | Probed | Stop | Kill | Restart | Tick


@dataclass(frozen=True)
class Spawn:
    name: str


@dataclass(frozen=True)
class Signal:
    """Send to the child and everything in its process group."""

    name: str
    number: int


@dataclass(frozen=True)
class Probe:
    """Begin to ask the router's /ready until it says yes."""


@dataclass(frozen=True)
class Tell:
    """Something a person wants to know. kind: loading, ready, up, died, gave_up, stopping, killing, stopped."""

    kind: str
    name: str
    text: str


@dataclass(frozen=True)
class Finish:
    """Everything is gone: leave with this code."""

    code: int


Action = Spawn | Signal | Probe | Tell | Finish


@dataclass
class Child:
    """One process as the lifecycle sees it. `deadline` is when to act if nothing happens first."""

    name: str
    role: str
    stage: int
    phase: Phase = Phase.WAITING
    deadline: float | None = None
    said: str = ""  # the stage of its start that it has told of last
    done: float = 0.0
    url: str = ""
    restarts: list[float] = field(default_factory=list)
    num_restarts: int = 0
    again: bool = False  # an operator asked for a restart: start it when it is gone

    @property
    def loading(self) -> str:
        """The stage of its start; "" once that is over, whatever it was at: a child that stops is at none."""
        return self.said if self.phase is Phase.STARTING else ""


class Lifecycle:
    """The state of one deployment. `start` once, then `handle` each event; `next_deadline` says when to tick."""

    def __init__(self, children: Sequence[tuple[str, str, int]], config: DeploymentConfig) -> None:
        self.children = {name: Child(name, role, stage) for name, role, stage in children}
        self.overall = Overall.STARTING
        self.code = 0
        self.why = ""
        self._config = config
        self._up_by = 0.0
        self._drain_until: float | None = None  # None: not stopping, or the engines are being stopped already
        self._probing = False

    def start(self, now: float) -> list[Action]:
        self._up_by = now + self._config.ready_timeout_s
        return self._start_next_stage(now)

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case Line(name, message):
                return self._line(self.children[name], message, now)
            case Exited(name, code):
                return self._exited(self.children[name], code, now)
            case Probed():
                return self._probed()
            case Stop(why, code):
                return self._stop(why, code, now)
            case Kill(why):
                return self._kill_all(why)
            case Restart(name):
                return self._restart(self.children[name], now)
            case Tick():
                return self._tick(now)

    def next_deadline(self) -> float | None:
        times = [c.deadline for c in self.children.values() if c.deadline is not None]
        if self.overall is Overall.STARTING:
            times.append(self._up_by)
        if self._drain_until is not None:
            times.append(self._drain_until)
        return min(times, default=None)

    def check(self) -> None:
        """InvariantError where the parts contradict each other."""
        over = {Phase.GONE, Phase.FAILED}
        phases = {c.name: c.phase for c in self.children.values()}
        if self.overall is Overall.DOWN and set(phases.values()) - over:
            raise InvariantError(f"down, yet {phases}")
        if self.overall is Overall.STOPPING and not set(phases.values()) - over:
            raise InvariantError(f"all gone, yet still stopping: {phases}")
        if self.overall is Overall.STOPPING and Phase.BACKOFF in phases.values():
            raise InvariantError(f"stopping, yet about to start one again: {phases}")
        for c in self.children.values():
            if c.phase in (Phase.STARTING, Phase.BACKOFF) and c.deadline is None:
                raise InvariantError(f"{c.name} is {c.phase} without a deadline: it could wait for ever")

    # -- starting

    def _start_next_stage(self, now: float) -> list[Action]:
        waiting = [c for c in self.children.values() if c.phase is Phase.WAITING]
        stage = min((c.stage for c in waiting), default=None)
        if stage is None or any(
            c.phase is not Phase.READY for c in self.children.values() if c.stage < stage
        ):
            return []
        return [a for c in waiting if c.stage == stage for a in self._spawn(c, now)]

    def _spawn(self, child: Child, now: float) -> list[Action]:
        child.phase, child.said, child.done, child.again = Phase.STARTING, "", 0.0, False
        child.deadline = now + self._config.ready_timeout_s
        return [Spawn(child.name)]

    def _line(self, child: Child, message: dict[str, Any], now: float) -> list[Action]:
        if child.phase is not Phase.STARTING:
            return []
        if message.get("ready"):
            child.phase, child.deadline, child.done = Phase.READY, None, 1.0
            child.url = str(message.get("url", ""))
            told: list[Action] = [Tell("ready", child.name, child.url)]
            if self.overall is not Overall.STARTING:
                return told
            told += self._start_next_stage(now)
            if not self._probing and all(c.phase is Phase.READY for c in self.children.values()):
                self._probing = True
                told.append(Probe())
            return told
        if "loading" in message:
            done = message.get("done", 0.0)
            child.said, child.done = (
                str(message["loading"]),
                float(done) if isinstance(done, int | float) else 0.0,
            )
            return [Tell("loading", child.name, child.said)]
        return []

    def _probed(self) -> list[Action]:
        if self.overall is not Overall.STARTING:
            return []
        self.overall = Overall.UP
        return [Tell("up", "", "a token has come through every pair")]

    # -- a child is gone

    def _exited(self, child: Child, code: int, now: float) -> list[Action]:
        was, child.deadline, child.url = child.phase, None, ""
        if self.overall is Overall.STOPPING:
            child.phase = Phase.GONE
            return self._stop_engines_when_drained(now) + self._finish_if_gone()
        if child.again:
            child.num_restarts += 1
            return self._spawn(child, now)
        told: list[Action] = [Tell("died", child.name, f"{describe_exit(code)} while {was}")]
        if self.overall is Overall.STARTING:
            child.phase = Phase.FAILED
            return told + self._stop(
                f"{child.name} {describe_exit(code)} before it was ready", 2 if code == 2 else 1, now
            )
        child.restarts = [t for t in child.restarts if t > now - self._config.restart_window_s]
        if not self._config.restart or code == 2 or len(child.restarts) >= self._config.max_restarts:
            return told + self._give_up(child, code, now)
        child.restarts.append(now)
        child.num_restarts += 1
        pause = min(FIRST_BACKOFF_S * 2 ** (len(child.restarts) - 1), MOST_BACKOFF_S)
        child.phase, child.deadline = Phase.BACKOFF, now + pause
        return [*told, Tell("restarting", child.name, f"in {pause:g} s")]

    def _give_up(self, child: Child, code: int, now: float) -> list[Action]:
        child.phase = Phase.FAILED
        tried = f"{len(child.restarts)} restarts within {self._config.restart_window_s:g} s did not cure it"
        why = (
            "restart is off" if not self._config.restart else "its settings are wrong" if code == 2 else tried
        )
        told: list[Action] = [Tell("gave_up", child.name, why)]
        rest = [c for c in self.children.values() if c.role == child.role and c.phase is not Phase.FAILED]
        if rest:
            return told
        return told + self._stop(
            f"no {child.role} is left: {child.name} {describe_exit(code)} and {why}", 1, now
        )

    def _restart(self, child: Child, now: float) -> list[Action]:
        if self.overall is not Overall.UP:
            return []
        match child.phase:
            case Phase.READY | Phase.STARTING:
                child.again, child.deadline = True, now + self._config.drain_s + self._config.kill_after_s
                child.phase = Phase.STOPPING
                return [Signal(child.name, signal.SIGTERM)]
            case Phase.BACKOFF | Phase.FAILED:
                child.restarts.clear()
                child.num_restarts += 1
                return self._spawn(child, now)
            case _:
                return []

    # -- stopping

    def _stop(self, why: str, code: int, now: float) -> list[Action]:
        if self.overall in (Overall.STOPPING, Overall.DOWN):
            return []
        was_up = self.overall is Overall.UP
        self.overall, self.why, self.code = Overall.STOPPING, why, code
        actions: list[Action] = [Tell("stopping", "", why)]
        for child in self.children.values():
            if child.phase in (Phase.WAITING, Phase.BACKOFF):
                child.phase, child.deadline = Phase.GONE, None
        last = max(c.stage for c in self.children.values())
        self._drain_until = now + (self._config.drain_s if was_up else 0.0)
        grace = self._drain_until + self._config.kill_after_s
        for child in self._alive(stage=last):
            actions += self._terminate(child, grace)
        return actions + self._stop_engines_when_drained(now) + self._finish_if_gone()

    def _stop_engines_when_drained(self, now: float) -> list[Action]:
        """SIGTERM to the earlier stages once the last one is gone, or its time to drain is over."""
        last = max(c.stage for c in self.children.values())
        if self._drain_until is None or (self._alive(stage=last) and now < self._drain_until):
            return []
        self._drain_until = None
        grace = now + self._config.kill_after_s
        early = [c for c in self._alive() if c.stage < last]
        return [action for child in early for action in self._terminate(child, grace)]

    def _terminate(self, child: Child, kill_at: float) -> list[Action]:
        if child.phase is Phase.STOPPING and not child.again:
            return []
        child.phase, child.deadline, child.again = Phase.STOPPING, kill_at, False
        return [Signal(child.name, signal.SIGTERM)]

    def _kill_all(self, why: str) -> list[Action]:
        if self.overall is Overall.DOWN:
            return []
        self.overall, self._drain_until = Overall.STOPPING, None
        self.why = self.why or why
        actions: list[Action] = [Tell("killing", "", why)]
        for child in self.children.values():
            child.deadline = None
            if child.phase in (Phase.STARTING, Phase.READY, Phase.STOPPING):
                child.phase, child.again = Phase.STOPPING, False
                actions.append(Signal(child.name, signal.SIGKILL))
            elif child.phase is not Phase.FAILED:
                child.phase = Phase.GONE
        return actions + self._finish_if_gone()

    def _alive(self, *, stage: int | None = None) -> list[Child]:
        alive = (Phase.STARTING, Phase.READY, Phase.STOPPING)
        return [c for c in self.children.values() if c.phase in alive and stage in (None, c.stage)]

    def _finish_if_gone(self) -> list[Action]:
        if self.overall is not Overall.STOPPING or self._alive():
            return []
        self.overall, self._drain_until = Overall.DOWN, None
        return [Tell("stopped", "", "every process is gone"), Finish(self.code)]

    # -- time

    def _tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        if self.overall is Overall.STARTING and now >= self._up_by:
            late = [
                f"{c.name} ({c.loading or c.phase})"
                for c in self.children.values()
                if c.phase is not Phase.READY
            ]
            what = ", ".join(late) or "no token came through the router"
            return self._stop(f"not ready after {self._config.ready_timeout_s:g} s: {what}", 1, now)
        if self.overall is Overall.STOPPING:
            actions += self._stop_engines_when_drained(now)
        for child in self.children.values():
            if child.deadline is None or now < child.deadline:
                continue
            child.deadline = None
            match child.phase:
                case Phase.BACKOFF:
                    actions += self._spawn(child, now)
                case Phase.STARTING | Phase.STOPPING:
                    actions += [Tell("killing", child.name, f"{child.phase} took too long")]
                    actions += [Signal(child.name, signal.SIGKILL)]
                    # Its exit is the next event; from STARTING that counts as a death like any other.
                    child.phase = Phase.STOPPING
                case _:
                    raise InvariantError(f"{child.name} is {child.phase} and has a deadline")
        return actions


def describe_exit(code: int) -> str:
    """ "exited with code 1", "was killed by SIGKILL"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
