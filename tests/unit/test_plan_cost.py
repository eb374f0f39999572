"""The arithmetic of split and unified: fits recover what made them, and no gain passes the bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.plan.cost import MOST_GAIN, StepFit, fit_step, split_rate, unified_rate


def fitted(batches: list[int], a: float, c: float) -> StepFit:
    times = [a + c * b for b in batches]
    return fit_step(
        len(batches),
        sum(times),
        rows=sum(batches),
        rows_squared=sum(b * b for b in batches),
        row_seconds=sum(b * t for b, t in zip(batches, times, strict=True)),
    )


@given(
    st.lists(st.integers(1, 64), min_size=2, max_size=50).filter(lambda b: len(set(b)) > 1),
    st.floats(0.001, 0.1),
    st.floats(0.0, 0.01),
)
def test_a_fit_finds_the_step_that_made_the_sums(batches: list[int], a: float, c: float) -> None:
    fit = fitted(batches, a, c)
    assert fit.base_s == pytest.approx(a, rel=1e-3, abs=1e-6)
    assert fit.row_s == pytest.approx(c, rel=1e-3, abs=1e-6)


def test_one_batch_size_is_all_base_and_no_step_is_nothing() -> None:
    assert fitted([8, 8, 8], 0.01, 0.001) == StepFit(pytest.approx(0.018), 0.0)
    assert fit_step(0, 0, rows=0, rows_squared=0, row_seconds=0) == StepFit(0.0, 0.0)


def test_steps_that_shrink_with_the_batch_are_noise_and_never_negative() -> None:
    fit = fit_step(2, 3.0, rows=3, rows_squared=5, row_seconds=1 * 2.0 + 2 * 1.0)  # 2 s at 1, 1 s at 2
    assert fit.row_s == 0.0
    assert fit.base_s == 1.5


@given(
    st.floats(0.001, 0.1), st.floats(0, 0.01), st.integers(1, 64), st.floats(0.001, 5), st.integers(1, 2000)
)
def test_no_split_gains_more_than_half(a: float, c: float, batch: int, t: float, n: int) -> None:
    fit = StepFit(a, c)
    split = split_rate(fit, batch=batch, prefill_s=t, num_output=n)
    unified = unified_rate(fit, batch=batch, prefill_s=t, num_output=n)
    assert split <= MOST_GAIN * unified * (1 + 1e-9)


def test_at_perfect_balance_the_gain_is_the_formula() -> None:
    fit, batch, n = StepFit(0.016, 0.001), 8, 100
    t = n * fit.seconds(batch) / batch  # prefill takes as long as decode does for a request
    ratio = split_rate(fit, batch=batch, prefill_s=t, num_output=n) / unified_rate(
        fit, batch=batch, prefill_s=t, num_output=n
    )
    assert ratio == pytest.approx(1 + n * fit.base_s / (2 * batch * t))
    assert ratio > 1.3


def test_a_slow_link_is_the_least_of_three() -> None:
    fit = StepFit(0.01, 0.0)
    rate = split_rate(fit, batch=8, prefill_s=0.1, num_output=10, request_bytes=1e6, link_bytes_s=2e6)
    assert rate == 2.0
