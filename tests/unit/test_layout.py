"""copies(): each live byte of each destination rank is written exactly once, and nothing else, for all TP pairs."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from state_cases import LEGAL_TP, Case, Rank, cases, make_case, perform, rich_specs

from splitserve.errors import ConfigError, ProtocolError
from splitserve.spec import Growth, Kind, StateSpec, Units, group_bytes
from splitserve.transfer.layout import Copies, Link, check_compatible, copies, link_bytes, source_rank


def hand_over(case: Case) -> list[int]:
    """Send every chunk over every link and check the destination bytes; returns the bytes sent by each chunk."""
    expected = [_expected(case, rank) for rank in case.dst]
    writes = [{kind: np.zeros(m.shape, np.int32) for kind, m in rank.memory.items()} for rank in case.dst]
    sent = []
    links = {
        (s, d): Link(case.src[s].card, case.dst[d].card)
        for s in range(len(case.src))
        for d in range(len(case.dst))
    }
    for start, stop, last in case.chunks:
        num_bytes = 0
        for (s, d), link in links.items():
            src, dst = case.src[s], case.dst[d]
            found = link.copies(src.units, dst.units, start=start, stop=stop, last=last)
            assert found.num_bytes == link.num_bytes(start=start, stop=stop, last=last)
            perform(found, src, dst, writes[d])
            num_bytes += found.num_bytes
        sent.append(num_bytes)
    for rank, (content, counts), written in zip(case.dst, expected, writes, strict=True):
        for kind, memory in rank.memory.items():
            np.testing.assert_array_equal(
                written[kind], counts[kind], err_msg=f"{kind} bytes written of {rank.card}"
            )
            np.testing.assert_array_equal(memory, content[kind], err_msg=f"{kind} content of {rank.card}")
    return sent


def _expected(case: Case, rank: Rank) -> tuple[dict[Kind, np.ndarray], dict[Kind, np.ndarray]]:
    """What the rank's memory should hold afterwards, and how often each byte should have been written."""
    before = rank.snapshot()
    for f, index in rank.live(case.start, case.total):
        rank.row(f, index)[:] = case.truth.row(f, index)
    content = rank.snapshot()
    for memory in rank.memory.values():
        memory[:] = 0
    for f, index in rank.live(case.start, case.total):
        rank.row(f, index)[:] += 1
    counts = rank.snapshot()
    for kind, memory in rank.memory.items():
        memory[:] = before[kind]
    return content, counts


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_live_byte_is_written_exactly_once(case: Case) -> None:
    assert sum(hand_over(case)) == group_bytes(case.specs, case.start, case.total, size=len(case.dst))


@pytest.mark.parametrize(("pieces", "src", "dst"), LEGAL_TP)
def test_every_tp_pair(pieces: int, src: int, dst: int) -> None:
    case = make_case(
        rich_specs(pieces), page_tokens=4, tp=(src, dst), start=4, total=15, cuts=[6, 12], seed=7
    )
    sent = hand_over(case)
    assert sum(sent) == group_bytes(case.specs, case.start, case.total, size=len(case.dst))
    assert min(sent) > 0


def test_slot_rows_move_with_the_last_chunk_only() -> None:
    case = make_case(rich_specs(2), page_tokens=4, tp=(1, 1), start=0, total=8, cuts=[4], seed=1)
    kv_and_c4 = 2 * (4 * 64 * 2 + 36)
    window_and_pending = 2 * 5 * 16 * 2 + 3 * 7
    assert hand_over(case) == [kv_and_c4, kv_and_c4 + window_and_pending]


def test_a_row_moves_with_the_chunk_that_completes_it() -> None:
    specs = [StateSpec("c4", 0, Growth.PAGED, 8, tokens_per_row=4, encoding="packed")]
    case = make_case(specs, page_tokens=8, tp=(1, 1), start=0, total=11, cuts=[3, 4, 7], seed=1)
    assert hand_over(case) == [0, 8, 0, 8]


