"""The verdict: what was busy while others waited, from marks and sums with one thing slow at a time."""

from __future__ import annotations

from typing import Any

import pytest

from splitserve.plan.verdict import (
    GOODPUT,
    THROUGHPUT,
    TOKEN_GAPS,
    Bound,
    Engine,
    Gain,
    Life,
    Run,
    gain,
    interference,
    judge,
    lives,
)


def engine(
    role: str, *, busy_s: float = 0.0, steps: float = 0, rows: float = 0, mixed: float = 0.0
) -> Engine:
    """One that spent `busy_s` decoding (decode) or on prompts (others), and `mixed` seconds on both at once."""
    if role == "prefill":
        return Engine(role, {"prompt_step_s": busy_s})
    batch = rows / steps if steps else 0.0
    sums = {
        "decode_steps": steps,
        "decode_step_s": busy_s,
        "decode_rows": rows,
        "decode_rows_squared": steps * batch**2,
        "decode_row_s": busy_s * batch,
        "mixed_steps": 10 if mixed else 0,
        "mixed_step_s": mixed,
        "mixed_rows": 10 * batch,
        "mixed_row_s": mixed * batch,
    }
    return Engine(role, sums)


def life(**stages: float) -> Life:
    """Seconds of the named stages; its transfer begins when the stages before it are over."""
    s = {f"{n}_s": stages.get(n, 0.0) for n in ("queue", "compute", "rows", "transfer", "decode")}
    begin = stages.get("at", 0.0) + s["queue_s"] + s["compute_s"] + s["rows_s"]
    return Life(**s, moving=(begin, begin + s["transfer_s"]))


def test_decode_at_94_ms_a_step_at_every_batch_size_cannot_be_helped() -> None:
    split = Run(
        10.0,
        (engine("prefill", busy_s=0.3), engine("decode", busy_s=9.8, steps=104, rows=800)),
        tuple(life(compute=0.02, transfer=0.05, decode=1.5) for _ in range(50)),
    )
    verdict = judge(split, gains=[Gain(THROUGHPUT, 0.99, clear=False), Gain(TOKEN_GAPS, 1.0, clear=False)])
    assert verdict.bound is Bound.DECODE
    assert verdict.pays is False
    assert verdict.sentence.startswith("decode-bound, the split cannot help: decode was busy 98%, prefill 3%")
    assert "94.2 ms + 0.00 ms a request" in verdict.sentence
    assert verdict.sentence.endswith(
        "The split does not pay here: throughput 0.99 times that of the best other arm (within the spread), "
        "ITL p99 1.00 times that of the best other arm (within the spread)."
    )
    assert verdict.evidence.mean_batch == pytest.approx(7.69, abs=0.01)


def test_a_decode_that_prompts_disturb_is_not_said_to_be_beyond_help_unmeasured() -> None:
    split = Run(10.0, (engine("prefill", busy_s=3.0), engine("decode", busy_s=9.0, steps=900, rows=900)))
    unified = [Run(10.0, (engine("unified", busy_s=1.0, steps=100, rows=400, mixed=1.1),))]
    assert "cannot help" in judge(split).sentence
    assert "cannot help" not in judge(split, unified).sentence


def test_a_busy_prefill_with_a_queue_is_prefill_bound() -> None:
    split = Run(
        10.0,
        (engine("prefill", busy_s=9.9), engine("decode", busy_s=2.0, steps=200, rows=300)),
        tuple(life(queue=1.5, compute=0.5, decode=0.3) for _ in range(20)),
    )
    verdict = judge(split)
    assert verdict.bound is Bound.PREFILL
    assert verdict.pays is None
    assert "requests spent 87% of their time at prefill" in verdict.sentence


def test_idle_devices_and_late_state_are_transfer() -> None:
    split = Run(
        10.0,
        (engine("prefill", busy_s=1.0), engine("decode", busy_s=2.0, steps=200, rows=300)),
        tuple(life(at=i * 0.5, compute=0.05, transfer=0.9, decode=0.1) for i in range(20)),
    )
    verdict = judge(split)
    assert verdict.bound is Bound.TRANSFER
    assert verdict.evidence.link_busy > 0.9
    assert verdict.sentence.startswith("transfer: requests waited for their state 8")


def test_arrivals_in_mid_step_are_not_the_links_fault() -> None:
    """Decode notices what came when its step ends: half a step on average, with a fast link."""
    split = Run(
        10.0,
        (engine("prefill", busy_s=0.5), engine("decode", busy_s=5.0, steps=50, rows=60)),
        tuple(life(at=i * 0.1, compute=0.01, transfer=0.1, decode=0.2) for i in range(100)),
    )
    verdict = judge(split)
    assert verdict.bound is Bound.DECODE
    assert verdict.evidence.link_busy == pytest.approx(0.0)


