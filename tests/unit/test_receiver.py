"""Receiver, with a real Sender at the other end: unequal ranks, planted faults, time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from transfer_pair import SLOTTED, SPECS, TransferPair

from splitserve.errors import ProtocolError, RequestError
from splitserve.spec import Kind
from splitserve.transfer.faults import FAULTS, Faults
from splitserve.wire import Room

TOKENS = 30  # seven whole pages of 4 and half of another


@pytest.fixture
def pair() -> Iterator[TransferPair]:
    made = TransferPair()
    yield made
    made.close()


def send(pair: TransferPair, room: int, *, start: int = 0, chunk: int = 10) -> None:
    pair.open(room, TOKENS)
    pair.ask(room, TOKENS, start=start)
    for begin in range(0, TOKENS, chunk):
        stop = min(begin + chunk, TOKENS)
        pair.compute(room, begin, stop, last=stop == TOKENS)


@pytest.mark.parametrize(("src", "dst"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (2, 4), (8, 4), (1, 8)])
@pytest.mark.parametrize("specs", [SPECS, SLOTTED], ids=["pages", "pages and a slot"])
def test_arrives_complete_between_any_numbers_of_ranks(src: int, dst: int, specs: Any) -> None:
    pair = TransferPair(src=src, dst=dst, specs=specs)
    try:
        send(pair, 1)
        pair.run(pair.over)
        assert pair.kinds(pair.received, 1) == ["Arrived"]
        assert pair.kinds(pair.sent, 1) == ["Sent", "Released"]
        arrived = pair.received[0]
        assert (arrived.first.token, arrived.digest_checked) == (9, True)
        record = pair.receiver.records()[-1]
        assert record["bytes"] == record["expected_bytes"] == arrived.num_bytes
        assert record["digests"], "nothing was compared"
        assert all(d["prefill"] == d["decode"] for d in record["digests"])
    finally:
        pair.close()


@pytest.mark.parametrize("start", [4, 8, 12, 28])
def test_only_what_decode_lacks_is_sent_even_when_it_begins_inside_a_chunk(
    pair: TransferPair, start: int
) -> None:
    send(pair, 1, start=start)
    pair.run(pair.over)
    assert pair.kinds(pair.received, 1) == ["Arrived"]
    row = sum(s.row_bytes * s.pieces for s in SPECS)
    assert pair.received[0].num_bytes == (TOKENS - start) * row
    assert pair.received[0].digest_checked
    assert not pair.decode.memory[0][Kind.PAGE][16 : 16 + start // 4].any()


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_caught(fault: str) -> None:
    faults = Faults()
    pair = TransferPair(faults=faults)
    try:
        faults.plant(fault)
        send(pair, 1)
        pair.run(pair.got("Released", 1), step_s=0.01)
        pair.run(pair.over, step_s=0.01)
        assert pair.kinds(pair.received, 1) == ["ReceiveFailed", "Released"]
        assert (pair.received[0].code, pair.received[0].retriable) == ("transfer_failed", True)
        assert faults.check() == {}
        send(pair, 2)  # a healthy one
        pair.run(pair.over)
        assert pair.kinds(pair.received, 2) == ["Arrived"]
    finally:
        pair.close()


def test_a_page_overwritten_while_it_is_held_is_caught(pair: TransferPair) -> None:
    pair.open(1, TOKENS)
    pair.compute(1, 0, TOKENS, last=True)
    pair.prefill.memory[0][Kind.PAGE][3, 100] ^= 1  # another request's token, too early
    pair.ask(1, TOKENS)
    pair.run(pair.over)
    assert pair.kinds(pair.received, 1) == ["ReceiveFailed", "Released"]
    assert "digest" in pair.received[0].message


def test_digests_stop_after_the_warm_up_and_go_on_for_a_share() -> None:
    pair = TransferPair(digest_warmup=2, digest_rate=0.25)
    try:
        for room in range(1, 61):
            send(pair, room, chunk=TOKENS)
            pair.run(pair.over)
        checked = [e.digest_checked for e in pair.received]
        assert checked[:2] == [True, True]
        assert 5 <= sum(checked[2:]) <= 25  # 58 rooms, a quarter of them
    finally:
        pair.close()


def test_rooms_are_checked_before_anything_is_sent(pair: TransferPair) -> None:
    for room, field in [
        (Room(1, "evil.example", 80), "bootstrap_host"),
        (Room(1, "127.0.0.1", 0), "bootstrap_port"),
        (Room(1, "127.0.0.1", 70_000), "bootstrap_port"),
    ]:
        with pytest.raises(RequestError) as e:
            pair.receiver.admit(room)
        assert e.value.field == field
    pair.ask(1, TOKENS)
    with pytest.raises(RequestError) as e:
        pair.ask(1, TOKENS)
    assert e.value.field == "bootstrap_room"
    with pytest.raises(ProtocolError):
        pair.ask(2, TOKENS, start=TOKENS)


def test_nobody_at_the_door_fails_after_a_silence_and_gives_rows_back_at_once(pair: TransferPair) -> None:
    pair.sender.close()  # the port is free again, and nobody listens
    pair.ask(1, TOKENS)
    begin = pair.now
    while not pair.received:
        pair.poll(prefill=False)
        pair.now += 0.1
        assert pair.now < begin + 20
    assert pair.kinds(pair.received, 1) == ["ReceiveFailed", "Released"]
    assert (pair.received[0].code, pair.received[0].retriable) == ("peer_lost", True)
    assert pair.now - begin == pytest.approx(pair.config.silence_s, abs=0.3)
    pair.poll(prefill=False)
    assert pair.receiver.fds() == []  # the door is forgotten


def test_the_other_half_never_comes(pair: TransferPair) -> None:
    pair.ask(1, TOKENS, deadline=3.0)
    pair.run(pair.got("Released", 1), step_s=0.02)
    assert pair.kinds(pair.received, 1) == ["ReceiveFailed", "Released"]
    assert (pair.received[0].code, pair.received[0].retriable) == ("deadline_exceeded", False)


def test_cancel_before_contact_and_in_mid_handoff(pair: TransferPair) -> None:
    pair.ask(1, TOKENS)
    pair.receiver.cancel(1, reason="client left", now=pair.now)
    assert pair.kinds(pair.receiver.poll(pair.now), 1) == ["Released"]
    pair.open(2, TOKENS)
    pair.ask(2, TOKENS)
    pair.network.hold = True
    pair.compute(2, 0, 8)
    pair.run(lambda: pair.sender.moving() and pair.sender.stats()["send_sending"] == 1)
    pair.receiver.cancel(2, reason="client left", now=pair.now)
    pair.run(pair.got("SendFailed", 2))
    pair.poll()
    assert pair.kinds(pair.received, 2) == []  # a write is in flight: the rows are kept
    assert pair.receiver.rooms() == {2}
    pair.network.hold = False
    pair.run(pair.over)
    assert pair.kinds(pair.received, 2) == ["Released"]


def test_prefills_reason_and_status_reach_decode(pair: TransferPair) -> None:
    pair.open(1, TOKENS)
    pair.ask(1, TOKENS)
    error = RequestError("the prompt is empty", field="prompt")
    pair.sender.fail(1, error=error, now=pair.now)
    pair.run(pair.over)
    failed = pair.received[0]
    assert (failed.code, failed.status, failed.retriable) == ("invalid_request", 400, False)
    assert "the prompt is empty" in failed.message


def test_a_broken_write_fences_prefill_when_the_quarantine_is_overdue(pair: TransferPair) -> None:
    pair.network.breaks = lambda note: True
    pair.open(1, TOKENS)
    pair.ask(1, TOKENS)
    pair.compute(1, 0, 8)
    pair.run(pair.got("ReceiveFailed", 1))
    begin = pair.now
    pair.run(lambda: bool(pair.killed), step_s=0.1)
    assert pair.now - begin >= pair.config.deadline_s - 1
    assert pair.killed[0].agent_name == "prefill.0"
    assert pair.kinds(pair.received, 1) == ["ReceiveFailed"]  # asked to be killed is not dead


def test_states_that_cannot_mean_the_same_are_refused_before_any_offer() -> None:
    other = [s.__class__(s.name, s.layer, s.growth, s.row_bytes * 2, pieces=s.pieces) for s in SPECS]
    pair = TransferPair(dst_specs=other)
    try:
        pair.ask(1, TOKENS)
        pair.run(pair.got("Released", 1))
        assert pair.received[0].code == "config_error"
        assert "row_bytes" in pair.received[0].message
        assert pair.sender.stats()["send_expected"] == 0
    finally:
        pair.close()


def test_notes_of_strangers_and_of_unknown_rooms_are_counted(pair: TransferPair) -> None:
    from splitserve import wire
    from splitserve.transfer.transport import Noted

    pair.ask(1, TOKENS)
    pair.run(lambda: pair.receiver.stats()["receive_offered"] == 1)
    end = pair.network.ends["decode.0"]
    note = wire.Note(1, 1, 0, 0, 10, True)
    end.events += [
        Noted("stranger.0", wire.encode(note)),
        Noted("prefill.0", wire.encode(wire.Note(999, 1, 0, 0, 10, True))),
        Noted("prefill.0", b"\xff garbage"),
    ]
    pair.poll()
    stats = pair.receiver.stats()
    assert (stats["receive_late"], stats["receive_garbage"], stats["receive_offered"]) == (2, 1, 1)


def test_poll_and_open_never_wait(pair: TransferPair) -> None:
    begin = time.perf_counter()
    for room in range(50):
        pair.ask(room, TOKENS)
        pair.poll()
    assert time.perf_counter() - begin < 2.0


def test_check_finds_a_room_that_nobody_watches(pair: TransferPair) -> None:
    from splitserve.errors import InvariantError

    pair.ask(1, TOKENS)
    pair.run(lambda: pair.receiver.stats()["receive_offered"] == 1)
    pair.receiver._sources.clear()
    with pytest.raises(InvariantError, match="not watched"):
        pair.receiver.check()
