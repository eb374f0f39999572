"""The layout of units: fields do not overlap, pieces are evenly spaced, and chunks partition the live rows."""

from __future__ import annotations

from itertools import pairwise
from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st
from state_cases import LEGAL_TP, rich_specs, spec_lists

from splitserve.errors import ConfigError
from splitserve.spec import (
    ALIGN,
    Growth,
    StateSpec,
    bytes_per_token,
    field_key,
    lay_out,
    live_bytes,
    local_pieces,
    owned_pieces,
)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[StateSpec], int, int, int]:
    pieces, size, _ = draw(st.sampled_from(LEGAL_TP))
    return draw(spec_lists(pieces)), 4 * draw(st.integers(1, 3)), draw(st.integers(0, size - 1)), size


@given(layouts())
def test_fields_lie_inside_their_unit_and_do_not_overlap(
    drawn: tuple[list[StateSpec], int, int, int],
) -> None:
    specs, page_tokens, rank, size = drawn
    layout = lay_out(specs, page_tokens=page_tokens, rank=rank, size=size)
    for fields, unit_bytes in (
        (layout.page_fields, layout.page_bytes),
        (layout.slot_fields, layout.slot_bytes),
    ):
        taken = bytearray(unit_bytes)
        for f in fields:
            for row in range(f.rows_per_unit):
                at = f.offset + row * f.row_stride
                assert at + f.spec.row_bytes <= unit_bytes
                assert not any(taken[at : at + f.spec.row_bytes])
                taken[at : at + f.spec.row_bytes] = b"\1" * f.spec.row_bytes
        for f in fields:  # in every unit, since units lie side by side
            assert unit_bytes % gcd(f.spec.row_bytes, ALIGN) == f.offset % gcd(f.spec.row_bytes, ALIGN) == 0
    assert {(f.spec, f.piece) for f in layout.page_fields + layout.slot_fields} == {
        (s, p) for s in specs for p in owned_pieces(s, rank, size)
    }


@given(layouts())
def test_pieces_of_a_spec_are_evenly_spaced(drawn: tuple[list[StateSpec], int, int, int]) -> None:
    """What lets kv/pool.py make one strided view of a spec, replicated specs beside it or not."""
    specs, page_tokens, rank, size = drawn
    layout = lay_out(specs, page_tokens=page_tokens, rank=rank, size=size)
    for spec in specs:
        offsets = [f.offset for f in layout.page_fields + layout.slot_fields if f.spec == spec]
        assert len({b - a for a, b in pairwise(offsets)}) <= 1


def test_a_piece_of_a_page_is_one_run() -> None:
    specs = [StateSpec("kv", layer, Growth.PAGED, 584, pieces=2) for layer in range(3)]
    layout = lay_out(specs, page_tokens=16)
    for piece in (0, 1):
        of_piece = [f for f in layout.page_fields if f.piece == piece]
        assert [f.offset - of_piece[0].offset for f in of_piece] == [0, 16 * 584, 2 * 16 * 584]


def test_whole_pages_of_packed_rows_are_one_run() -> None:
    """Nothing lies between two pages that a handoff would have to step over: rows of 584 and 132 bytes, as V4's."""
    specs = [StateSpec("kv", layer, Growth.PAGED, 584) for layer in range(3)]
    specs += [StateSpec("index", layer, Growth.PAGED, 132) for layer in range(3)]
    layout = lay_out(specs, page_tokens=16)
    assert layout.page_bytes == 16 * 3 * (584 + 132)


def test_layouts_of_all_ranks_hold_every_piece() -> None:
    for pieces, size, _ in LEGAL_TP:
        held = [p for rank in range(size) for p in local_pieces(pieces, rank, size)]
        assert sorted(set(held)) == list(range(pieces))
        assert len(held) == max(size, pieces)


def test_tp_that_does_not_fit_the_pieces_is_refused() -> None:
    with pytest.raises(ConfigError, match="tp=2 and 3 state pieces") as refused:
        local_pieces(3, 0, 2)
    assert refused.value.field == "tp"
    with pytest.raises(ConfigError, match="tp=4 and 6"):
        lay_out([StateSpec("kv", 0, Growth.PAGED, 64, pieces=6)], page_tokens=8, rank=0, size=4)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (StateSpec("c4", 0, Growth.PAGED, 64, tokens_per_row=3), "page_tokens=8 is not a multiple of 3"),
        (StateSpec("kv", 0, Growth.PAGED, 0), "row_bytes=0"),
        (StateSpec("kv", 0, Growth.PAGED, 8, pieces=0), "pieces=0"),
        (StateSpec("kv", 0, Growth.PAGED, 6, encoding="f32"), "6 bytes are no whole number of f32"),
        (StateSpec("w", 0, Growth.RING, 64), "needs rows >= 1"),
    ],
)
def test_specs_that_describe_nothing_sensible_are_refused(spec: StateSpec, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        lay_out([spec], page_tokens=8)


def test_a_state_declared_twice_is_refused() -> None:
    spec = StateSpec("kv", 3, Growth.PAGED, 64)
    with pytest.raises(ConfigError, match="'kv' of layer 3 is declared twice"):
        lay_out([spec, spec], page_tokens=8)


@given(st.sampled_from([1, 2, 4, 128]), st.lists(st.integers(0, 300), min_size=2, max_size=6))
def test_chunks_partition_the_paged_rows(tokens_per_row: int, borders: list[int]) -> None:
    spec = StateSpec("c", 0, Growth.PAGED, 8, tokens_per_row=tokens_per_row)
    borders.sort()
    rows = [row for a, b in pairwise(borders) for row in spec.live_rows(a, b, False)]
    assert rows == list(spec.live_rows(borders[0], borders[-1], True))
    for row in rows:
        assert borders[0] <= (row + 1) * tokens_per_row - 1 < borders[-1]


def test_ring_and_slot_rows_are_live_at_the_end_only() -> None:
    ring, slot = StateSpec("w", 0, Growth.RING, 8, rows=5), StateSpec("p", 0, Growth.SLOT, 8, rows=3)
    assert [len(ring.live_rows(0, stop, True)) for stop in (1, 5, 9)] == [1, 5, 5]
    assert [len(s.live_rows(0, 9, False)) for s in (ring, slot)] == [0, 0]
    assert len(slot.live_rows(0, 1, True)) == 3


def test_live_bytes_by_hand() -> None:
    specs = rich_specs(4)
    kv, c4, window, pending = 64 * 4 * 2, 36 * 2, 16 * 4 * 2, 7 * 3
    assert live_bytes(specs, 0, 10) == 10 * kv + 2 * c4 + 5 * window + pending
    assert live_bytes(specs, 8, 10, last=False) == 2 * kv
    assert live_bytes(specs, 0, 10, {"kv": 1, "window": 1}) == (10 * kv + 5 * window) // 4 + 2 * c4 + pending
    assert bytes_per_token(specs) == kv + c4 / 4
    assert bytes_per_token(specs, rank=1, size=4) == kv / 4 + c4 / 4


def test_field_keys_tell_states_layers_and_pieces_apart() -> None:
    layout = lay_out(rich_specs(8), page_tokens=8)
    fields = layout.page_fields + layout.slot_fields
    assert len({field_key(f) for f in fields}) == len(fields)
    assert field_key(fields[0]) == field_key(
        lay_out(rich_specs(8), page_tokens=16, rank=0, size=8).page_fields[0]
    )
