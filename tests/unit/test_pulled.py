"""Writes that the peer carries out by reading: same promises, over shared memory in one process."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transfer_ends import ROW, End, copies, two_ends

from splitserve.config import TransferConfig
from splitserve.transfer.layout import Copies
from splitserve.transfer.local import SLICE_BYTES
from splitserve.transfer.transport import Broken, Noted, Written

NOTHING = Copies(np.empty((0, 3), np.uint64), np.empty((0, 3), np.uint64))


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    with two_ends(TransferConfig(transport="local", direction="get")) as made:
        yield made


def turn(*ends: End, times: int = 20) -> None:
    for _ in range(times):
        for end in ends:
            end.poll()


def test_bytes_lie_there_before_their_note_and_the_write_ends(ends: tuple[End, End]) -> None:
    source, target = ends
    source.memory.copy_(torch.arange(len(source.memory)) % 251)
    peer = source.transport.connect(target.card)
    first = source.transport.write(peer, copies(source, target, 0, ROW, SLICE_BYTES), b"one")
    while not target.seen:
        target.poll()
        source.poll()
    assert target.seen == [Noted(source.name, b"one")]
    assert torch.equal(target.memory[ROW : ROW + SLICE_BYTES], source.memory[:SLICE_BYTES])
    assert not target.memory[:ROW].any()
    assert not target.memory[ROW + SLICE_BYTES :].any()
    second = source.transport.write(peer, copies(source, target, 0, 0, ROW), b"two")
    third = source.transport.write(peer, NOTHING, b"three")
    turn(*ends)
    assert {e.id for e in source.seen if isinstance(e, Written)} == {first, second, third}
    assert sorted(e.note for e in target.seen if isinstance(e, Noted)) == [b"one", b"three", b"two"]


def test_a_write_that_was_given_up_gets_no_note_even_if_it_is_fetched(ends: tuple[End, End]) -> None:
    source, target = ends
    peer = source.transport.connect(target.card)
    number = source.transport.write(peer, copies(source, target, 0, 0, ROW), b"late")
    source.poll()  # the question leaves
    source.transport.disconnect(peer)
    turn(*ends)
    assert [e for e in source.seen if isinstance(e, Written | Broken)] == [Broken(number, "disconnected")]
    assert target.seen == []
    again = source.transport.connect(target.card)
    source.transport.write(again, copies(source, target, 0, 0, ROW), b"again")
    turn(*ends)
    assert target.seen == [Noted(source.name, b"again")]


@pytest.mark.parametrize("to", [-ROW, SLICE_BYTES + 4 * ROW, SLICE_BYTES + 3 * ROW + 1])
def test_nothing_outside_of_open_memory_is_changed_at_a_peers_word(ends: tuple[End, End], to: int) -> None:
    source, target = ends
    peer = source.transport.connect(target.card)
    number = source.transport.write(peer, copies(source, target, 0, to, ROW), b"no")
    turn(*ends)
    (broken,) = [e for e in source.seen if isinstance(e, Broken)]
    assert broken.id == number
    assert "outside" in broken.error
    assert target.seen == []


def test_who_asks_for_what_it_has_not_opened_breaks_its_own_write(ends: tuple[End, End]) -> None:
    source, target = ends
    peer = source.transport.connect(target.card)
    source.transport.write(peer, copies(source, target, len(source.memory), 0, ROW), b"no")
    turn(*ends)
    assert [type(e) for e in source.seen] == [Broken]


def test_a_dead_source_is_settled_once_nothing_is_read_from_it(ends: tuple[End, End]) -> None:
    source, target = ends
    peer = source.transport.connect(target.card)
    source.transport.write(peer, copies(source, target, 0, 0, ROW), b"x")
    turn(*ends)
    assert not target.transport.settled(source.card)  # it is still connected
    source.transport.close()
    turn(target)
    assert target.transport.settled(source.card)


def test_sides_that_do_not_agree_do_not_meet(ends: tuple[End, End]) -> None:
    assert {end.card.transport for end in ends} == {"local+get"}
