"""Sizes of grids and tiles: the numbers that Triton's own functions give."""

from __future__ import annotations

import triton
from hypothesis import given
from hypothesis import strategies as st

from splitserve.ops.kernels.counts import cdiv, next_power_of_2
from splitserve.ops.kernels.tuned import tuned


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 20))
def test_counts_are_tritons(number: int, size: int) -> None:
    assert cdiv(number, size) == triton.cdiv(number, size)
    assert next_power_of_2(number) == triton.next_power_of_2(number)


def test_tuned_constants_are_the_callers_own() -> None:
    tuned("attend", 90, 3).clear()
    assert tuned("attend", 90, 3)
