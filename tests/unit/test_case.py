"""The projection to a box that nobody here has: its arithmetic on cases that can be worked out by hand, and its page."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.case import rtx_pro_6000 as case
from benchmarks.case.carry import Gpu, Measured, Ring
from benchmarks.case.loop import split, unified

H200 = Gpu(4e12, 800e12)


def row(
    kernel: str, us: float, bound_us: float, limit: str, tokens: int = 1, per_step: int = 10
) -> dict[str, Any]:
    names = {"kernel": kernel, "limit": limit, "tokens": tokens}
    return {**names, "us": us, "bound_us": bound_us, "per_step": per_step}


def seconds(*rows: dict[str, Any], gpu: Gpu, ranks: int = 1, worse: bool = False) -> float:
    return (
        Measured(H200, {rows[0]["tokens"]: rows}).kernels_s(rows[0]["tokens"], gpu, ranks, worse=worse) * 1e6
    )


def test_the_same_gpu_takes_the_same_time() -> None:
    rows = (
        row("q_b", 12.0, 8.0, "bytes"),
        row("hc_pre", 9.0, 0.5, "launch"),
        row("qkv_a", 5.0, 2.0, "bytes"),
    )
    for worse in (False, True):
        assert seconds(*rows, gpu=H200, worse=worse) == pytest.approx(260.0)


def test_half_the_bandwidth_doubles_the_bytes_and_perhaps_the_rest() -> None:
    slow = Gpu(2e12, 800e12)
    assert seconds(row("q_b", 12.0, 8.0, "bytes"), gpu=slow) == pytest.approx(200.0)
    assert seconds(row("q_b", 12.0, 8.0, "bytes"), gpu=slow, worse=True) == pytest.approx(240.0)


def test_ranks_divide_what_they_share_and_no_waiting() -> None:
    assert seconds(row("q_b", 12.0, 8.0, "bytes"), gpu=H200, ranks=4) == pytest.approx(30.0)
    assert seconds(row("q_b", 12.0, 8.0, "bytes"), gpu=H200, ranks=4, worse=True) == pytest.approx(60.0)
    assert seconds(row("qkv_a", 12.0, 8.0, "bytes"), gpu=H200, ranks=4) == pytest.approx(120.0)
    assert seconds(row("attend ratio 4", 12.0, 0.6, "launch"), gpu=H200, ranks=4) == pytest.approx(120.0)


def test_products_of_a_prompt_keep_their_ratio() -> None:
    slow = Gpu(4e12, 400e12, clumsy=1.5)
    rows = row("experts down", 100.0, 40.0, "operations", tokens=2048)
    assert seconds(rows, gpu=slow, ranks=2) == pytest.approx(1500.0)


def test_sizes_between_are_on_a_line_and_beyond_on_the_last() -> None:
    kernels = Measured(H200, {n: (row("head", float(n), float(n), "bytes", n),) for n in (1, 8, 64)})
    for tokens in (1.0, 4.0, 8.0, 36.0, 64.0, 100.0):
        assert kernels.step_s(tokens, H200, 1, worse=False) == pytest.approx(tokens * 10 / 1e6)


def test_adding_up_moves_a_ranks_bytes_nearly_twice() -> None:
    assert Ring(1e-5, 1e9).seconds(1e6, 4) == pytest.approx(1e-5 + 1.5e-3)
    assert Ring(1e-5, 1e9).seconds(1e6, 1) == 0.0


def step(batch: float) -> float:
    return 0.01 + 0.001 * batch


def test_a_lone_request_takes_its_prompt_and_its_steps_anywhere() -> None:
    alone = 0.2 + 100 * step(1)
    for engines in (1, 2):
        found = unified(step, prefill_s=0.2, num_output=100, concurrency=1, engines=engines)
        assert found.rate == pytest.approx(1 / alone)
        assert found.tpot_s == pytest.approx(step(1))
    found = split(step, prefill_s=0.2, handoff_s=0.05, num_output=100, concurrency=1)
    assert found.rate == pytest.approx(1 / (alone + 0.05), rel=1e-6)


@pytest.mark.parametrize("concurrency", [2, 8, 16, 64])
@pytest.mark.parametrize("prefill_s", [0.01, 0.1, 0.5])
def test_requests_add_up_to_the_loop(concurrency: int, prefill_s: float) -> None:
    """Little's law: rate x (time to the first token + the rest of the tokens) is what is in the loop."""
    for engines in (1, 2):
        found = unified(step, prefill_s=prefill_s, num_output=100, concurrency=concurrency, engines=engines)
        assert found.rate * (prefill_s + 100 * found.tpot_s) == pytest.approx(concurrency)
    found = split(step, prefill_s=prefill_s, handoff_s=0.0, num_output=100, concurrency=concurrency)
    assert found.rate <= 1 / prefill_s + 1e-9
    assert found.rate * (found.ttft_s + 99 * found.tpot_s) == pytest.approx(concurrency, rel=1e-3)


def test_a_handoff_is_four_times_what_the_model_keeps() -> None:
    """3,850.25 bytes a token and the live part of a slot: the figures of `splitserve state`."""
    assert case.handoff_bytes(4096) == 4 * 19_845_120


def test_worse_is_worse_and_the_corners_hold_the_ends() -> None:
    kernels = case.read()
    for arm in case.ARMS:
        for load in case.WORKLOADS:
            for concurrency in case.CONCURRENCY:
                better, worse = (
                    box.reach(kernels, arm, load, concurrency) for box in (case.BETTER, case.WORSE)
                )
                assert 0 < worse.rate < better.rate
                assert math.inf > worse.tpot_s > better.tpot_s > 0
    assert {case.BETTER, case.WORSE} < set(case.CORNERS)


def test_the_page_shows_what_the_script_says() -> None:
    assert case.between_marks(case.PAGE.read_text(encoding="utf-8")) == case.to_text(case.read())
