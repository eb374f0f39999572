"""Which passes are run before the first request: all within the pages and the chunk budget, late contexts among them."""

from __future__ import annotations

import pytest

from splitserve.engine.warm import LATE, LENGTHS, doublings, plans


@pytest.mark.parametrize(
    ("num_pages", "step_tokens"), [(200, 2048), (64, 512), (3, 256), (2, 8192), (1, 512)]
)
@pytest.mark.parametrize("has_slots", [True, False])
def test_passes_fit(num_pages: int, step_tokens: int, *, has_slots: bool) -> None:
    steps = list(
        plans(
            page_tokens=64,
            num_pages=num_pages,
            max_len=8000,
            has_slots=has_slots,
            step_tokens=step_tokens,
        )
    )
    for chunks in steps:
        for chunk in chunks:
            assert chunk.num_tokens >= 1
            assert len(chunk.tokens) == chunk.stop - chunk.start
            assert chunk.stop <= len(chunk.pages) * 64
            assert chunk.stop <= 8000
            assert max(chunk.pages) < num_pages
            assert chunk.num_tokens <= step_tokens
            assert (chunk.slot >= 0) is has_slots
    if num_pages == 200:
        lengths = {c.num_tokens for step in steps for c in step if c.start == 0}
        assert {*LENGTHS, 2048} <= lengths
        assert any(c.start >= LATE and c.num_tokens > 1 for step in steps for c in step)
        depths = {len(chunk.pages) for step in steps for chunk in step if chunk.start}
        assert {2, 3, 5, 9, 17, 33, 65} <= depths  # one page more than each power of two
        assert {len(step) for step in steps} == {1, 2, 3, 4, 7, 8}
    if num_pages == 1:
        assert steps == []


def test_doublings_end_with_the_most() -> None:
    assert [doublings(n) for n in (-1, 0, 1, 2, 6)] == [[], [], [1], [1, 2], [1, 2, 4, 6]]
