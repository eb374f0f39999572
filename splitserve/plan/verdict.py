"""What was in the way of a split pair's requests, and whether the split pays: from marks, step sums and figures. Pure.

    client ─▶ prefill: arrived ─ queue ─▶ begun ─ compute ─▶ computed ┐
          └▶ decode:  arrived ─ rows ──────────────────▶ offered ────┴─ transfer ─▶ first ─ decode ─▶ finished

The bound is the resource that was busy while requests waited for it. Limits of seats or memory show as requests that
wait although nothing is busy ("queueing"). Interference is what unified engines suffer and a split removes: tokens that
came late because their step computed a prompt too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from splitserve.plan.cost import MOST_GAIN, StepFit, fit_step

BUSY = 0.6
"""A resource busy for this share of the time is in the way of whoever waits."""

WAITING = 0.25
"""Requests that spend this share of their time waiting for seats or idle devices are queueing."""

INTERFERENCE = 0.1
"""Share of the time of decoding requests that prompts in their steps cost."""


class Bound(StrEnum):
    DECODE = "decode-bound"
    PREFILL = "prefill-bound"
    TRANSFER = "transfer"
    QUEUEING = "queueing"
    INTERFERENCE = "interference"


@dataclass(frozen=True)
class Life:
    """Seconds of one split request in each stage; `moving` is when its transfer alone was waited for."""

    queue_s: float
    compute_s: float
    rows_s: float
    transfer_s: float
    decode_s: float
    moving: tuple[float, float]

    @property
    def total_s(self) -> float:
        return self.queue_s + self.compute_s + self.rows_s + self.transfer_s + self.decode_s


@dataclass(frozen=True)
class Engine:
    """One engine's step sums over a run: differences of its counters. Names as in the engine's counters."""

    role: str
    sums: Mapping[str, float]

    @property
    def busy_s(self) -> float:
        return sum(self.sums.get(f"{kind}_step_s", 0.0) for kind in ("prompt", "decode", "mixed"))

    @property
    def step(self) -> StepFit:
        s = self.sums
        return fit_step(
            s.get("decode_steps", 0.0),
            s.get("decode_step_s", 0.0),
            rows=s.get("decode_rows", 0.0),
            rows_squared=s.get("decode_rows_squared", 0.0),
            row_seconds=s.get("decode_row_s", 0.0),
        )


@dataclass(frozen=True)
class Run:
    """What the engines of one arm did in one run."""

    duration_s: float
    engines: tuple[Engine, ...]
    lives: tuple[Life, ...] = ()  # of a split pair only

    def busy(self, role: str) -> float:
        """Share of the time that engines of this role computed."""
        own = [e for e in self.engines if e.role == role]
        return sum(e.busy_s for e in own) / (self.duration_s * len(own)) if own else 0.0


@dataclass(frozen=True)
class Evidence:
    """The numbers of a verdict: shares from 0 to 1."""

    prefill_busy: float
    decode_busy: float
    link_busy: float
    queue: float  # of the requests' time: waiting for prefill to begin
    compute: float
    rows: float  # waiting for seats and pages at decode
    transfer: float
    decode: float
    step_base_s: float
    step_row_s: float
    mean_batch: float
    interference: float  # of unified engines; 0.0 where none were measured


@dataclass(frozen=True)
class Gain:
    """One figure of the split beside that of `rival`, the best other arm in it.

    `ratio` is turned so that above 1 is better, whatever the figure; `plainly` says the quotient as it is. `clear`: the
    runs do not overlap. One run each has no spread, so that nothing can be clear.
    """

    name: str
    ratio: float
    clear: bool
    num_runs: int = 2
    rival: str = "the best other arm"
    more_is_better: bool = True

    @property
    def better(self) -> bool:
        return self.clear and self.ratio > 1

    @property
    def worse(self) -> bool:
        return self.clear and self.ratio < 1

    def plainly(self) -> str:
        """As a person reads it: how many times the rival's figure, and whether that is better."""
        times = self.ratio if self.more_is_better else 1 / self.ratio
        if self.clear:
            word = "better" if self.better else "worse"
        else:
            word = "within the spread" if self.num_runs > 1 else "one run"
        return f"{self.name} {times:.2f} times that of {self.rival} ({word})"


