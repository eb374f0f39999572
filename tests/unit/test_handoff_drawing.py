"""docs/handoff.md shows the tables that the code has."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitserve.errors import ConfigError
from splitserve.transfer.drawing import BEGIN, END, drawing, renewed
from splitserve.transfer.handoff import RECEIVER, SENDER

PAGE = Path(__file__).parents[2] / "docs" / "handoff.md"


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == renewed(page), "run: python -m splitserve.transfer.drawing docs/handoff.md"


def test_every_entry_is_drawn() -> None:
    entries = sum(len(row) for table in (SENDER, RECEIVER) for row in table.values())
    rows = [
        line for line in drawing().splitlines() if line.startswith("| ") and not line.startswith("| state")
    ]
    assert len(rows) == entries


def test_a_page_that_differs_is_noticed_and_one_without_markers_refused() -> None:
    assert renewed(f"a {BEGIN} old {END} b") == f"a {drawing()} b"
    with pytest.raises(ConfigError, match="has no"):
        renewed("no markers here")
