"""The ledger against a naive count: any order, any duplicates, any loss."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.errors import ProtocolError
from splitserve.transfer.ledger import Ledger, Pair
from splitserve.wire import FirstToken, Note

Sizes = dict[Pair, list[int]]
"""link -> bytes of its chunks"""

links = st.tuples(st.integers(0, 3), st.integers(0, 3))
handoffs = st.integers(1, 4).flatmap(  # every link is noted for every chunk
    lambda n: st.dictionaries(
        links, st.lists(st.integers(0, 1000), min_size=n, max_size=n), min_size=1, max_size=5
    )
)


def notes_of(sizes: Sizes) -> list[tuple[int, Note]]:
    """(destination rank, note) of every write of a handoff."""
    first_link = min(sizes)
    return [
        (
            dst,
            Note(
                7,
                1,
                src,
                c,
                n,
                c == len(all_) - 1,
                n * 2**60 + c,
                True,
                FirstToken(5) if (src, dst) == first_link else None,
            ),
        )
        for (src, dst), all_ in sizes.items()
        for c, n in enumerate(all_)
    ]


@given(handoffs, st.data())
def test_complete_exactly_when_every_chunk_of_every_link_is_in(sizes: Sizes, data: st.DataObject) -> None:
    notes = notes_of(sizes)
    order = data.draw(st.permutations([*notes, *data.draw(st.lists(st.sampled_from(notes), max_size=3))]))
    kept = order[: data.draw(st.integers(0, len(order)))]
    ledger = Ledger()
    early = data.draw(st.booleans())
    if early:
        ledger.expect({link: sum(c) for link, c in sizes.items()})
    for dst, note in kept:
        ledger.add(dst, note)
    if not early:
        assert not ledger.all_noted()
        ledger.expect({link: sum(c) for link, c in sizes.items()})
    distinct = {(dst, n.src_rank, n.chunk): n for dst, n in kept}
    assert ledger.all_noted() == (len(distinct) == len(notes))
    assert ledger.wrong() is None or not ledger.all_noted()
    assert ledger.num_bytes == sum(n.bytes for n in distinct.values())
    assert ledger.num_duplicates == len(kept) - len(distinct)
    if ledger.all_noted():
        assert ledger.gaps() == {}
        assert ledger.first == FirstToken(5)
        for src, dst in sizes:
            said = sum(n.digest for d, n in notes if (n.src_rank, d) == (src, dst)) % 2**64
            assert ledger.compared((src, dst), said)
            assert not ledger.compared((src, dst), said ^ 1)
        assert ledger.all_compared()


@given(handoffs, st.data())
def test_wrong_bytes_on_a_whole_link_are_never_accepted(sizes: Sizes, data: st.DataObject) -> None:
    link = data.draw(st.sampled_from(sorted(sizes)))
    ledger = Ledger()
    off = data.draw(st.integers(-5, 5).filter(bool))
    ledger.expect({k: sum(c) + (off if k == link else 0) for k, c in sizes.items()})
    for dst, note in notes_of(sizes):
        ledger.add(dst, note)
    assert f"source rank {link[0]} wrote" in (ledger.wrong() or "")


def test_a_note_on_a_link_that_owes_nothing_is_wrong_and_never_complete() -> None:
    ledger = Ledger()
    ledger.expect({(0, 0): 5})
    ledger.add(0, Note(7, 1, 0, 0, 5, True, first=FirstToken(1)))
    assert ledger.all_noted()
    ledger.add(0, Note(7, 1, 3, 0, 5, True))
    assert not ledger.all_noted()
    assert "owes nothing" in (ledger.wrong() or "")


def test_contradictions_raise() -> None:
    ledger = Ledger()
    note = Note(7, 1, 0, 1, 5, True)
    assert ledger.add(0, note)
    assert not ledger.add(0, note)
    for other in (
        msgspec.structs.replace(note, bytes=6),  # the same chunk, differently
        msgspec.structs.replace(note, chunk=2, last=False),  # a chunk after the last
        msgspec.structs.replace(note, chunk=0, last=True),  # a second last
    ):
        with pytest.raises(ProtocolError):
            ledger.add(0, other)


def test_gaps_are_seen_once_some_last_note_is_in() -> None:
    ledger = Ledger()
    ledger.expect({(0, 0): 10, (1, 0): 10})
    ledger.add(0, Note(7, 1, 0, 0, 5, False))
    assert ledger.gaps() == {}
    ledger.add(0, Note(7, 1, 1, 1, 5, True))
    assert ledger.gaps() == {(0, 0): [1], (1, 0): [0]}
    ledger.add(0, Note(7, 1, 0, 1, 5, True))
    ledger.add(0, Note(7, 1, 1, 0, 5, False))
    assert ledger.gaps() == {}
    assert ledger.wrong() == "the last note carried no first token"
