"""When what happened to each request here, and what the steps' time went to. Records; decides nothing, reads no clock.

    arrived ── begun ─── computed ── first ──────── finished      unified, and prefill (first = computed there)
    arrived ── offered ────────────── first ─────── finished      decode: first = its state has come

`begun` is the launch of the first chunk, `computed` the end of the step with the prompt's last one, `offered` when rows
were reserved for a peer to write. Times are the loop's clock (CLOCK_MONOTONIC, one for all processes of a host).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from splitserve.engine.request import Request
from splitserve.engine.step import Step
from splitserve.types import Rid, TokenEvent

MAX_RECORDS = 4096
"""Requests remembered after their end."""

MARKS = ("arrived", "begun", "computed", "offered", "first", "finished")


class Lifetimes:
    def __init__(self) -> None:
        self._open: dict[Rid, dict[str, Any]] = {}
        self._ended: deque[dict[str, Any]] = deque(maxlen=MAX_RECORDS)
        self._sums = dict.fromkeys(
            (
                "prompt_steps",  # steps that compute prompts only
                "prompt_step_s",
                "decode_steps",  # steps that decode only
                "decode_step_s",
                "decode_rows",  # tokens decoded in them: the batch, summed
                "decode_rows_squared",  # with the three sums above: enough to fit seconds = a + c * batch
                "decode_row_s",
                "mixed_steps",  # steps that do both: who decodes waits for a prompt
                "mixed_step_s",
                "mixed_rows",
                "mixed_row_s",
                "prompt_step_tokens",  # prompt tokens of all steps
            ),
            0.0,
        )

    def began(self, req: Request, now: float) -> None:
        """A request has come in and was not refused."""
        self._open[req.rid] = {
            "rid": req.rid,
            "room": req.room.id if req.room else 0,
            "half": req.half,
            "num_prompt": req.num_prompt,
            **dict.fromkeys(MARKS),
            "arrived": now,
        }

    def stepped(self, step: Step, begin: float, end: float) -> None:
        """One step ran from `begin` to `end`. A chunk of one known token behind the prompt is a decode."""
        rows = prompt_tokens = 0
        for chunk in step.chunks:
            decodes = chunk.decodes
            rows += decodes
            prompt_tokens += 0 if decodes else chunk.num_tokens
            record = self._open.get(chunk.rid)
            if record is None:
                continue
            if record["begun"] is None:
                record["begun"] = begin
            if record["computed"] is None and chunk.stop >= chunk.num_prompt:
                record["computed"] = end
        self._count(rows, prompt_tokens, end - begin)

    def told(
        self, events: Iterable[TokenEvent], ended: Iterable[Request], offers: Iterable[Request], now: float
    ) -> None:
        """What the scheduler has decided since the last call."""
        for req in offers:
            self._mark(req.rid, "offered", now)
        for event in events:
            if event.tokens:
                self._mark(event.rid, "first", now)
        for req in ended:
            record = self._open.pop(req.rid, None)
            if record is not None:
                self._ended.append(
                    {**record, "finished": now, "num_output": req.num_emitted, "ok": req.error is None}
                )

    def records(self) -> list[dict[str, Any]]:
        """Requests that have ended, oldest first: the marks by name (None: never happened), tokens, and their room."""
        return list(self._ended)

    def sums(self) -> dict[str, float]:
        """Steps and seconds since the start, by what a step computed."""
        return dict(self._sums)

    def _mark(self, rid: Rid, name: str, now: float) -> None:
        record = self._open.get(rid)
        if record is not None and record[name] is None:
            record[name] = now

    def _count(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        kind = "mixed" if rows and prompt_tokens else "decode" if rows else "prompt"
        sums = self._sums
        sums[f"{kind}_steps"] += 1
        sums[f"{kind}_step_s"] += seconds
        sums["prompt_step_tokens"] += prompt_tokens
        if rows:
            sums[f"{kind}_rows"] += rows
            sums[f"{kind}_row_s"] += rows * seconds
        if kind == "decode":
            sums["decode_rows_squared"] += rows * rows
