"""One HTTP request as the engine sees it (Job), and while it runs (Run).

Job: prompts x n choices ──start──▶ Run ──take──▶ deltas of any choice, in order, until all have ended
                                     │
       client left, deadline, error ─┴─▶ every open choice is aborted in the engine
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from splitserve.errors import DeadlineExceeded, SplitserveError
from splitserve.text.said import Reader
from splitserve.text.tokenizer import Tokenizer
from splitserve.types import FinishReason, Rid, SamplingParams, TokenEvent
from splitserve.wire import Generate, Room

from . import resumption
from .choice import Choice, Delta
from .engine_link import EngineLink, Inbox
from .metrics import Metrics
from .params import TextRules

GRACE_S = 2.0
"""The engine ends a request at its deadline; the server does so this much later, should the engine not."""


class ClientLeft(Exception):
    """Nobody reads the answer any more. Ends a request's task; never an answer."""


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    text: str | None = None  # as the client sent it, if it was text


@dataclass(frozen=True)
class Job:
    """What to run. Choices are numbered prompt by prompt: choice p * n + i is answer i to prompt p."""

    endpoint: str
    rids: tuple[Rid, ...]  # public ids, one for each choice
    prompts: tuple[Prompt, ...]
    n: int
    sampling: SamplingParams
    seeds: tuple[int, ...]  # one for each prompt
    rules: TextRules
    rooms: tuple[Room, ...] = ()
    half: str = ""
    priority: int = 0
    stream: bool = False
    answers_first: bool = False  # prefill's half, whose answer does not wait for decode (sequential.py)
    discard: bool = False  # no output is wanted (max_tokens 0)
    reader: Callable[[], Reader] | None = None  # takes each answer's text apart
    emitted: tuple[int, ...] | None = None  # continues the one choice after these tokens (resumption.py)
    ticket: resumption.Ticket | None = None  # our router is told which tokens each event shows

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(p.tokens) for p in self.prompts)


class Run:
    """One job in the engine. `close` must be called in the end, whatever happened.

    RequestError for a job that continues an answer which is complete.
    """

    def __init__(
        self,
        job: Job,
        link: EngineLink,
        *,
        tokenizer: Tokenizer,
        metrics: Metrics,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.job = job
        self._link = link
        self._metrics = metrics
        self._clock = clock
        self.arrived = clock()
        self._deadline_s = deadline_s
        self._inbox = Inbox()
        s = job.sampling
        self.choices = [
            Choice(
                tokenizer,
                job.rules,
                min_tokens=s.min_tokens,
                entries=s.logprobs is not None,
                discard=job.discard,
                reader=job.reader() if job.reader else None,
            )
            for _ in job.rids
        ]
        if job.emitted is not None:
            resumption.replay(self.choices[0], job.emitted)
        self.trail = resumption.Trail(self.choices[0]) if job.ticket is not None else None
        serial = link.next_serial()  # engine rids are unique although clients choose theirs
        self._open = {i: f"{rid}#{serial}.{i}" for i, rid in enumerate(job.rids)}
        self._last = [0.0] * len(job.rids)  # when the last token of each choice came; 0 before the first
        self._timer: asyncio.TimerHandle | None = None
        self._left = False

    @property
    def num_cached(self) -> int:
        """Prompt tokens that came from the prefix cache, each prompt counted once."""
        return sum(self.choices[p * self.job.n].num_cached for p in range(len(self.job.prompts)))

    @property
    def num_output(self) -> int:
        return sum(len(c.tokens) for c in self.choices)

    @property
    def age_s(self) -> float:
        """Seconds since the request arrived."""
        return self._clock() - self.arrived

    @property
    def ended(self) -> bool:
        """Whether every choice has ended."""
        return not self._open

    @property
    def aborted(self) -> bool:
        """Whether a choice was ended from outside."""
        return any(c.ending is not None and c.ending.reason is FinishReason.ABORT for c in self.choices)

    @property
    def all_begun(self) -> bool:
        """Whether every choice has a token."""
        return all(self._last)

    def start(self) -> None:
        """Hand all choices to the engine. Raises what EngineLink.submit raises."""
        job, deadline = self.job, self.arrived + self._deadline_s
        for index, rid in list(self._open.items()):
            prompt, i = divmod(index, job.n)
            tokens = job.prompts[prompt].tokens
            request = Generate(
                rid=rid,
                tokens=[*tokens, *job.emitted] if job.emitted else tokens,
                num_prompt=len(tokens),
                sampling=msgspec.structs.replace(job.sampling, seed=job.seeds[prompt], choice=i),
                half=job.half,
                room=job.rooms[index] if job.rooms else None,
                priority=job.priority,
                deadline=deadline,
            )
            self._link.submit(request, self._inbox, index=index)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._deadline_s + GRACE_S, self._expire)

    def comment(self, delta: Delta) -> bytes:
        """What goes before the event that shows `delta`: its tokens, where our router wants them."""
        return self.trail.upto(delta.num_tokens) if self.trail is not None else b""

    async def take(self) -> list[tuple[int, Delta]]:
        """What has come since the last call; [] when every choice has ended. Raises the request's error."""
        if self._left:
            raise ClientLeft
        if not self._open:
            return []
        deltas = []
        now = 0.0
        for index, item in await self._inbox.take():
            if isinstance(item, Exception):
                raise item
            if index not in self._open:
                continue  # ended by a stop string before this came
            now = now or self._clock()
            self._mark(index, item, now)
            delta = self.choices[index].feed(item)
            if delta.ending is not None:
                self._link.abort(self._open.pop(index), "stop string")
            deltas.append((index, delta))
        return deltas

    def leave(self) -> None:
        """The client has gone: free the engine at once and end the task that waits in `take`."""
        self._left = True
        self._abort_open("client left")
        self._inbox.put(0, ClientLeft())

    def abort(self, index: int, reason: str) -> None:
        """End one choice from outside; it answers with finish reason abort."""
        if index in self._open:
            self._link.abort(self._open[index], reason)
            self._inbox.put(index, TokenEvent(self._open[index], finish=FinishReason.ABORT))

    def close(self) -> None:
        """Abort whatever still runs."""
        if self._timer is not None:
            self._timer.cancel()
        self._abort_open("request ended")

    def _abort_open(self, reason: str) -> None:
        for rid in self._open.values():
            self._link.abort(rid, reason)
        self._open.clear()

    def _expire(self) -> None:
        error: SplitserveError = DeadlineExceeded(f"no answer within {self._deadline_s:g} s")
        self._inbox.put(0, error)

    def _mark(self, index: int, event: TokenEvent, now: float) -> None:
        """Latencies are measured here, where tokens come from the engine, not where text goes out."""
        if not event.tokens:
            return
        last, self._last[index] = self._last[index], now
        if last:
            self._metrics.next_tokens((now - last) / len(event.tokens), len(event.tokens))
        else:
            self._metrics.first_token(now - self.arrived, len(event.tokens))
