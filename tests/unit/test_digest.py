"""Digests: equal on both sides for equal rows at any TP pair, different for every planted fault; numpy equals torch."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from state_cases import Case, Rank, cases, make_case, perform, rich_specs

from splitserve.errors import InvariantError
from splitserve.ops.ref import digest as in_torch
from splitserve.spec import Field, Growth, Kind, StateSpec, Units
from splitserve.transfer import digest as in_numpy
from splitserve.transfer.layout import Link

MASK = (1 << 64) - 1


def _of(
    rank: Rank, start: int, stop: int, *, last: bool = True, fields: tuple[Field, ...] | None = None
) -> int:
    fields = rank.card.fields if fields is None else fields
    return in_numpy.digest(fields, rank.memory, rank.units, start=start, stop=stop, last=last)


def _in_plain_python(rank: Rank, start: int, stop: int, last: bool) -> int:
    """The definition, a word at a time."""

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
        return x ^ x >> 31

    golden, total = 0x9E3779B97F4A7C15, 0
    for f, index in rank.live(start, stop, last):
        raw = rank.row(f, index).tobytes()
        raw += bytes(-len(raw) % 8)
        sums = in_numpy.field_key(f) + golden * index
        for c in range(len(raw) // 8):
            word = int.from_bytes(raw[8 * c : 8 * c + 8], "little")
            sums += (word ^ word >> 32) * (mix((c + 1) * golden & MASK) | 1)
        total += mix(sums & MASK)
    return total & MASK


@settings(max_examples=60, deadline=None)
@given(cases(), st.booleans())
def test_numpy_torch_and_the_definition_agree(case: Case, last: bool) -> None:
    for rank in [case.src[-1], case.dst[-1]]:
        args = {"start": case.start, "stop": case.total, "last": last}
        tensors = {kind: torch.from_numpy(memory) for kind, memory in rank.memory.items()}
        expected = _in_plain_python(rank, case.start, case.total, last)
        assert in_numpy.digest(rank.card.fields, rank.memory, rank.units, **args) == expected
        assert in_torch.digest(rank.card.fields, tensors, rank.units, **args) == expected
        one_by_one = (
            in_torch.field_digests(rank.card.fields, tensors, rank.units, **args).numpy().view(np.uint64)
        )
        np.testing.assert_array_equal(
            in_numpy.field_digests(rank.card.fields, rank.memory, rank.units, **args), one_by_one
        )


@settings(max_examples=60, deadline=None)
@given(cases())
def test_what_was_sent_adds_up_to_what_arrived(case: Case) -> None:
    """Per link and summed over everything, at unequal TP and any chunking."""
    grand_total = 0
    for s, src in enumerate(case.src):
        for dst in case.dst:
            link = Link(src.card, dst.card)
            noted = 0
            for start, stop, last in case.chunks:
                noted += _of(src, start, stop, last=last, fields=link.src_fields)
                perform(link.copies(src.units, dst.units, start=start, stop=stop, last=last), src, dst)
            arrived = _of(dst, case.start, case.total, fields=link.dst_fields)
            assert noted & MASK == arrived, f"link from rank {s} to {dst.card.tp_rank}"
            grand_total += noted
    assert grand_total & MASK == sum(_of(dst, case.start, case.total) for dst in case.dst) & MASK


def test_digests_of_fields_can_be_taken_before_the_destination_is_known() -> None:
    case = make_case(rich_specs(4), page_tokens=4, tp=(2, 4), start=0, total=15, cuts=[], seed=3)
    for src in case.src:
        each = in_numpy.field_digests(src.card.fields, src.memory, src.units, start=0, stop=15, last=True)
        for dst in case.dst:
            link = Link(src.card, dst.card)
            expected = _of(src, 0, 15, fields=link.src_fields)
            assert int(each[link.src_index].sum(dtype=np.uint64)) == expected


# ------------------------------------------------------------------ planted faults

TOTAL = 22


def _received() -> Rank:
    """A destination that holds the right rows: 2 layers and 4 heads of kv, a replicated c4, ring and slot state."""
    case = make_case(rich_specs(4), page_tokens=4, tp=(1, 1), start=0, total=TOTAL, cuts=[], seed=11)
    perform(
        Link(case.src[0].card, case.dst[0].card).copies(
            case.src[0].units, case.dst[0].units, start=0, stop=TOTAL, last=True
        ),
        case.src[0],
        case.dst[0],
    )
    assert _of(case.dst[0], 0, TOTAL) == _of(case.src[0], 0, TOTAL)
    return case.dst[0]


def _field(rank: Rank, name: str, layer: int, piece: int) -> Field:
    (found,) = (f for f in rank.card.fields if (f.spec.name, f.spec.layer, f.piece) == (name, layer, piece))
    return found


def _swap(rank: Rank, a: tuple[Field, int], b: tuple[Field, int]) -> None:
    first, second = rank.row(*a), rank.row(*b)
    first[:], second[:] = second.copy(), first.copy()


def _swap_heads(rank: Rank) -> None:
    a, b = _field(rank, "kv", 0, 1), _field(rank, "kv", 0, 2)
    for index in range(TOTAL):
        _swap(rank, (a, index), (b, index))


def _swap_heads_of_one_row(rank: Rank) -> None:
    _swap(rank, (_field(rank, "kv", 1, 0), 5), (_field(rank, "kv", 1, 3), 5))


def _swap_layers(rank: Rank) -> None:
    for index in range(TOTAL):
        _swap(rank, (_field(rank, "kv", 0, 0), index), (_field(rank, "kv", 1, 0), index))


def _swap_rows(rank: Rank) -> None:
    f = _field(rank, "kv", 0, 0)
    _swap(rank, (f, 6), (f, 7))


def _swap_pages(rank: Rank) -> None:
    (pages,) = (u for u in rank.units if u.kind is Kind.PAGE)
    memory = rank.memory[Kind.PAGE]
    memory[list(pages.ids[1:3])] = memory[[pages.ids[2], pages.ids[1]]]


def _stale_page(rank: Rank) -> None:
    rank.memory[Kind.PAGE][rank.units[0].ids[2]] = np.random.default_rng(5).integers(
        0, 256, rank.layout.page_bytes, np.uint8
    )


def _page_of_zeros(rank: Rank) -> None:
    rank.memory[Kind.PAGE][rank.units[0].ids[2]] = 0


def _page_twice(rank: Rank) -> None:
    ids = rank.units[0].ids
    rank.memory[Kind.PAGE][ids[3]] = rank.memory[Kind.PAGE][ids[2]]


def _shift_rows(rank: Rank) -> None:
    f = _field(rank, "kv", 1, 2)
    rows = [rank.row(f, index).copy() for index in range(TOTAL)]
    for index in range(TOTAL):
        rank.row(f, index)[:] = rows[(index + 1) % TOTAL]


def _missing_layer(rank: Rank) -> None:
    for index in range(TOTAL):
        rank.row(_field(rank, "kv", 1, 0), index)[:] = 0


def _rotate_within_a_row(rank: Rank) -> None:
    row = rank.row(_field(rank, "kv", 0, 0), 9)
    row[:] = np.roll(row, 8)


def _negate_two_elements(rank: Rank) -> None:
    """The highest bits of two words: a plain weighted sum modulo 2^64 would not see it."""
    row = rank.row(_field(rank, "kv", 0, 0), 9)
    row[7] ^= 0x80
    row[15] ^= 0x80


def _swap_ring_rows(rank: Rank) -> None:
    f = _field(rank, "window", 0, 3)
    _swap(rank, (f, 0), (f, 4))


def _lose_slot_state(rank: Rank) -> None:
    rank.row(_field(rank, "pending", 0, 0), 2)[:] = 0


FAULTS = [
    _swap_heads,
    _swap_heads_of_one_row,
    _swap_layers,
    _swap_rows,
    _swap_pages,
    _stale_page,
    _page_of_zeros,
    _page_twice,
    _shift_rows,
    _missing_layer,
    _rotate_within_a_row,
    _negate_two_elements,
    _swap_ring_rows,
    _lose_slot_state,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
def test_planted_faults_are_seen(fault: Callable[[Rank], None]) -> None:
    rank = _received()
    before = _of(rank, 0, TOTAL)
    fault(rank)
    assert _of(rank, 0, TOTAL) != before


def test_every_single_bit_counts() -> None:
    rank = _received()
    for f, index in random.Random(0).sample(list(rank.live(0, TOTAL)), 12):
        before = _of(rank, 0, TOTAL, fields=(f,))
        row = rank.row(f, index)
        for bit in range(8 * len(row)):
            row[bit // 8] ^= 1 << bit % 8
            assert _of(rank, 0, TOTAL, fields=(f,)) != before
            row[bit // 8] ^= 1 << bit % 8
        assert _of(rank, 0, TOTAL, fields=(f,)) == before


def test_bytes_that_are_no_live_rows_do_not_count() -> None:
    rank = _received()
    before, memory_before = _of(rank, 0, TOTAL), rank.snapshot()
    contents = [(f, index, rank.row(f, index).copy()) for f, index in rank.live(0, TOTAL)]
    for memory in rank.memory.values():
        memory[:] = np.random.default_rng(1).integers(0, 256, memory.shape, np.uint8)
    for f, index, row in contents:
        rank.row(f, index)[:] = row
    assert all((memory != memory_before[kind]).any() for kind, memory in rank.memory.items())
    assert _of(rank, 0, TOTAL) == before


def test_no_rows_have_digest_zero() -> None:
    rank = _received()
    assert _of(rank, 4, 4, last=False) == 0
    assert _of(rank, 0, TOTAL, fields=()) == 0
    assert in_torch.field_digests((), {}, (), start=0, stop=4, last=True).shape == (0,)


def test_host_memory_sees_slabs_by_address() -> None:
    rank = _received()
    views = in_numpy.host_memory(rank.card.slabs)
    for kind, memory in rank.memory.items():
        np.testing.assert_array_equal(views[kind], memory)
    rank.memory[Kind.PAGE][0, 0] ^= 1
    assert views[Kind.PAGE][0, 0] == rank.memory[Kind.PAGE][0, 0]


@pytest.mark.parametrize("ids", [(0,), (0, 77)])
def test_units_that_leave_rows_out_are_an_error(ids: tuple[int, ...]) -> None:
    units = (Units(Kind.PAGE, (0, 1), 0, 0, 8),)
    rank = Rank([StateSpec("kv", 0, Growth.PAGED, 8)], page_tokens=4, rank=0, size=1, units=units)
    with pytest.raises(InvariantError, match="units"):
        in_numpy.digest(
            rank.card.fields, rank.memory, (Units(Kind.PAGE, ids, 0, 0, 8),), start=0, stop=8, last=True
        )


@pytest.mark.parametrize(
    ("num_layers", "page_tokens", "row_bytes"), [(40, 256, 64), (3, 16, 64), (1, 64, 8192), (2, 8, 20)]
)
def test_requests_larger_than_the_scratch(num_layers: int, page_tokens: int, row_bytes: int) -> None:
    """Many fields to a unit, many units at once, one unit larger than the scratch, rows of bytes: as torch has it."""
    specs = [StateSpec("kv", layer, Growth.PAGED, row_bytes, pieces=2) for layer in range(num_layers)]
    total = 1 + 3 * in_numpy.SCRATCH_BYTES // (2 * num_layers * row_bytes)
    ids = tuple(int(i) for i in np.random.default_rng(0).permutation(-(-total // page_tokens)))
    rank = Rank(specs, page_tokens=page_tokens, rank=0, size=1, units=(Units(Kind.PAGE, ids, 0, 0, total),))
    tensors = {kind: torch.from_numpy(memory) for kind, memory in rank.memory.items()}
    expected = in_torch.digest(rank.card.fields, tensors, rank.units, start=3, stop=total, last=True)
    assert _of(rank, 3, total) == expected