@dataclass(frozen=True)
class Verdict:
    bound: Bound
    pays: bool | None  # None: nothing to compare with, or one run only
    sentence: str
    evidence: Evidence
    gains: tuple[Gain, ...] = ()
    doubts: tuple[str, ...] = ()


def lives(
    prefill: Iterable[Mapping[str, Any]], decode: Iterable[Mapping[str, Any]], *, since: float = 0.0
) -> tuple[Life, ...]:
    """Marks of both sides, joined by room; only requests that arrived after `since` and have all of their marks."""
    by_room = {r["room"]: r for r in prefill if r["half"] == "prefill" and r["arrived"] >= since}
    found = []
    for there in decode:
        here = by_room.get(there["room"]) if there["half"] == "decode" else None
        if here is None or None in (here["begun"], here["computed"], there["offered"], there["first"]):
            continue
        ready = max(here["computed"], there["offered"])
        found.append(
            Life(
                queue_s=here["begun"] - here["arrived"],
                compute_s=here["computed"] - here["begun"],
                rows_s=ready - here["computed"],
                transfer_s=max(0.0, there["first"] - ready),
                decode_s=there["finished"] - there["first"],
                moving=(ready, max(ready, there["first"])),
            )
        )
    return tuple(found)


def gain(
    name: str,
    split: Sequence[float],
    other: Sequence[float],
    *,
    more_is_better: bool = True,
    rival: str = Gain.rival,
) -> Gain:
    """The split's median over that of the arm called `rival`, turned so that above 1 is better."""
    a, b = _median(split), _median(other)
    ratio = (a / b if more_is_better else b / a) if a > 0 and b > 0 else 1.0
    num_runs = min(len(split), len(other))
    apart = max(split) < min(other) or min(split) > max(other)
    return Gain(name, ratio, num_runs > 1 and apart, num_runs, rival, more_is_better)


def judge(split: Run, unified: Sequence[Run] = (), gains: Sequence[Gain] = ()) -> Verdict:
    """The verdict on a split run; `unified` are runs of the replicas arm, `gains` the figures side by side."""
    evidence = weigh(split, unified)
    pays = _pays(gains) if gains and min(g.num_runs for g in gains) > 1 else None
    bound = _bound(evidence)
    if pays and evidence.interference >= INTERFERENCE:
        bound = Bound.INTERFERENCE
    doubts = tuple(
        f"{g.name} is {g.ratio:.2f} times the best unified arm's: above {MOST_GAIN} on the same devices something "
        f"else differs too"
        for g in gains
        if g.name == THROUGHPUT and g.ratio > MOST_GAIN
    )
    return Verdict(bound, pays, _sentence(bound, pays, evidence, gains), evidence, tuple(gains), doubts)


THROUGHPUT, GOODPUT, TOKEN_GAPS, FIRST_TOKEN = "throughput", "goodput", "ITL p99", "TTFT p50"


def weigh(split: Run, unified: Sequence[Run] = ()) -> Evidence:
    """Busy shares of devices and link, and how the requests' own time was spent."""
    decode = [e for e in split.engines if e.role == "decode"]
    num_steps = sum(e.sums.get("decode_steps", 0.0) for e in decode)
    step_s = sum(e.sums.get("decode_step_s", 0.0) for e in decode) / num_steps if num_steps else 0.0
    total = sum(life.total_s for life in split.lives) or 1.0
    # A request that arrives in mid-step is noticed at its end: on average that is decode's time, not the link's.
    late = [min(life.transfer_s, step_s) for life in split.lives]
    transfer = sum(life.transfer_s for life in split.lives) - sum(late)
    spans = [(a, b - x) for (a, b), x in zip((li.moving for li in split.lives), late, strict=True)]
    fit = decode[0].step if decode else StepFit(0.0, 0.0)
    return Evidence(
        prefill_busy=split.busy("prefill"),
        decode_busy=split.busy("decode"),
        link_busy=min(1.0, covered(spans) / split.duration_s),
        queue=sum(li.queue_s for li in split.lives) / total,
        compute=sum(li.compute_s for li in split.lives) / total,
        rows=sum(li.rows_s for li in split.lives) / total,
        transfer=transfer / total,
        decode=(sum(li.decode_s for li in split.lives) + sum(late)) / total,
        step_base_s=fit.base_s,
        step_row_s=fit.row_s,
        mean_batch=sum(e.sums.get("decode_rows", 0.0) for e in decode) / num_steps if num_steps else 0.0,
        interference=interference(unified),
    )


