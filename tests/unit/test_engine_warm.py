"""Which passes are run before the first request: all within the pages and the chunk budget, late contexts among them."""

from __future__ import annotations

import pytest

from splitserve.engine.warm import LATE, LENGTHS, plans


@pytest.mark.parametrize(
    ("num_pages", "step_tokens"), [(200, 2048), (64, 512), (3, 256), (2, 8192), (1, 512)]
)
@pytest.mark.parametrize("has_slots", [True, False])
def test_passes_fit(num_pages: int, step_tokens: int, *, has_slots: bool) -> None:
    steps = list(plans(page_tokens=64, num_pages=num_pages, has_slots=has_slots, step_tokens=step_tokens))
    for chunks in steps:
        for chunk in chunks:
            assert chunk.num_tokens >= 1
            assert len(chunk.tokens) == chunk.stop - chunk.start
            assert chunk.stop <= len(chunk.pages) * 64
            assert max(chunk.pages) < num_pages
            assert chunk.num_tokens <= step_tokens
            assert (chunk.slot >= 0) is has_slots
    if num_pages == 200:
        lengths = {c.num_tokens for step in steps for c in step if c.start == 0}
        assert {*LENGTHS, 2048} <= lengths
        assert any(c.start >= LATE and c.num_tokens > 1 for step in steps for c in step)
        assert {len(step) for step in steps} == {1, 2, 3, 4, 7, 8}
    if num_pages == 1:
        assert steps == []
