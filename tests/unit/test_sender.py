"""Sender, with a real Receiver at the other end or with a decode engine made of messages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from transfer_pair import TransferPair

from splitserve import wire
from splitserve.errors import Overloaded, PortTaken, ProtocolError, RequestError
from splitserve.spec import Kind, Units
from splitserve.transfer.rendezvous import Rendezvous
from splitserve.wire import PROTOCOL, Accepted, Cancel, Drained, FirstToken, HandoffFailed, Offer, Ping, Pong


@pytest.fixture
def pair() -> Iterator[TransferPair]:
    made = TransferPair()
    yield made
    made.close()


class Decode:
    """A decode engine that says whatever the test wants."""

    def __init__(self, pair: TransferPair) -> None:
        self.pair = pair
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"tcp://127.0.0.1:{pair.door.port}")
        self.decoder = wire.decoder(wire.ToDecode)

    def say(self, message: Any) -> None:
        self.socket.send(message if isinstance(message, bytes) else wire.encode(message))

    def hear(self, count: int = 1) -> list[Any]:
        heard: list[Any] = []
        end = time.monotonic() + 5
        while len(heard) < count:
            assert time.monotonic() < end, f"heard only {heard}"
            self.pair.poll(decode=False)
            if self.socket.poll(5):
                heard.append(self.decoder.decode(self.socket.recv()))
        return heard

    def offer(self, room: int = 1, generation: int = 1, **other: Any) -> Offer:
        units = (Units(Kind.PAGE, (16, 17), 0, 0, 8),)
        given = {
            "protocol": PROTOCOL,
            "engine": "decode",
            "cards": self.pair.decode.group.cards,
            "units": units,
        }
        return Offer(
            **{
                **given,
                "room": room,
                "generation": generation,
                "start": 0,
                "num_tokens": 8,
                "digests": True,
                **other,
            }
        )

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def decode(pair: TransferPair) -> Iterator[Decode]:
    made = Decode(pair)
    yield made
    made.close()


def test_a_ping_is_answered_with_who_we_are_and_with_cards_only_once(
    pair: TransferPair, decode: Decode
) -> None:
    decode.say(Ping(1.5, "decode"))
    decode.say(Ping(2.5, "decode"))
    first, second = decode.hear(2)
    assert first == Pong(1.5, "prefill", pair.prefill.group.cards, PROTOCOL)
    assert second == Pong(2.5, "prefill", (), PROTOCOL)


def test_held_chunks_are_written_when_the_offer_comes(pair: TransferPair, decode: Decode) -> None:
    pair.open(1, 8)
    pair.compute(1, 0, 4)
    pair.compute(1, 4, 8, last=True)
    decode.say(decode.offer())
    assert decode.hear() == [Accepted(1, 1, ())]
    pair.run(pair.got("Released", 1))
    assert pair.kinds(pair.sent, 1) == ["Sent", "Released"]
    assert (pair.decode.memory[0][Kind.PAGE][16:18] == pair.prefill.memory[0][Kind.PAGE][0:2]).all()


def test_a_lease_ends_what_no_offer_came_for_and_a_late_offer_hears_so(
    pair: TransferPair, decode: Decode
) -> None:
    pair.open(1, 8)
    pair.compute(1, 0, 4)
    pair.now += pair.config.hold_lease_s - 0.1
    pair.compute(1, 4, 8, last=True)  # computing renews the lease
    pair.now += pair.config.hold_lease_s - 0.1
    pair.poll()
    assert pair.sent == []
    assert pair.sender.next_deadline() == pytest.approx(pair.now + 0.1)
    pair.now += 0.2
    pair.poll()
    assert pair.kinds(pair.sent, 1) == ["SendFailed", "Released"]
    assert pair.sent[0].code == "deadline_exceeded"
    decode.say(decode.offer())
    failed, drained = decode.hear(2)
    assert (failed.code, drained) == ("deadline_exceeded", Drained(1, 1))


def test_a_room_may_be_used_once(pair: TransferPair) -> None:
    pair.open(1, 8)
    with pytest.raises(RequestError) as e:
        pair.open(1, 8)
    assert e.value.field == "bootstrap_room"
    pair.sender.fail(1, now=pair.now)
    pair.poll()
    with pytest.raises(RequestError):
        pair.open(1, 8)


def test_chunks_must_follow_each_other_and_end_the_prompt(pair: TransferPair) -> None:
    pair.open(1, 8)
    pair.compute(1, 0, 4)
    with pytest.raises(ProtocolError, match=r"expected a chunk from 4 on"):
        pair.compute(1, 0, 4)
    with pytest.raises(ProtocolError):
        pair.compute(1, 4, 8, last=False)
    with pytest.raises(ProtocolError):
        pair.sender.computed(1, 4, 6, units=pair.units(0, 0, 6), last=True, first=FirstToken(1), now=pair.now)
    pair.compute(1, 4, 8, last=True)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"protocol": PROTOCOL + 1}, "protocol_error"),
        ({"to": "another-life"}, "peer_lost"),
        ({"cards": ()}, "unknown_engine"),
        ({"num_tokens": 9}, "invalid_request"),
        ({"prompt": 77}, "invalid_request"),
    ],
)
def test_an_offer_that_cannot_be_is_refused_and_drained(
    pair: TransferPair, decode: Decode, change: dict[str, Any], code: str
) -> None:
    pair.sender.open(1, 8, now=pair.now, prompt=76)
    decode.say(decode.offer(**change))
    heard = [
        m
        for m in decode.hear(3 if change.keys() & {"num_tokens", "prompt"} else 2)
        if not isinstance(m, Accepted)
    ]
    assert [type(m) for m in heard] == [HandoffFailed, Drained]
    assert heard[0].code == code


def test_another_engines_room_can_neither_be_taken_nor_cancelled(pair: TransferPair, decode: Decode) -> None:
    pair.open(1, 8)
    decode.say(decode.offer())
    decode.hear()
    stranger = Decode(pair)
    stranger.say(stranger.offer(engine="stranger", generation=9))
    failed, _ = stranger.hear(2)
    assert (failed.code, failed.status) == ("invalid_request", 400)
    stranger.say(Cancel(1, 9, "mine now"))
    stranger.say(Ping(0.0, "stranger"))
    stranger.hear()  # so the Cancel has been read
    assert pair.sender.stats()["send_sending"] == 1
    stranger.close()


def test_offers_without_requests_are_bounded_and_expire(
    pair: TransferPair, decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitserve.transfer.sender.MAX_EXPECTED", 2)
    for room in (1, 2, 3):
        decode.say(decode.offer(room))
    failed, drained = decode.hear(2)
    assert (failed.room, failed.code, drained) == (3, Overloaded.code, Drained(3, 1))
    assert pair.sender.stats()["send_expected"] == 2
    pair.now += pair.config.hold_lease_s + 1
    assert [type(m) for m in decode.hear(4)] == [HandoffFailed, Drained] * 2
    assert pair.sender.stats()["send_expected"] == 0
    pair.open(1, 8)  # its request comes at last: told at once, nothing to compute for
    pair.poll()
    assert pair.kinds(pair.sent, 1) == ["SendFailed", "Released"]


def test_cancel_before_the_request_and_for_a_room_that_nobody_knows(
    pair: TransferPair, decode: Decode
) -> None:
    decode.say(decode.offer(1))
    decode.say(Cancel(1, 1, "client left"))
    decode.say(Cancel(77, 3, "never offered"))
    assert decode.hear(2) == [Drained(1, 1), Drained(77, 3)]
    pair.open(1, 8)
    pair.poll()
    assert pair.sent[0].code == "peer_lost"


def test_cancel_with_writes_in_flight_is_answered_when_they_have_ended(
    pair: TransferPair, decode: Decode
) -> None:
    pair.open(1, 8)
    pair.compute(1, 0, 4)
    pair.network.hold = True
    decode.say(decode.offer())
    decode.say(Cancel(1, 1, "client left"))
    assert decode.hear() == [Accepted(1, 1, ())]
    pair.run(pair.got("SendFailed", 1))
    for _ in range(20):
        pair.poll(decode=False)
    assert pair.kinds(pair.sent, 1) == ["SendFailed"]  # rows are kept
    assert not decode.socket.poll(20)
    pair.network.hold = False
    assert decode.hear() == [Drained(1, 1)]
    assert pair.kinds(pair.sent, 1) == ["SendFailed", "Released"]


def test_a_broken_write_is_never_called_drained(pair: TransferPair, decode: Decode) -> None:
    pair.open(1, 8)
    pair.network.breaks = lambda note: True
    decode.say(decode.offer())
    pair.compute(1, 0, 4)
    accepted, failed = decode.hear(2)
    assert (type(accepted), failed.code) == (Accepted, "transfer_failed")
    pair.run(pair.got("Released", 1))
    decode.say(Cancel(1, 1, "again"))
    decode.say(Ping(0.0, "decode"))
    assert [type(m) for m in decode.hear()] == [Pong]


def test_a_newer_offer_gets_everything_again_and_the_older_is_drained(
    pair: TransferPair, decode: Decode
) -> None:
    pair.open(1, 8)
    pair.compute(1, 0, 4)
    pair.network.hold = True
    decode.say(decode.offer(generation=1))
    decode.hear()
    decode.say(decode.offer(generation=2, units=(Units(Kind.PAGE, (20, 21), 0, 0, 8),), cards=()))
    decode.say(decode.offer(generation=1))  # a late one
    assert decode.hear() == [Accepted(1, 2, ())]
    pair.compute(1, 4, 8, last=True)
    pair.network.hold = False
    assert decode.hear() == [Drained(1, 1)]
    pair.run(pair.got("Released", 1))
    assert (pair.decode.memory[0][Kind.PAGE][20:22] == pair.prefill.memory[0][Kind.PAGE][0:2]).all()
    assert pair.sender.stats()["send_late"] == 1


def test_garbage_is_counted_and_stops_nothing(pair: TransferPair, decode: Decode) -> None:
    decode.say(b"\x00garbage")
    decode.say(wire.encode(Pong(1.0)))  # a message, but not for this side
    decode.socket.send_multipart([b"a", b"b"])
    decode.say(Ping(1.0, "decode"))
    assert [type(m) for m in decode.hear()] == [Pong]
    assert pair.sender.stats()["rendezvous_garbage"] == 3


def test_a_port_in_use_is_said_so(pair: TransferPair) -> None:
    with pytest.raises(PortTaken) as e:
        Rendezvous(port=pair.door.port)
    assert (e.value.field, str(pair.door.port) in e.value.message) == ("bootstrap_port", True)


def test_an_answer_to_a_peer_that_has_gone_is_dropped_and_counted(pair: TransferPair) -> None:
    pair.door.send(b"nobody", Drained(1, 1))
    assert pair.door.num_dropped == 1


def test_a_record_names_the_lanes_that_were_seen_and_does_not_read_them_again(pair: TransferPair) -> None:
    """Over UCX that is a log to be parsed: a millisecond of the loop for each handoff."""
    transport, asked = pair.prefill.ports[0]._transport, []
    read = transport.lanes
    transport.lanes = lambda: asked.append(1) or read()  # type: ignore[method-assign, func-returns-value]
    for room in (1, 2):
        pair.open(room, 8)
        pair.ask(room, 8)
        pair.compute(room, 0, 8, last=True)
        pair.run(pair.over)
    assert [r["lanes"] for r in pair.sender.records()] == [["a list"]] * 2
    assert len(asked) == 1


def test_a_chunk_is_written_by_the_copies_prepared_for_it_and_only_where_they_are_right(
    pair: TransferPair,
) -> None:
    pair.network.hold = True
    transport = pair.network.ends["prefill.0"]
    for room in (1, 2):
        pair.open(room, 8)
        pair.sender.prepare(
            room, 0, 8, units=pair.units(0, 0, 8)
        )  # nobody has offered: nothing to prepare for
        pair.ask(room, 8, first_page=14 + 2 * room)
    pair.run(lambda: pair.sender.stats()["send_sending"] == 2.0)
    assert transport.prepared == []
    for room, page in ((1, 0), (2, 4)):  # of room 2 other pages than those that will be computed
        pair.sender.prepare(room, 0, 8, units=pair.units(page, 0, 8))
        pair.compute(room, 0, 8, last=True)
    right, wrong = transport.prepared
    written = [copies for _, _, copies, _ in transport.flying]
    assert written[0] is right
    assert written[1] is not wrong
    pair.network.hold = False
    pair.run(pair.over)
    ours, theirs = pair.prefill.memory[0][Kind.PAGE], pair.decode.memory[0][Kind.PAGE]
    for page in (16, 18):
        assert (theirs[page : page + 2] == ours[0:2]).all()
    assert not pair.prefill.ports[0]._prepared._found