def interference(runs: Sequence[Run]) -> float:
    """Share of decoding requests' time in unified engines that went to prompts computed in the same steps.

    A mixed step of b rows costs them what it lasts beyond a step that only decodes b.
    """
    lost = total = 0.0
    for engine in (e for run in runs for e in run.engines):
        s = engine.sums
        mixed, rows = s.get("mixed_row_s", 0.0), s.get("mixed_rows", 0.0)
        batch = rows / s["mixed_steps"] if s.get("mixed_steps") else 0.0
        lost += max(0.0, mixed - rows * engine.step.seconds(batch))
        total += mixed + s.get("decode_row_s", 0.0)
    return lost / total if total else 0.0


def _bound(e: Evidence) -> Bound:
    waits_idle = e.rows + (e.queue if e.prefill_busy < BUSY else 0.0)
    if waits_idle >= WAITING:
        return Bound.QUEUEING
    busy = {Bound.DECODE: e.decode_busy, Bound.PREFILL: e.prefill_busy, Bound.TRANSFER: e.link_busy}
    most = max(busy, key=lambda b: busy[b])
    if busy[most] >= BUSY:
        return most
    # Nothing is busy: a lone request's time goes where it goes.
    spent = {Bound.DECODE: e.decode, Bound.PREFILL: e.compute + e.queue, Bound.TRANSFER: e.transfer}
    return max(spent, key=lambda b: spent[b])


def _pays(gains: Sequence[Gain]) -> bool:
    """More work for the same devices, or steadier tokens for no less work."""
    rates = [g for g in gains if g.name in (THROUGHPUT, GOODPUT)]
    if any(g.better for g in rates):
        return True
    return any(g.name == TOKEN_GAPS and g.better for g in gains) and not any(g.worse for g in rates)


def _sentence(bound: Bound, pays: bool | None, e: Evidence, gains: Sequence[Gain]) -> str:
    busy = f"decode was busy {e.decode_busy:.0%}, prefill {e.prefill_busy:.0%}, the link {e.link_busy:.0%} of the time"
    step = f"a decode step took {1000 * e.step_base_s:.1f} ms + {1000 * e.step_row_s:.2f} ms a request"
    match bound:
        case Bound.DECODE:
            cannot = ", the split cannot help" if _beyond_help(pays, e) else ""
            cause = f"decode-bound{cannot}: {busy}, and {step}"
        case Bound.PREFILL:
            cause = (
                f"prefill-bound: {busy}; requests spent {e.queue + e.compute:.0%} of their time at prefill"
            )
        case Bound.TRANSFER:
            cause = f"transfer: requests waited for their state {e.transfer:.0%} of their time; {busy}"
        case Bound.QUEUEING:
            cause = (
                f"queueing: requests waited {e.queue:.0%} of their time to begin and {e.rows:.0%} for seats or pages "
                f"at decode; {busy}"
            )
        case Bound.INTERFERENCE:
            cause = (
                f"interference: in unified engines prompts cost decoding requests {e.interference:.0%} of their time"
                f"; in the split {busy}"
            )
    return f"{cause}. {_answer(pays, gains)}".rstrip()


def _beyond_help(pays: bool | None, e: Evidence) -> bool:
    """Measured, or plain: all of decode's time is decoding, and it would be on any device that also did the prefill."""
    if pays is not None:
        return not pays
    return e.decode_busy >= BUSY > e.prefill_busy and e.interference < INTERFERENCE


def _answer(pays: bool | None, gains: Sequence[Gain]) -> str:
    if not gains:
        return ""
    figures = ", ".join(g.plainly() for g in gains)
    if pays is None:
        return f"One run shows no spread, so whether the split pays stays open: {figures}."
    return f"The split {'pays' if pays else 'does not pay'} here: {figures}."


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for a, b in sorted(s for s in spans if s[1] > s[0]):
        total += max(0.0, b - max(a, end))
        end = max(end, b)
    return total


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
