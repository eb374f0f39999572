"""How long a rank that leads nobody may sleep: what its peers write here wakes it by nothing but its own look."""

from __future__ import annotations

import pytest

from splitserve.engine.follower import ARRIVAL_S, IDLE_S, PORT_POLL_S, patience


class Moving:
    def __init__(self, own_writes: bool) -> None:
        self.own_writes = own_writes

    def moving(self) -> bool:
        return self.own_writes


@pytest.mark.parametrize(
    ("port", "most"),
    [(None, IDLE_S), (Moving(True), PORT_POLL_S), (Moving(False), ARRIVAL_S)],
)
def test_a_rank_looks_for_arrivals_though_nothing_of_its_own_moves(port: Moving | None, most: float) -> None:
    """Half a second of sleep was once half a second and more of every lone prompt's time at TP 2 and above."""
    assert patience(port) == most  # type: ignore[arg-type]
    assert ARRIVAL_S <= 0.01