@pytest.mark.parametrize("tp", [(2, 1), (1, 2), (2, 2)])
def test_ring_rows_that_follow_each_other_on_one_side_only(tp: tuple[int, int]) -> None:
    specs = [StateSpec("window", 0, Growth.RING, 8, rows=5, pieces=2)]
    case = make_case(specs, page_tokens=4, tp=tp, start=0, total=9, cuts=[], seed=1)
    assert sum(hand_over(case)) == 5 * 8 * 2


def _one_request(
    pieces: int, *, tp: tuple[int, int], ids: tuple[int, ...]
) -> tuple[list[Rank], list[Rank], int]:
    specs = [StateSpec("kv", layer, Growth.PAGED, 256, pieces=pieces) for layer in range(3)]
    total = 8 * len(ids)
    units = (Units(Kind.PAGE, ids, 0, 0, total),)
    return *([Rank(specs, page_tokens=8, rank=r, size=n, units=units) for r in range(n)] for n in tp), total


def _runs(src: Rank, dst: Rank, total: int) -> Copies:
    return copies(src.card, dst.card, src.units, dst.units, start=0, stop=total, last=True)


def test_contiguous_whole_pages_are_one_run() -> None:
    src, dst, total = _one_request(4, tp=(1, 1), ids=(3, 4, 5, 6))
    found = _runs(src[0], dst[0], total)
    assert len(found) == 1
    assert found.src[0].tolist() == [
        src[0].card.slabs[0].addr + 3 * src[0].layout.page_bytes,
        4 * 3 * 8 * 256 * 4,
        0,
    ]


def test_descending_pages_are_one_run_too() -> None:
    src, dst, total = _one_request(4, tp=(1, 1), ids=(6, 5, 4))
    assert len(_runs(src[0], dst[0], total)) == 1


def test_scattered_pages_are_one_run_each() -> None:
    src, dst, total = _one_request(4, tp=(1, 1), ids=(9, 2, 6))
    assert len(_runs(src[0], dst[0], total)) == 3


def test_pieces_of_one_rank_are_one_run_a_page() -> None:
    src, dst, total = _one_request(4, tp=(1, 2), ids=(3, 4, 5))
    for rank in dst:
        assert len(_runs(src[0], rank, total)) == 3


def test_a_cut_page_is_one_run_a_field() -> None:
    src, dst, total = _one_request(2, tp=(1, 1), ids=(3, 4))
    assert (
        len(copies(src[0].card, dst[0].card, src[0].units, dst[0].units, start=0, stop=total - 1, last=True))
        == 6
    )


def test_replicated_pieces_come_from_the_nearest_source_rank() -> None:
    latent = StateSpec("latent", 0, Growth.PAGED, 64)

    def senders(src_size: int, dst_size: int) -> list[int]:
        return [
            source_rank(latent, 0, src_size=src_size, dst_rank=d, dst_size=dst_size) for d in range(dst_size)
        ]

    assert senders(4, 2) == [0, 2]
    assert senders(2, 4) == [0, 0, 1, 1]
    assert senders(4, 4) == [0, 1, 2, 3]
    assert senders(3, 2) == [0, 1]


