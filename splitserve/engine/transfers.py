"""The engine's end of handoffs: tells sender and receiver what was decided, and the scheduler what came of it.

It decides nothing about requests or rows itself and moves no byte; rooms are its only bookkeeping.

    scheduler          transfers                              sender / receiver
    admitted  ────────▶ computed(cached prefix) ─────────────▶
    step applied ─────▶ computed(chunk) ─────────────────────▶
    offers    ────────▶ open(rows) ──────────────────────────▶
    ended     ────────▶ fail / cancel ───────────────────────▶
    rows_free, arrived, lost, fail ◀──────────────────────── poll

Where steps run on after their launch (`clock`), what speaks of rows waits until the steps that touch them have ended:
chunks that leave, and freed rows that are offered again and that a step under way may still write.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from splitserve.engine.request import Phase, Request
from splitserve.engine.scheduler import Scheduler
from splitserve.engine.step import Chunk, Sampled, Step, StepResult
from splitserve.errors import DeadlineExceeded, InvariantError, RequestError, SplitserveError, by_code
from splitserve.transfer.events import Arrived, PortEvent, ReceiveFailed, Released, SendFailed, Sent
from splitserve.transfer.port import PortGroup
from splitserve.transfer.receiver import Receiver
from splitserve.transfer.rooms import prompt_name
from splitserve.transfer.sender import Sender
from splitserve.types import Rid
from splitserve.wire import FirstToken, Room

if TYPE_CHECKING:
    from splitserve.engine.device import Clock

GPU_SEE_OFF_S = 0.0005
"""Most time that a step's end is followed by looks at the writes it has posted, where their bytes take less than that.

