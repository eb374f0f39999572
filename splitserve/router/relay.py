"""One client request on its way through the router: tries, legs, first byte, end.

            ┌────── another try: new route, new room ◀──┬───────────────────────┐
            ▼                                           │ failed                │ failed, and another can continue it
    choose a route ─▶ both legs sent ─▶ waiting ────────┴── first body byte ─▶ begun ── end ─▶ ok
            │                             │                                     │
         rejected                    4xx, or no try left                    failed: SSE error event + [DONE]
            ▼                             ▼
        503 JSON                      that answer

Until decode's first body byte the client has received nothing, so every failure has a truthful status and may be
tried again with a new room. The client's head is decode's, sent together with that byte: then the request is
*committed*. A body that is not a stream is kept until it is whole (up to leg.MAX_KEPT), so it is never cut.

A committed stream that breaks is continued by another engine if its own has told how (trail.py). *Begun* is said of a
try, *committed* of the request; they differ only while such a stream waits for its next engine.

Which leg is sent what, and when, is the engines' dialect (dialects/). Where that lets decode compute a prompt itself, a
lost prefill that no other can replace leaves it `prefill_grace_s` to show a byte.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from splitserve.errors import DeadlineExceeded, Overloaded, PeerLost, SplitserveError
from splitserve.net import sse
from splitserve.net.request import Request
from splitserve.net.responder import Responder
from splitserve.net.upstream import Lost

from . import failure
from .dialects import Opening
from .failure import Failure
from .fleet import Member, Reject, Route
from .heads import forwarded_lines, request_parts, response_head, route_lines
from .leg import MAX_KEPT, Leg
from .policy import Features
from .rewrite import Prepared, merge_input_logprobs
from .trail import Trail

if TYPE_CHECKING:
    from .proxy import Proxy

STALE_S = 0.1  # a reused connection lost so soon, without a byte, had been closed by the peer before we wrote
RETRY_WINDOW_S = 0.7  # no try begins later than this after the first failure: an error is due within a second
BACKOFF_S = 0.05  # before a try on the same engines, times the number of tries so far
RESUME_EVERY_S = 0.1  # how often a stream that broke looks for an engine to continue it
MAX_RESUMED = 3  # a request that has killed so many engines will kill the next one too


class Relay:
    """Made by Proxy for each request that engines answer."""

    __slots__ = (
        "_answer",
        "_avoid",
        "_begun",
        "_client_full",
        "_committed",
        "_features",
        "_first_failure_at",
        "_framed",
        "_kept",
        "_last",
        "_lines",
        "_num_kept",
        "_num_resumed",
        "_num_tries",
        "_opening",
        "_prefill",
        "_proxy",
        "_responder",
        "_route",
        "_sent_at",
        "_timer",
        "_trail",
        "deadline",
        "heard_at",
        "last_failure",
        "prepared",
        "request",
        "started_at",
    )

    def __init__(
        self, proxy: Proxy, request: Request, responder: Responder, prepared: Prepared, features: Features
    ) -> None:
        self._proxy = proxy
        self.request = request
        self._responder = responder
        self.prepared = prepared
        self._features = features
        self._lines = forwarded_lines(request.raw_headers, but=proxy.dialect.own_lines)
        self._route: Route | None = None
        self._opening = Opening(b"", b"")
        self._answer: Leg | None = None
        self._prefill: Leg | None = None
        self._num_tries = 0
        self._sent_at = 0.0
        self._avoid: set[str] = set()
        self._first_failure_at = 0.0
        self.last_failure: Failure | None = None
        self._timer: asyncio.TimerHandle | None = None  # of a grace or of the next try
        self._begun = False  # the current try has given bytes of its answer
        self._committed = False  # the client has some
        self._client_full = False
        self._trail: Trail | None = None
        self._num_resumed = 0
        self._framed = False
        self._kept: list[bytes] = []
        self._num_kept = 0
        self._last = b""
        self.started_at = proxy.now()
        self.deadline = self.started_at + proxy.config.request_deadline_s
        self.heard_at = self.started_at

    # -------------------------------------------------------------- trying

    def begin(self) -> None:
        self._responder.on_left = self._client_left
        self._responder.watch_writable(self._client_takes_more)
        self._try()

    def _try(self) -> None:
        self._timer = None
        proxy = self._proxy
        self._sent_at = now = proxy.now()
        route = proxy.chooser.choose(self._features, proxy.fleet, now, avoid=self._avoid)
        last = self.last_failure
        if isinstance(route, Reject):
            if last is not None:
                self._give_up(last)
            else:
                self._finish("rejected")
                self._responder.fail(Overloaded(route.reason, retry_after_s=route.retry_after_s))
            return
        if last is not None and last.needs_another and last.member in route.members:
            self._give_up(last)
            return
        self._num_tries += 1
        self._route = route
        proxy.routed(route, self._features)
        self._send(route)

    def _send(self, route: Route) -> None:
        """What the engines' dialect begins with: both legs at once, or prefill alone."""
        proxy = self._proxy
        more = self._trail.field() if self._committed and self._trail is not None else b""
        self._opening = proxy.dialect.opening(self.prepared, route, proxy.draw_room, more)
        self._answer = answer = Leg(route.answer, self, answers=True)
        if self._opening.to_prefill and route.prefill is not None:
            self._prefill = Leg(route.prefill, self, answers=False, keeps=self._opening.keeps)
            self._start(self._prefill, self._opening.to_prefill)
        if self._opening.to_answer and self._answer is answer:  # else lost already
            self._start(answer, self._opening.to_answer)

    def _start(self, leg: Leg, body: bytes) -> None:
        lines = self._opening.lines + self._lines
        before, after = request_parts(self.request.method, self.request.origin_form, lines, body)
        self._proxy.send(leg, before + self._proxy.authority(leg.member) + after)

    # -------------------------------------------------------------- told by legs

    def on_piece(self, leg: Leg, piece: bytes) -> None:
        """Bytes of the answer."""
        self.heard_at = self._proxy.now()
        if self._begun and self._trail is None:
            self._send_on(leg, self._frame(piece))
        elif self._begun or leg.streams:
            self._on_events(leg, piece)
        elif self._committed:
            self._failed(failure.of_loss(leg.member, "answered a stream's continuation with something else"))
        else:
            self._kept.append(piece)
            self._num_kept += len(piece)
            if self._num_kept > MAX_KEPT:
                self._commit(leg, b"".join(self._kept))
                self._kept.clear()

    def _on_events(self, leg: Leg, piece: bytes) -> None:
        """Bytes of a stream: its first ones, or any of one that could be continued elsewhere."""
        if not self._begun:
            if not self._committed:
                self._trail = Trail.of(leg.headers)
            elif self._trail is None or not self._trail.continues(leg.headers):
                self._failed(failure.of_loss(leg.member, "does not continue streams of other engines"))
                return
        trail = self._trail
        whole = piece if trail is None else trail.take(piece)
        whole, told = failure.of_events(leg.member, whole, anywhere=trail is not None)
        if whole and not self._committed:
            self._commit(leg, whole)
        elif whole:
            if not self._begun:
                self._proxy.metrics.num_resumed += 1
                self._begin(leg)
            self._send_on(leg, self._frame(whole))
        if told is not None:
            self._failed(told)

    def on_leg_end(self, leg: Leg) -> None:
        if leg.refused:
            if self._begun:
                return  # prefill's afterthought; decode speaks already
            self._failed(failure.of_answer(leg))
        elif leg is self._prefill and leg.error_event and not self._begun:
            self._prefill_failed(leg, failure.of_error_event(leg))
        elif leg is self._prefill and self._answer is not None and not self._opening.to_answer:
            self._sent_at = self._proxy.now()
            self._start(self._answer, self._proxy.dialect.after_prefill(self.prepared, leg.body))
        elif leg is self._answer and self._committed and not self._begun:
            self._failed(failure.of_loss(leg.member, "ended a stream without an event"))
        elif leg is self._answer or (
            self._prefill is leg and self._answer is not None and self._answer.ended
        ):
            self._answered()

    def on_leg_lost(self, leg: Leg, lost: Lost) -> None:
        told = failure.of_loss(leg.member, lost.reason)
        if leg is not self._answer and self._answer is not None and self._answer.ended:
            self._answered()  # only prefill's logprobs are missing
        elif leg is not self._answer and self._begun:
            self._proxy.fleet.failed(leg.member, self._proxy.now())
        elif self._is_stale(lost):
            self._abandon()
            self._num_tries -= 1
            self._later(0.0)
        elif leg is not self._answer:
            self._prefill_failed(leg, told)
        else:
            self._failed(told)

    def _prefill_failed(self, leg: Leg, told: Failure) -> None:
        """Before decode has shown a byte: another route, or a grace in which decode may compute the prompt itself."""
        self._proxy.heard(told)  # first: while a dead prefill counts as well, no route leaves it out
        if told.is_refusal or not self._proxy.dialect.decode_recovers or self._can_replace(leg):
            self._failed(told)
            return
        self._proxy.fleet.failed(leg.member, self._proxy.now())
        self.last_failure = told
        self._timer = self._proxy.loop.call_later(self._proxy.config.prefill_grace_s, self._give_up, told)

    def _is_stale(self, lost: Lost) -> bool:
        return lost.unheard and self._proxy.now() - self._sent_at < STALE_S and not self._begun

    def _can_replace(self, leg: Leg) -> bool:
        """Whether a route without this leg's member is there to be tried."""
        if self._num_tries > self._proxy.config.retries:
            return False
        avoid = {*self._avoid, leg.member.id}
        route = self._proxy.chooser.choose(self._features, self._proxy.fleet, self._proxy.now(), avoid=avoid)
        return not isinstance(route, Reject) and leg.member not in route.members

    # -------------------------------------------------------------- first byte and on

    def _commit(self, leg: Leg, piece: bytes) -> None:
        """The client gets decode's head and `piece`. From here on nothing can be taken back."""
        self._committed = True
        self._begin(leg)
        self._proxy.metrics.first_byte_s.observe(self.heard_at - self.started_at)
        self._framed = self._responder.takes_chunks
        framing = b"transfer-encoding: chunked\r\n" if self._framed else b"connection: close\r\n"
        self._send_on(leg, self._head(leg, framing) + self._frame(piece))

    def _begin(self, leg: Leg) -> None:
        """This try has given bytes: whatever failed before it is over."""
        self._begun = True
        self._cancel_timer()
        self._num_tries = 0
        self._first_failure_at = 0.0
        self._avoid.clear()
        if self._client_full and leg.upstream is not None:
            leg.upstream.pause_reading()

    def _head(self, leg: Leg, framing: bytes) -> bytes:
        assert self._route is not None
        extra = route_lines(self._route, tell_route=self._proxy.config.route_header)
        if not self._responder.keeps_alive and not framing.startswith(b"connection"):
            extra += b"connection: close\r\n"
        return response_head(leg.status, leg.headers, framing, extra)

    def _frame(self, piece: bytes) -> bytes:
        return b"%x\r\n%s\r\n" % (len(piece), piece) if self._framed else piece

    def _send_on(self, leg: Leg, framed: bytes) -> None:
        """To the client at once; but the last of a body waits for what ends it, and both become one write."""
        if leg.upstream is not None and leg.upstream.at_end:
            self._last = framed
        else:
            self._responder.write_raw(framed)

    def _answered(self) -> None:
        """The answer is complete (and prefill's part of it, where it is needed)."""
        leg = self._answer
        assert leg is not None
        if not self._committed:
            body = b"".join(self._kept)
            if self._prefill is not None and self._prefill.keeps:
                if not self._prefill.ended:
                    return
                body = merge_input_logprobs(body, self._prefill.body)
            self._proxy.metrics.first_byte_s.observe(self._proxy.now() - self.started_at)
            self._responder.write_raw(self._head(leg, b"content-length: %d\r\n" % len(body)) + body)
        else:
            self._responder.write_raw(self._last + b"0\r\n\r\n" if self._framed else self._last)
        for member_leg in (leg, self._prefill):
            if member_leg is not None and not member_leg.lost:
                self._proxy.fleet.succeeded(member_leg.member)
        self._finish("ok")
        self._responder.end_raw(keep_alive=self._framed or not self._committed)

    def _client_takes_more(self, more: bool) -> None:
        self._client_full = not more
        upstream = self._answer.upstream if self._answer is not None else None
        if upstream is None:
            return
        if more:
            upstream.resume_reading()
        else:
            upstream.pause_reading()

    # -------------------------------------------------------------- failing

    def _failed(self, told: Failure) -> None:
        """One try has failed. Before the first byte: another try, or the answer; after it: go on, or an error event."""
        now = self._proxy.now()
        if told.blames:
            self._proxy.blamed(told)
        if self._committed:
            if self._last:  # came together with the error event that ends this try
                self._responder.write_raw(self._last)
                self._last = b""
            self._resume(told)
            return
        self._first_failure_at = self._first_failure_at or now
        self.last_failure = told
        self._avoid.add(told.member.id)
        late = now - self._first_failure_at > RETRY_WINDOW_S
        if not told.may_retry or late or self._num_tries > self._proxy.config.retries:
            self._give_up(told)
            return
        self._abandon()
        self._proxy.metrics.num_retries += 1
        alone = all(m.id in self._avoid for m in self._proxy.fleet if m.role is told.member.role)
        self._later(BACKOFF_S * self._num_tries if alone else 0.0)

    def _resume(self, told: Failure) -> None:
        """A stream that the client has begun to read broke: another engine goes on with it, now or soon."""
        now = self._proxy.now()
        looks_again = self._first_failure_at > 0
        self._num_resumed += not looks_again
        self._first_failure_at = self._first_failure_at or now
        over = now - self._first_failure_at > self._proxy.config.resume_wait_s
        if self._trail is None or not told.may_retry or over or self._num_resumed > MAX_RESUMED:
            self._break_off(told.error, told.event)
            return
        self._trail.broken()
        self.last_failure = told
        self._avoid.add(told.member.id)
        self._abandon()
        self._later(RESUME_EVERY_S if looks_again else 0.0)

    def _later(self, delay_s: float) -> None:
        self._timer = self._proxy.loop.call_later(delay_s, self._try)

    def _give_up(self, told: Failure) -> None:
        if self._committed:
            self._resume(told)
            return
        self._finish("client_error" if told.is_refusal else "engine_error" if told.status else "lost")
        if told.status:
            self._responder.send(told.status, told.body, told.content_type, told.headers)
        else:
            self._responder.fail(told.error)

    def _break_off(self, error: SplitserveError, event: bytes = b"") -> None:
        """End a stream that has begun: an error event and [DONE] in whole frames; other bodies can only be cut."""
        streams = self._trail is not None or (self._answer is not None and self._answer.streams)
        self._finish("lost" if isinstance(error, PeerLost) else "deadline")
        if not streams:
            self._responder.abort()
            return
        self._proxy.metrics.num_stream_errors += 1
        event = event or msgspec.json.encode({"error": error.to_dict()})
        half = b"\n\n" if self._trail is None else b""  # ends an event that was cut
        last = half + sse.event(event) + sse.DONE
        self._responder.write_raw(self._frame(last) + (b"0\r\n\r\n" if self._framed else b""))
        self._responder.end_raw(keep_alive=self._framed)

    def tick(self, now: float, silence_s: float) -> None:
        """Called a few times a second: the one deadline, and engines that have fallen silent and sick."""
        if now > self.deadline:
            limit = self._proxy.config.request_deadline_s
            error = DeadlineExceeded(f"the request took longer than {limit:g} s, over all stages")
            self.cancel(error, outcome="deadline")
            return
        if self._route is None or now - max(self.heard_at, self._sent_at) < silence_s:
            return
        told = failure.of_silence((self._route.answer,) if self._begun else self._route.members, silence_s)
        if told is not None:
            self._failed(told)

    def uses(self, member: Member) -> bool:
        return self._route is not None and member in self._route.members

    def cancel(self, error: SplitserveError, *, outcome: str = "lost") -> None:
        """End it now, whatever its state: the router stops, or a removed engine had its time."""
        if self._committed:
            self._break_off(error)
        else:
            self._finish(outcome)
            self._responder.fail(error)

    # -------------------------------------------------------------- ends

    def _client_left(self) -> None:
        self._finish("client_left", stop=True)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _abandon(self, *, stop: bool = True) -> None:
        """Leave the current route: stop its legs (or let prefill's come to its end) and its counts."""
        self._cancel_timer()
        for leg in (self._answer, self._prefill):
            if leg is not None and not leg.ended:
                if stop:
                    leg.stop()
                else:
                    self._proxy.detach(leg)
        if self._route is not None:
            self._proxy.fleet.end(self._route, self._features.num_blocks)
        self._route = self._answer = self._prefill = None
        self._begun = False
        self._kept.clear()
        self._num_kept = 0

    def _finish(self, outcome: str, *, stop: bool | None = None) -> None:
        self._proxy.finished(self, outcome)
        self._abandon(stop=outcome != "ok" if stop is None else stop)
        self._responder.on_left = None
        self._responder.watch_writable(None)