@pytest.mark.parametrize("stages", [{"rows": 1.0, "decode": 1.0}, {"queue": 1.0, "decode": 1.0}])
def test_waiting_for_seats_or_idle_devices_is_queueing(stages: dict[str, float]) -> None:
    split = Run(
        10.0,
        (engine("prefill", busy_s=1.0), engine("decode", busy_s=9.0, steps=900, rows=900)),
        tuple(life(compute=0.1, **stages) for _ in range(10)),
    )
    assert judge(split).bound is Bound.QUEUEING


def test_interference_is_what_prompts_cost_those_who_decode() -> None:
    # 100 steps of 10 ms, and 10 mixed ones of 110 ms: each of those costs its rows 100 ms
    unified = Run(10.0, (engine("unified", busy_s=1.0, steps=100, rows=400, mixed=1.1),))
    assert interference([unified]) == pytest.approx(1.0 / 2.1)
    assert interference([Run(10.0, (engine("unified", busy_s=1.0, steps=100, rows=400),))]) == 0.0
    assert interference([]) == 0.0


def test_interference_is_the_cause_only_where_the_split_pays() -> None:
    split = Run(
        10.0,
        (engine("prefill", busy_s=4.0), engine("decode", busy_s=8.0, steps=800, rows=3200)),
        tuple(life(compute=0.1, decode=1.0) for _ in range(10)),
    )
    unified = [Run(10.0, (engine("unified", busy_s=1.0, steps=100, rows=400, mixed=1.1),))]
    steadier = [Gain(THROUGHPUT, 1.02, clear=False), Gain(TOKEN_GAPS, 3.0, clear=True)]
    paid = judge(split, unified, steadier)
    assert (paid.bound, paid.pays) == (Bound.INTERFERENCE, True)
    assert "prompts cost decoding requests 48% of their time" in paid.sentence
    assert "The split pays here" in paid.sentence
    slower = [Gain(THROUGHPUT, 0.8, clear=True), Gain(TOKEN_GAPS, 3.0, clear=True)]
    unpaid = judge(split, unified, slower)
    assert (unpaid.bound, unpaid.pays) == (Bound.DECODE, False)


def test_goodput_counts_as_work() -> None:
    split = Run(1.0, (engine("prefill"), engine("decode", busy_s=0.9, steps=9, rows=9)))
    assert judge(split, gains=[Gain(THROUGHPUT, 0.9, clear=True), Gain(GOODPUT, 1.3, clear=True)]).pays


def test_gains_turn_so_that_above_one_is_better_and_overlap_is_not_clear() -> None:
    assert gain("x", [10, 12], [5, 6]) == Gain("x", 2.0, clear=True)
    assert gain("x", [10, 12], [20, 30], more_is_better=False) == Gain(
        "x", 25 / 11, clear=True, more_is_better=False
    )
    assert not gain("x", [10, 12], [11, 13]).clear
    one = gain("x", [10], [5])
    assert not one.clear
    split = Run(1.0, (engine("decode", busy_s=0.9, steps=9, rows=9),))
    verdict = judge(split, gains=[one])
    assert verdict.pays is None
    assert "One run shows no spread" in verdict.sentence


def test_a_longer_time_reads_as_longer_and_worse_and_against_whom() -> None:
    slower = gain("TTFT p50", [200, 210], [100, 110], more_is_better=False, rival="replicas")
    assert slower.plainly() == "TTFT p50 1.95 times that of replicas (worse)"
    faster = gain("ITL p99", [50, 60], [100, 110], more_is_better=False, rival="single")
    assert faster.plainly() == "ITL p99 0.52 times that of single (better)"


def test_more_than_the_arithmetic_allows_is_doubted() -> None:
    split = Run(1.0, (engine("decode", busy_s=0.9, steps=9, rows=9),))
    assert "1.80 times" in judge(split, gains=[Gain(THROUGHPUT, 1.8, clear=True)]).doubts[0]
    assert not judge(split, gains=[Gain(THROUGHPUT, 1.4, clear=True)]).doubts


def test_marks_of_both_sides_are_joined_by_room_and_the_unfinished_left_out() -> None:
    def mark(room: int, half: str, **times: Any) -> dict[str, Any]:
        empty = dict.fromkeys(("arrived", "begun", "computed", "offered", "first", "finished"))
        return {"room": room, "half": half, **empty, **times}

    prefill = [
        mark(1, "prefill", arrived=10.0, begun=10.5, computed=11.0, finished=12.0),
        mark(2, "prefill", arrived=10.0, begun=None),
        mark(3, "prefill", arrived=5.0, begun=5.0, computed=5.5),
    ]
    decode = [
        mark(1, "decode", arrived=10.0, offered=11.25, first=11.5, finished=14.0),
        mark(2, "decode", arrived=10.0, offered=10.0, finished=11.0),
        mark(3, "decode", arrived=5.0, offered=5.0, first=5.6, finished=6.0),
        mark(0, "", arrived=11.0, begun=11.0, first=11.5, finished=12.0),
    ]
    (one,) = lives(prefill, decode, since=9.0)
    assert one == Life(0.5, 0.5, 0.25, 0.25, 2.5, moving=(11.25, 11.5))
    assert one.total_s == 4.0