The note leaves when a write's end is seen, and decode waits for the note. The loop's own next look is later.
"""


class Transfers:
    def __init__(
        self,
        sender: Sender,
        receiver: Receiver,
        *,
        ports: PortGroup,
        scheduler: Scheduler,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._ports = ports
        self.sender = sender
        self.receiver = receiver
        self._scheduler = scheduler
        self._deadline_s = deadline_s
        self._sending: dict[int, Rid] = {}
        self._receiving: dict[int, Rid] = {}
        self.clock: Clock | None = None  # of a device that computes beside this process
        self.see_off_s = 0.0
        self._coming: list[Chunk] = []  # of the step under way, those that end a prompt
        self._unsettled: deque[tuple[int, Callable[[float], None]]] = deque()  # (after this step, what to do)

    # ------------------------------------------------------------------ from the loop

    def start(self, req: Request, now: float) -> None:
        """A half of a split request has come in. Raises RequestError when its room is in use or missing."""
        room = _room_of(req)
        if req.half == "prefill":
            name = prompt_name(req.tokens[: req.num_given])
            self.sender.open(room.id, req.num_given, now=now, deadline=self._deadline(req, now), prompt=name)
            self._sending[room.id] = req.rid
            return
        if room.id in self._receiving:
            raise RequestError(f"room {room.id} is in use by another request", field="bootstrap_room")
        self.receiver.admit(room)
        self._receiving[room.id] = req.rid

    def follow(
        self, ended: Iterable[Request], offers: Iterable[Request], admitted: Iterable[Request], now: float
    ) -> None:
        """Carry out what the scheduler decided since the last call."""
        for req in admitted:
            if req.phase is Phase.RUNNING and req.num_done:
                self._after(None, partial(self._left, req, 0, req.num_done, None), now)
        for req in offers:
            if req.phase is Phase.ARRIVING:
                self._after(None, partial(self._offer, req), now)
        for req in ended:
            self._give_up(req, now)

    def expect(self, step: Step) -> None:
        """A step is about to be launched: what leaves after it is prepared on its way (`progress`)."""
        self._coming = [c for c in step.chunks if c.sample and c.start < c.num_prompt]

    def computed(self, step: Step, result: StepResult, now: float) -> None:
        """A step has been applied: its prompt rows may leave."""
        ended = False  # a prompt
        for chunk in step.chunks:
            req = self._scheduler.requests.get(chunk.rid)
            if req is None or req.half != "prefill" or req.phase is Phase.ENDED:
                continue
            sampled = result.sampled.get(chunk.rid)
            self._after(
                step.index,
                partial(self._left, req, chunk.start, chunk.stop, sampled),
                now,
            )
            ended = ended or chunk.sample
        if ended:
            self._see_off()

    def poll(self, now: float) -> None:
        """Move what can be moved and tell the scheduler."""
        self._settle(now)
        self._expire(now)
        for event in self.sender.poll(now):
            match event:
                case SendFailed(room=room, code=code, message=message):
                    self._scheduler.fail(self._sending[room], by_code(code, message))
                case Released(room=room):
                    self._scheduler.rows_free(self._sending.pop(room))
                case Sent():
                    pass  # Released follows
        for arrival in self.receiver.poll(now):
            match arrival:
                case Arrived():
                    self._arrived(arrival)
                case ReceiveFailed(room=room, retriable=retriable, code=code, message=message):
                    error = by_code(code, message)
                    self._scheduler.lost(self._receiving[room], error, retriable=retriable)
                case Released(room=room):
                    self._scheduler.rows_free(self._receiving.pop(room))

    def progress(self) -> None:
        """Called between layers: answer peers and let the transport work; the scheduler learns of it after the step."""
        now = self._clock()
        self._settle(now)
        self.sender.work(now)
        self.receiver.work(now)
        if self.receiver.moving():
            self._ports.feed(self._ports.port.poll())
        if self._coming:
            self._prepare(self._coming.pop())

    def feed(self, events: Sequence[PortEvent]) -> None:
        """What the ports of other ranks have reported."""
        self._ports.feed(events)

    def lanes(self) -> dict[str, str]:
        """For each peer met, what carries the bytes."""
        return self._ports.port.lanes()

    def used_lanes(self) -> tuple[str, ...]:
        """What has carried bytes from here to peers so far, each once."""
        return self._ports.port.seen_lanes.used()

    def slow_lanes(self) -> dict[str, str]:
        """Peers on GPUs of this host whose memory is not written directly, and what was warned of."""
        return dict(self._ports.port.seen_lanes.slow)

    def slow_writes(self) -> dict[str, int]:
        """By pair of ranks, writes that took far longer than the fabric doctor's, of all ranks here."""
        return dict(self._ports.slow.counts)

    # ------------------------------------------------------------------ waiting

    def patience(self, now: float, poll_s: float) -> float:
        """How long the loop may sleep: `poll_s` while bytes may be moving, else until the next deadline."""
        if self._unsettled or self.sender.moving() or self.receiver.moving():
            return poll_s
        deadlines = [d for d in (self.sender.next_deadline(), self.receiver.next_deadline()) if d is not None]
        return max(0.0, min(deadlines) - now) if deadlines else float("inf")

    def fds(self) -> set[int]:
        """Descriptors that wake the loop: sockets of the rendezvous, processes that may die."""
        return {*self.sender.fds(), *self.receiver.fds()}

    def check(self) -> None:
        """Rooms here are the rooms there; then the two check themselves."""
        self.sender.check()
        self.receiver.check()
        if set(self._sending) != set(self.sender.rooms()):
            raise InvariantError(f"sending {sorted(self._sending)}, sender has {sorted(self.sender.rooms())}")
        missing = set(self.receiver.rooms()) - set(self._receiving)
        if missing:
            raise InvariantError(f"the receiver has rooms {sorted(missing)} that no request owns")

    # ------------------------------------------------------------------ steps of the above

    def _after(self, step: int | None, act: Callable[[float], None], now: float) -> None:
        """Do it once `step` has ended; None: once all that were launched have. In the order of the calls."""
        if self.clock is None:
            act(now)
            return
        self._unsettled.append((self.clock.latest if step is None else step, act))
        self._settle(now)

    def _prepare(self, chunk: Chunk) -> None:
        req = self._scheduler.requests.get(chunk.rid)
        if req is None or req.half != "prefill" or req.phase is Phase.ENDED or req.holding is None:
            return
        stop = min(chunk.stop, req.num_given)
        units = self._scheduler.cache.units(req.holding, chunk.start, stop)
        self.sender.prepare(_room_of(req).id, chunk.start, stop, units=units)

    def _see_off(self) -> None:
        """Look at this rank's writes, for a moment, until they have ended."""
        until = self._clock() + self.see_off_s
        while self.see_off_s and self._ports.port.moving() and self._clock() < until:
            self.sender.work(self._clock())

    def _settle(self, now: float) -> None:
        while self.clock and self._unsettled and self.clock.done(self._unsettled[0][0]):
            self._unsettled.popleft()[1](now)

    def _expire(self, now: float) -> None:
        """End decode halves that have queued for rows past their deadline: their other half has given up by now."""
        for req in list(self._scheduler.waiting):
            if req.awaits_peer and now >= self._deadline(req, req.arrived):
                error = DeadlineExceeded(
                    f"no room at this engine for {self._deadline_s:g} s",
                    fix="try again; if this repeats, lower the load or raise deadline_s in [transfer]",
                )
                self._scheduler.fail(req.rid, error)

    def _deadline(self, req: Request, arrived: float) -> float:
        own = arrived + self._deadline_s
        return min(own, req.deadline) if req.deadline else own

    def _left(self, req: Request, start: int, stop: int, sampled: Sampled | None, now: float) -> None:
        """Rows [start, stop) may leave, unless their request has ended meanwhile."""
        if req.phase is not Phase.ENDED and req.holding is not None:
            self._computed(req, start, stop, sampled, now)

    def _computed(self, req: Request, start: int, stop: int, sampled: Sampled | None, now: float) -> None:
        room = _room_of(req)
        assert req.holding is not None
        stop = min(stop, req.num_given)
        first = None
        if sampled and sampled.tokens:
            first = FirstToken(
                sampled.tokens[0],
                sampled.logprobs[0] if sampled.logprobs else None,
                req.sampling.seed,
                req.num_cached,
                tuple(req.prompt_logprobs),
                sampled.draft,
            )
        units = self._scheduler.cache.units(req.holding, start, stop)
        self.sender.computed(room.id, start, stop, units=units, last=first is not None, first=first, now=now)

    def _offer(self, req: Request, now: float) -> None:
        room = _room_of(req)
        if req.phase is not Phase.ARRIVING:  # it has ended before anybody knew its rows
            self._receiving.pop(room.id, None)
            self._scheduler.rows_free(req.rid)
            return
        assert req.holding is not None
        start = req.holding.num_cached
        units = self._scheduler.cache.units(req.holding, start, req.num_given)
        deadline = self._deadline(req, req.arrived)
        try:
            self.receiver.open(
                room,
                req.num_given,
                start=start,
                units=units,
                now=now,
                deadline=deadline,
                prompt=prompt_name(req.tokens[: req.num_given]),
            )
        except SplitserveError as e:
            self._receiving.pop(room.id)
            self._scheduler.fail(req.rid, e)
            self._scheduler.rows_free(req.rid)

    def _arrived(self, event: Arrived) -> None:
        rid = self._receiving.pop(event.room)
        req = self._scheduler.requests.get(rid)
        if req is None or req.phase is Phase.ENDED:  # the client left in the same turn: nobody wants the rows
            self._scheduler.rows_free(rid)
            return
        first = event.first
        logprobs = (first.logprobs,) if first.logprobs is not None else ()
        self._scheduler.arrived(
            rid,
            Sampled((first.token,), logprobs, draft=first.draft),
            num_cached=first.num_cached,
            prompt_logprobs=first.prompt_logprobs,
        )

    def _give_up(self, req: Request, now: float) -> None:
        """A request has ended: if its handoff has not, end that too. Rows come back by Released."""
        if req.room is None:
            return
        reason = req.error.message if req.error else "the client left"
        if self._sending.get(req.room.id) == req.rid:
            self.sender.fail(req.room.id, reason=reason, error=req.error, now=now)
        if self._receiving.get(req.room.id) == req.rid:
            if req.in_transfer:
                self.receiver.cancel(req.room.id, reason=reason, now=now)
            elif req.room.id not in self.receiver.rooms():
                self._receiving.pop(req.room.id)
            # Else its handoff failed and it was computed here, faster than the peer let go of the rows: Released comes.


def _room_of(req: Request) -> Room:
    if req.room is None:
        raise RequestError("a half of a split request needs a room", field="bootstrap_room")
    return req.room