def test_a_rank_that_owes_nothing_says_so() -> None:
    specs = [StateSpec("latent", 0, Growth.PAGED, 64)]
    units = (Units(Kind.PAGE, (0,), 0, 0, 8),)
    src = [Rank(specs, page_tokens=8, rank=r, size=2, units=units) for r in range(2)]
    dst = Rank(specs, page_tokens=8, rank=0, size=1, units=units)
    assert [link_bytes(s.card, dst.card, start=0, stop=8, last=True) for s in src] == [512, 0]
    assert len(copies(src[1].card, dst.card, units, units, start=0, stop=8, last=True)) == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"row_bytes": 32}, "row_bytes is 64 on rank0of1 .* and 32 on"),
        ({"encoding": "f16"}, "encoding is bf16 on .* and f16 on"),
        ({"pieces": 4}, "pieces is 2 on .* and 4 on"),
        ({"tokens_per_row": 2}, "tokens_per_row is 1 on .* and 2 on"),
        ({"layer": 9}, "layer 0 exists on rank0of1 .* and not on"),
    ],
)
def test_cards_that_describe_other_rows_are_refused(change: dict[str, object], says: str) -> None:
    spec = StateSpec("kv", 0, Growth.PAGED, 64, pieces=2)
    units = (Units(Kind.PAGE, (0,), 0, 0, 8),)
    mine = Rank([spec], page_tokens=8, rank=0, size=1, units=units)
    theirs = Rank([msgspec.structs.replace(spec, **change)], page_tokens=8, rank=0, size=2, units=units)
    with pytest.raises(ConfigError, match=says):
        check_compatible(mine.card, theirs.card)


def test_cards_of_other_weights_are_refused_though_every_row_has_their_shape() -> None:
    spec = StateSpec("kv", 0, Growth.PAGED, 64, pieces=2)
    rank = Rank([spec], page_tokens=8, rank=0, size=1, units=(Units(Kind.PAGE, (0,), 0, 0, 8),))
    mine, theirs = (msgspec.structs.replace(rank.card, weights=name) for name in ("aa11", "bb22"))
    check_compatible(mine, mine)
    with pytest.raises(ConfigError, match=r"weights differ: .*aa11.*bb22"):
        check_compatible(mine, theirs)


def test_unequal_page_sizes_are_refused_with_both_numbers() -> None:
    spec = StateSpec("kv", 0, Growth.PAGED, 64)
    mine, theirs = (
        Rank([spec], page_tokens=n, rank=0, size=1, units=(Units(Kind.PAGE, (0,), 0, 0, n),)) for n in (8, 16)
    )
    with pytest.raises(ConfigError, match=r"rank0of1 .* has 8, .* has 16"):
        copies(mine.card, theirs.card, mine.units, theirs.units, start=0, stop=8, last=True)


@pytest.mark.parametrize(
    "units",
    [
        (),
        (Units(Kind.PAGE, (0,), 0, 0, 16),),  # one page for two
        (Units(Kind.PAGE, (0, 99), 0, 0, 16),),  # no such page
        (Units(Kind.PAGE, (0, -1), 0, 0, 16),),
        (Units(Kind.PAGE, (0, 1), 1, 8, 24),),  # begins too late
        (Units(Kind.PAGE, (0, 1), 0, 0, 12),),  # does not mean the last tokens
    ],
)
def test_units_that_do_not_cover_the_tokens_are_refused(units: tuple[Units, ...]) -> None:
    src, dst, total = _one_request(2, tp=(1, 1), ids=(0, 1))
    with pytest.raises(ProtocolError):
        copies(src[0].card, dst[0].card, src[0].units, units, start=0, stop=total, last=True)


@pytest.mark.parametrize("ids", [(), (0, 1), (9,), (-1,)])
def test_a_wrong_slot_is_refused(ids: tuple[int, ...]) -> None:
    case = make_case(rich_specs(2), page_tokens=4, tp=(1, 1), start=0, total=8, cuts=[], seed=1)
    (src,), (dst,) = case.src, case.dst
    wrong = (dst.units[0], Units(Kind.SLOT, ids, 0, 0, 8))
    with pytest.raises(ProtocolError, match="slot"):
        copies(src.card, dst.card, src.units, wrong, start=0, stop=8, last=True)


def test_device_of_a_copy_is_the_slabs() -> None:
    src, dst, total = _one_request(2, tp=(1, 1), ids=(0, 1))
    on_gpu = msgspec.structs.replace(
        dst[0].card, slabs=(msgspec.structs.replace(dst[0].card.slabs[0], device=3),)
    )
    found = copies(src[0].card, on_gpu, src[0].units, dst[0].units, start=0, stop=total, last=True)
    assert (found.src[0, 2], found.dst[0, 2]) == (0, 3)
