"""Decides what every step computes and who owns which rows. Pure: no torch, no I/O, time is an argument.

    add ──▶ WAITING ──admit──▶ RUNNING ──────────── last token ──▶ ENDED (rows released)
                │                 ▲  │ no page left: preempt, back to WAITING
                │ decode half     │  └─ prefill half: first token ──▶ LEAVING ── rows_free ──▶ ENDED
                └─▶ ARRIVING ─────┘ arrived
                        └── lost: rows quarantined until rows_free; WAITING again (recompute) or an error

A step first gives one token to every request that decodes, then spends what is left of `step_tokens` on
prompts. A prompt's pages are taken whole at admission, so that only decoding can run out of memory, and only
rows that no step or handoff touches are preempted.

It is not responsible for telling peers: the loop reads `ended` and `offers` and calls the transfer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from splitserve.engine.chunks import cut, loads, mark, may_share, share
from splitserve.engine.limits import Counters, Limits
from splitserve.engine.request import Phase, Request
from splitserve.engine.step import Chunk, Sampled, Step, StepResult
from splitserve.errors import (
    DeadlineExceeded,
    InvariantError,
    RequestError,
    SplitserveError,
)
from splitserve.kv.cache import Cache, Holding
from splitserve.types import FinishReason, Rid, TokenEvent, TokenLogprobs

MAX_OPEN_PROMPTS = 8
"""Prompts computed at a time: enough that short ones overtake a long one, few enough that some end soon."""


@dataclass
class Scheduler:
    cache: Cache
    limits: Limits
    requests: dict[Rid, Request] = field(default_factory=dict)
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    events: list[TokenEvent] = field(default_factory=list)  # tokens since the last drain
    ended: list[Request] = field(default_factory=list)  # ended since the last drain
    offers: list[Request] = field(default_factory=list)  # newly ARRIVING since the last drain
    admitted: list[Request] = field(default_factory=list)  # prefill halves newly RUNNING since the last drain
    _steps: dict[int, Step] = field(default_factory=dict)  # launched and not applied
    _orphans: dict[Rid, Holding] = field(default_factory=dict)  # rows of failed handoffs
    _index: int = 0

    # ------------------------------------------------------------------ requests in

    def add(self, req: Request, now: float) -> None:
        """Queue a request. One that can never run ends at once; a reused rid raises RequestError."""
        if req.rid in self.requests:
            raise RequestError(f"request id {req.rid!r} is already in use", field="rid")
        req.arrived = now
        self.requests[req.rid] = req
        error = self.limits.refusal(req, num_waiting=len(self.waiting))
        if error:
            self._end(req, error=error)
            return
        self.waiting.append(req)
        self.waiting.sort(key=lambda r: r.order)

    def abort(self, rid: Rid) -> None:
        """The client left. Unknown and ended requests are ignored: an abort may cross the last token."""
        req = self.requests.get(rid)
        if req and req.phase is not Phase.ENDED:
            self._end(req, finish=FinishReason.ABORT)

    def fail(self, rid: Rid, error: SplitserveError) -> None:
        """End a request with an error; ignored where it has ended."""
        req = self.requests.get(rid)
        if req and req.phase is not Phase.ENDED:
            self._end(req, error=error)

    # ------------------------------------------------------------------ what the transfer says

    def arrived(
        self,
        rid: Rid,
        first: Sampled,
        *,
        num_cached: int = 0,
        prompt_logprobs: tuple[TokenLogprobs | None, ...] = (),
    ) -> None:
        """All rows of the prompt are here, and its first token: from now on it decodes like any other."""
        req = self.requests[rid]
        if req.phase is not Phase.ARRIVING:
            raise InvariantError(f"{rid} arrived in phase {req.phase.value}")
        req.in_transfer, req.met_peer = False, True
        req.num_done = req.num_planned = req.num_given
        req.num_cached = num_cached
        req.phase = Phase.RUNNING
        self.running.append(req)
        self._publish(req)
        req.prompt_logprobs = list(prompt_logprobs)
        self._take(req, first)

    def lost(self, rid: Rid, error: SplitserveError, *, retriable: bool) -> None:
        """The handoff failed: quarantine its rows until `rows_free`; compute the prompt here if allowed."""
        req = self.requests[rid]
        if req.phase is Phase.ENDED:
            return
        if req.phase is not Phase.ARRIVING:
            raise InvariantError(f"{rid} lost its handoff in phase {req.phase.value}")
        if not retriable or not self._may_recompute(req):
            self._end(req, error=error)
            return
        assert req.holding is not None
        self._orphans[rid] = req.holding
        self.cache.quarantine(req.holding)
        req.holding, req.in_transfer, req.met_peer, req.recomputing = None, False, True, True
        self.counters.recomputations += 1
        req.phase = Phase.WAITING
        self.waiting.append(req)
        self.waiting.sort(key=lambda r: r.order)

    def rows_free(self, rid: Rid) -> None:
        """Nobody can read or write this request's handed rows any more."""
        orphan = self._orphans.pop(rid, None)
        if orphan is not None:
            self.cache.release(orphan)
            return
        req = self.requests.get(rid)
        if req is None:
            return
        req.in_transfer = False
        if req.phase is Phase.LEAVING:
            self.events.append(TokenEvent(rid, finish=req.finish))
            self._finish(req)
        elif req.phase is Phase.ENDED:
            self._let_go(req)

    def _may_recompute(self, req: Request) -> bool:
        """Bounded: recomputation may queue at most what its share of 64 full steps can compute."""
        queued = sum(r.num_left for r in [*self.waiting, *self.running] if r.recomputing)
        bound = int(64 * self.limits.step_tokens * self.limits.recompute_share)
        return queued + len(req.tokens) <= bound

    # ------------------------------------------------------------------ plan

    def plan(self, now: float) -> Step | None:
        """The next step, or None when there is nothing to compute."""
        self._expire(now)
        chunks: list[Chunk] = []
        budget = self._plan_decodes(chunks, self.limits.step_tokens)
        fresh = self._admit(budget)
        self._plan_prompts(chunks, budget, fresh)
        if not chunks:
            return None
        self._index += 1
        step = Step(self._index, tuple(chunks), loads(fresh))
        self._steps[step.index] = step
        self.counters.steps += 1
        return step

    def _plan_decodes(self, chunks: list[Chunk], budget: int) -> int:
        for req in sorted(self.running, key=lambda r: r.order):
            if req.phase is not Phase.RUNNING or req.num_left != 1 or not self._wants_token(req):
                continue
            if budget == 0 or req.drafting or not self._grow(req):
                continue
            drafts = budget > 1 and self.limits.may_draft(req) and self._has_room(req, 2)
            chunks.append(self._chunk(req, 1, drafts=drafts))
            budget -= chunks[-1].num_tokens
        return budget

    def _plan_prompts(self, chunks: list[Chunk], budget: int, fresh: list[Request]) -> None:
        prompts = sorted((r for r in self.running if r.num_left > 1 or r in fresh), key=lambda r: r.order)
        makeup = max(1, int(self.limits.step_tokens * self.limits.recompute_share))
        for req, size in share(prompts, budget, makeup=makeup):
            chunks.append(self._chunk(req, size))

    def _admit(self, budget: int) -> list[Request]:
        """Give rows to those who wait, in order: nobody overtakes a request that waits for memory.

        One whose prompt another is computing lets others pass until it finds those pages cached.
        """
        fresh = []
        seats = self.limits.max_seqs - len(self.running) - self._num_arriving()
        prompts = sum(r.num_left > 1 for r in self.running)
        for req in list(self.waiting):
            computes = not req.awaits_peer
            if seats == 0 or (computes and (budget == 0 or prompts >= MAX_OPEN_PROMPTS)):
                break
            if computes and self._may_share(req):
                continue
            if not self._take_rows(req):
                break
            self.waiting.remove(req)
            seats -= 1
            prompts += computes
            self._place(req)
            if computes:
                fresh.append(req)
        return fresh

    def _may_share(self, req: Request) -> bool:
        return self.cache.finds_prefixes and may_share(req, self.running, page_tokens=self.cache.page_tokens)

    def _place(self, req: Request) -> None:
        """Decide where a request that has just got its rows goes on."""
        if req.awaits_peer:
            req.phase, req.in_transfer = Phase.ARRIVING, True
            self.offers.append(req)
            return
        req.phase = Phase.RUNNING
        self.running.append(req)
        if req.half == "prefill":
            req.in_transfer = True
            self.admitted.append(req)

    def _take_rows(self, req: Request) -> bool:
        """Pages for all known tokens, or none; one for each running request stays free against preemption."""
        rated = req.sampling.prompt_logprobs is not None  # cached rows have no logits
        holding = self.cache.open(() if rated else req.tokens, computes=not req.awaits_peer)
        needed = -(-len(req.tokens) // self.cache.page_tokens) - len(holding.pages)
        spare = self.cache.num_free + self.cache.num_evictable - needed
        if spare < len(self.running) or not self.cache.grow(holding, len(req.tokens)):
            self.cache.release(holding)
            return False
        req.holding = holding
        req.num_done = req.num_planned = req.num_marked = holding.num_cached
        if not req.num_preempted and not req.recomputing:
            req.num_cached = holding.num_cached
            self.counters.cached_tokens += holding.num_cached
        return True

    def _chunk(self, req: Request, size: int, *, drafts: bool = False) -> Chunk:
        marks = mark(req, req.num_planned + size, self.cache)
        return cut(req, size, page_tokens=self.cache.page_tokens, drafts=drafts, marks=marks)

    def _wants_token(self, req: Request) -> bool:
        """Tokens in flight may already be its last ones by count."""
        return req.num_emitted + req.num_pending < req.max_emitted and req.num_tokens < self.limits.max_len

    def _has_room(self, req: Request, num_tokens: int) -> bool:
        """Pages for the next tokens, if they are to be had without taking them from anybody."""
        assert req.holding is not None
        return self.cache.grow(req.holding, req.num_planned + num_tokens)

    def _grow(self, req: Request) -> bool:
        """A page for the next token, if need be from the last in line. False: not in this step."""
        while not self._has_room(req, 1):
            victim = max(
                (r for r in self.running if not r.num_steps and not r.in_transfer),
                key=lambda r: r.order,
                default=None,
            )
            if victim is None or victim.order < req.order:
                return False  # rows in flight will come free; this request waits a step
            self._preempt(victim)
            if victim is req:
                return False
        return True

    def _preempt(self, req: Request) -> None:
        assert req.holding is not None
        self._publish(req)
        self.cache.release(req.holding)
        self.running.remove(req)
        req.holding = None
        req.phase = Phase.WAITING
        req.num_done = req.num_planned = 0
        req.num_preempted += 1
        self.counters.preemptions += 1
        self.waiting.append(req)
        self.waiting.sort(key=lambda r: r.order)

    def _expire(self, now: float) -> None:
        for req in [r for r in self.requests.values() if r.deadline and now >= r.deadline]:
            if req.phase is not Phase.ENDED:
                stage = req.phase.value
                self._end(req, error=DeadlineExceeded(f"the request's deadline passed while it was {stage}"))

    # ------------------------------------------------------------------ apply

    def apply(self, result: StepResult) -> None:
        """Take a step's result; of requests that have ended since, only let go of the rows."""
        step = self._steps.pop(result.index)
        for chunk in step.chunks:
            req = self.requests[chunk.rid]
            req.num_steps -= 1
            req.num_pending -= chunk.sample
            if req.phase is Phase.ENDED:
                self._drop_marks(chunk)
                self._let_go(req)
                continue
            self._advance(req, chunk, result.sampled.get(req.rid, Sampled()))

    def _drop_marks(self, chunk: Chunk) -> None:
        for _, unit in chunk.marks:
            self.cache.drop_snapshot(unit)

    def _advance(self, req: Request, chunk: Chunk, sampled: Sampled) -> None:
        req.num_done = chunk.stop - chunk.num_draft
        if chunk.num_draft:
            right = max(0, len(sampled.tokens) - 1)
            self.counters.drafted_tokens += chunk.num_draft
            self.counters.accepted_tokens += right
            req.num_done += right
            req.num_planned, req.drafting = req.num_done, False
        new = min(chunk.stop, req.num_prompt) - min(chunk.start, req.num_prompt)
        self.counters.prompt_tokens += new
        self.counters.recomputed_tokens += new if req.recomputing else 0
        if not sampled.finite or sampled.refusal:
            self._drop_marks(chunk)
        if not sampled.finite:
            self._end(
                req,
                error=InvariantError("the logits are not finite: no token can be trusted"),
            )
            return
        if sampled.refusal:
            self._end(req, error=RequestError(sampled.refusal, field="grammar"))
            return
        if chunk.prompt_logprobs is not None:
            if not req.prompt_logprobs:
                req.prompt_logprobs.append(None)  # nothing precedes the first token
            req.prompt_logprobs.extend(sampled.prompt_logprobs)
        self._publish(req)
        for border, unit in chunk.marks:
            assert req.holding is not None
            self.cache.keep_snapshot(req.holding, border, unit)
        if chunk.sample:
            req.recomputing = False
            self._take(req, sampled)

    def _take(self, req: Request, sampled: Sampled) -> None:
        """Append sampled tokens up to the first that ends the request, and report them."""
        taken: list[int] = []
        finish, matched = None, None
        for token in sampled.tokens:
            req.tokens.append(token)
            req.draft = sampled.draft
            taken.append(token)
            finish, matched = self.limits.finish_reason(req, token)
            if finish:
                break
        self.counters.output_tokens += len(taken)
        first = len(req.tokens) == req.num_given + len(taken)
        leaves = finish is not None and req.half == "prefill" and req.in_transfer
        self.events.append(
            TokenEvent(
                rid=req.rid,
                tokens=tuple(taken),
                logprobs=sampled.logprobs[: len(taken)],
                finish=None if leaves else finish,  # a prefill half ends when its rows have left
                matched_stop=matched,
                num_cached=min(req.num_cached, req.num_prompt) if first else 0,
                prompt_logprobs=tuple(req.prompt_logprobs) if first else (),
            )
        )
        if not finish:
            return
        req.finish = finish
        if leaves:
            req.phase = Phase.LEAVING
            self.running.remove(req)
        else:
            self._finish(req)

    def _publish(self, req: Request) -> None:
        assert req.holding is not None
        self.cache.publish(req.holding, req.tokens, min(req.num_done, len(req.tokens)))

    # ------------------------------------------------------------------ ends

    def _finish(self, req: Request) -> None:
        self.counters.finished += 1
        self._leave(req)

    def _end(
        self, req: Request, *, error: SplitserveError | None = None, finish: FinishReason | None = None
    ) -> None:
        req.error, req.finish = error, finish
        self.counters.failed += error is not None
        self.counters.aborted += finish is FinishReason.ABORT
        if finish:
            self.events.append(TokenEvent(req.rid, finish=finish))
        self._leave(req)

    def _leave(self, req: Request) -> None:
        if req in self.waiting:
            self.waiting.remove(req)
        if req in self.running:
            self.running.remove(req)
        req.phase = Phase.ENDED
        self.ended.append(req)
        self._let_go(req)

    def _let_go(self, req: Request) -> None:
        """Release the rows of an ended request as soon as no launched step and no handoff can touch them."""
        if req.num_steps:
            return
        if req.in_transfer:
            if req.holding is not None:
                self.cache.quarantine(req.holding)
            return
        if req.holding is not None:
            self.cache.release(req.holding)
            req.holding = None
        self.requests.pop(req.rid, None)

    # ------------------------------------------------------------------ views

    def drain(self) -> tuple[list[TokenEvent], list[Request], list[Request], list[Request]]:
        """(token events, ended, offers to send, prefill halves admitted) since the last call."""
        out = (self.events, self.ended, self.offers, self.admitted)
        self.events, self.ended, self.offers, self.admitted = [], [], [], []
        return out

    def next_deadline(self) -> float | None:
        return min((r.deadline for r in self.requests.values() if r.deadline), default=None)

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def queued_tokens(self) -> int:
        return sum(r.num_left for r in self.waiting) + sum(r.num_left for r in self.running)

    def _num_arriving(self) -> int:
        return sum(r.phase is Phase.ARRIVING for r in self.requests.values())

    def check(self) -> None:
        """Every request is in the list of its phase, and every page has one owner (or the prefix tree)."""
        for name, phase in (("waiting", Phase.WAITING), ("running", Phase.RUNNING)):
            want = {r.rid for r in self.requests.values() if r.phase is phase}
            have = [r.rid for r in getattr(self, name)]
            if len(have) != len(set(have)) or set(have) != want:
                raise InvariantError(f"{name} holds {sorted(have)}, phases say {sorted(want)}")
        for req in (r for r in self.requests.values() if r.phase is not Phase.ENDED):
            if not 0 <= req.num_done <= req.num_planned <= req.num_tokens:
                raise InvariantError(
                    f"{req.rid}: done {req.num_done}, planned {req.num_planned}, tokens {req.num_tokens}"
                )
            if (req.phase is Phase.WAITING) != (req.holding is None):
                raise InvariantError(f"{req.rid} is {req.phase.value} and holds {req.holding}")
        self.cache.check(self.holdings())

    def holdings(self) -> list[Holding]:
        own = [r.holding for r in self.requests.values() if r.holding is not None]
        return [*own, *self._orphans.values()]
