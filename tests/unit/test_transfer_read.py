"""Reads of a peer's memory over the transport that needs nothing but Linux: the bytes, their end, what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transfer_ends import ROW, End, copies, two_ends

from splitserve.config import TransferConfig
from splitserve.errors import TransferError
from splitserve.transfer.faults import Faults
from splitserve.transfer.local import SLICE_BYTES
from splitserve.transfer.paced import Paced
from splitserve.transfer.transport import Transport, TransportEvent, Written


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    with two_ends(TransferConfig(transport="local")) as made:
        yield made


def until_written(transport: Transport, number: int) -> int:
    """Polls until that one has ended."""
    for polls in range(1, 100):
        events: list[TransportEvent] = transport.poll()
        if Written(number) in events:
            return polls
    raise AssertionError("it never ended")


def test_what_is_read_is_what_lies_there_and_nothing_else_changes(ends: tuple[End, End]) -> None:
    source, target = ends
    source.memory.copy_(torch.arange(len(source.memory)) % 251)
    peer = target.transport.connect(source.card)
    number = target.transport.read(peer, copies(source, target, ROW, 2 * ROW, ROW))
    until_written(target.transport, number)
    assert torch.equal(target.memory[2 * ROW : 3 * ROW], source.memory[ROW : 2 * ROW])
    assert not target.memory[: 2 * ROW].any()
    assert not target.memory[3 * ROW :].any()


def test_a_long_read_takes_several_polls_and_a_pace_between_keeps_its_number(ends: tuple[End, End]) -> None:
    source, target = ends
    source.memory.fill_(7)
    paced = Paced(target.transport, Faults())
    peer = paced.connect(source.card)
    number = paced.read(peer, copies(source, target, 0, 0, SLICE_BYTES + ROW))
    assert until_written(paced, number) > 1
    assert int(target.memory[: SLICE_BYTES + ROW].min()) == 7


def test_memory_that_a_peer_has_not_opened_cannot_be_read(ends: tuple[End, End]) -> None:
    source, target = ends
    peer = target.transport.connect(source.card)
    with pytest.raises(TransferError, match="has not registered"):
        target.transport.read(peer, copies(source, target, len(source.memory), 0, ROW))
    with pytest.raises(TransferError, match="is not connected"):
        target.transport.read("nobody", copies(source, target, 0, 0, ROW))
