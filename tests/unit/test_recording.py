"""Which sizes a group has recorded: those that memory sufficed for on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from splitserve.dist.group import SoloGroup
from splitserve.engine.recording import record_sizes

CPU = torch.device("cpu")


class Pair(SoloGroup):
    """Rank 0 of two; the other has recorded `there`."""

    size = 2

    def __init__(self, there: list[float]) -> None:
        self.there = there

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat((x, torch.tensor([self.there])), dim)


def run(tp: SoloGroup, *, too_large: int = 1 << 30) -> tuple[list[int], list[int], list[float]]:
    """Sizes in the order in which they were tried, those that are left, and the progress that was told."""
    tried: list[int] = []
    told: list[float] = []

    def record(size: int, pool: Any, stream: Any) -> str:
        assert pool is None
        assert stream is None
        tried.append(size)
        if size >= too_large:
            raise torch.cuda.OutOfMemoryError("not enough")
        return f"pass of {size}"

    found = record_sizes((1, 2, 4), record, device=CPU, tp=tp, what="tokens", progress=told.append)
    assert all(value == f"pass of {size}" for size, value in found.sizes.items())
    assert found.seconds >= 0
    return tried, sorted(found.sizes), told


def test_the_largest_first_and_all_of_them() -> None:
    assert run(SoloGroup()) == ([4, 2, 1], [1, 2, 4], pytest.approx([1 / 3, 2 / 3, 1]))


def test_sizes_that_do_not_fit_are_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    assert run(SoloGroup(), too_large=2)[1] == [1]
    assert "no graph for 4 tokens" in caplog.text


def test_what_another_rank_lacks_nobody_uses(caplog: pytest.LogCaptureFixture) -> None:
    """Or one rank would sum a pass of four rows and the other one of two."""
    assert run(Pair([1.0, 1.0, 0.0]))[1] == [1, 2]
    assert "[4]" in caplog.text
    assert run(Pair([1.0, 0.0, 1.0]), too_large=4)[1] == [1]
