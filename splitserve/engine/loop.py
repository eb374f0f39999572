"""The loop of rank 0: take messages, plan, run, apply, send tokens, feed the handoffs. It alone knows the clock.

server ──Generate, Abort, Control──▶ ┌──────────┐ ◀──notes, offers── peers
                                     │   turn   │
server ◀──Outputs, Failed, Load───── └──────────┘ ──writes, notes──▶ peers
                                       scheduler (decides) · runner (computes) · transfers (moves)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from splitserve import log, wire
from splitserve.engine.channel import Ranks
from splitserve.engine.controls import Controls
from splitserve.engine.link import ServerLink
from splitserve.engine.request import Request
from splitserve.engine.runner import Pending
from splitserve.engine.scheduler import Scheduler
from splitserve.engine.step import Step
from splitserve.engine.throttle import Launches
from splitserve.engine.transfers import Transfers
from splitserve.engine.waiting import Waiting
from splitserve.errors import RequestError, SplitserveError

_log = log.get(__name__)

IDLE_S = 0.5
"""Longest sleep: only a bound on surprises, since messages and peers wake the loop by their descriptors."""

HANDOFF_POLL_S = 0.001
GPU_HANDOFF_POLL_S = (
    0.0002  # there a core is free for it, and a whole prompt's bytes move in less than a millisecond
)
"""Transports without a descriptor (NIXL) are asked this often while a handoff is open and nothing is computed."""

LOAD_INTERVAL_S = 0.1


@dataclass(frozen=True)
class _Launched:
    step: Step
    pending: Pending
    begin: float


class Loop:
    """`plan_ahead`, off until it is set: launch step n + 1 before the result of step n is awaited.

    A device then never waits for planning; an answer's end is found one step late, and that step's token is dropped.
    `handoff_poll_s` is how often an idle loop looks whether bytes have moved, while a handoff is open.
    """

    def __init__(
        self,
        link: ServerLink,
        scheduler: Scheduler,
        *,
        runner: Launches,
        ranks: Ranks,
        transfers: Transfers | None,
        controls: Controls,
        alive_fd: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._scheduler = scheduler
        self._runner = runner
        self._ranks = ranks
        self._transfers = transfers
        self._controls = controls
        self._lifetimes = controls.lifetimes
        self._clock = clock
        self.plan_ahead = False
        self.handoff_poll_s = HANDOFF_POLL_S
        self._in_flight: _Launched | None = None
        self._stopping = False
        self._last_load: wire.Load | None = None
        self._load_sent = 0.0
        self._waiting = Waiting(link.socket, *ranks.sockets(), alive_fd=alive_fd)

    def run(self) -> None:
        """Until the server is gone or `stop` is called."""
        while not self._stopping:
            self._wait(idle=not self.turn())

    def stop(self) -> None:
        self._stopping = True

    def turn(self) -> bool:
        """One round without waiting. True when a step was computed or is, so that there may be more to do."""
        for message in self._link.receive():
            self._take(message)
        now = self._clock()
        if self._transfers:
            self._transfers.feed(self._ranks.events())
            self._transfers.poll(now)
        step = self._scheduler.plan(now)
        self._report_ends(now)
        due = self._launch(step) if step is not None else None
        if self.plan_ahead:
            due, self._in_flight = self._in_flight, due
        if due is not None:
            now = self._apply(due)
        self._report_load(now, force=False)
        return due is not None or self._in_flight is not None

    def _launch(self, step: Step) -> _Launched:
        self._ranks.send(step)
        if self._transfers:
            self._transfers.expect(step)
        begin = self._clock()
        return _Launched(step, self._runner.launch(step), begin)

    def _apply(self, launched: _Launched) -> float:
        """Wait for a step's result and act on it; returns the time after it."""
        result = launched.pending.result()
        self._scheduler.apply(result)
        now = self._clock()
        self._lifetimes.stepped(launched.step, launched.begin, now)
        if self._transfers:
            self._transfers.computed(launched.step, result, now)
        self._report_ends(now)
        return now

    # ------------------------------------------------------------------ in

    def _take(self, message: wire.ToEngine) -> None:
        match message:
            case wire.Generate():
                self._start(message)
            case wire.Abort(rid=rid):
                self._scheduler.abort(rid)
            case wire.Control(id=number, op=op, args=args):
                self._link.send(self._controls.answer(number, op, args))

    def _start(self, message: wire.Generate) -> None:
        now = self._clock()
        req = Request(
            rid=message.rid,
            tokens=list(message.tokens),
            num_prompt=message.num_prompt,
            sampling=message.sampling,
            half=message.half,
            room=message.room,
            priority=message.priority,
            deadline=message.deadline,
        )
        try:
            if req.half:
                self._expect_transfers().start(req, now)
            self._lifetimes.began(req, now)
            self._scheduler.add(req, now)
        except SplitserveError as e:
            self._send_failure(req.rid, e)

    def _expect_transfers(self) -> Transfers:
        if self._transfers is None:
            raise RequestError(
                "this engine was started as unified and takes no half of a split request",
                field="bootstrap_room",
                fix="send it without bootstrap_room, or start the engine with --role prefill or decode",
            )
        return self._transfers

    # ------------------------------------------------------------------ out

    def _report_ends(self, now: float) -> None:
        events, ended, offers, admitted = self._scheduler.drain()
        self._lifetimes.told(events, ended, offers, now)
        if events:
            self._link.send(wire.Outputs(tuple(events)))
        for req in ended:
            if req.error is not None:
                self._send_failure(req.rid, req.error)
        if self._transfers:
            self._transfers.follow(ended, offers, admitted, now)

    def _send_failure(self, rid: str, error: SplitserveError) -> None:
        retry = getattr(error, "retry_after_s", 0.0)
        failed = wire.Failed(
            rid, error.code, error.status, error.message, retry, error.field or "", error.fix or ""
        )
        self._link.send(failed)

    def _report_load(self, now: float, *, force: bool) -> None:
        if now - self._load_sent < LOAD_INTERVAL_S and not force:
            return
        load = self._controls.load()
        if load != self._last_load:
            self._link.send(load)
            self._last_load, self._load_sent = load, now

    # ------------------------------------------------------------------ waiting

    def _wait(self, *, idle: bool) -> None:
        """Look whether the server lives; when idle, sleep until a message, a peer or a deadline first."""
        if not self._waiting.wait(
            self._patience() if idle else 0.0, self._transfers.fds() if self._transfers else ()
        ):
            _log.info("the server has gone; leaving")
            self.stop()

    def _patience(self) -> float:
        """How long there may be nothing to do; short while a handoff is open."""
        now = self._clock()
        deadline = self._scheduler.next_deadline()
        patience = IDLE_S if deadline is None else min(IDLE_S, deadline - now)
        if self._transfers:
            patience = min(patience, self._transfers.patience(now, self.handoff_poll_s))
        if (
            patience > self.handoff_poll_s
        ):  # else it would be most of what is done between two looks at a handoff
            self._report_load(now, force=True)
        return patience
