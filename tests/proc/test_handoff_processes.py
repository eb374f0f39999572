"""A real prefill and a real decode process that are stopped, resumed, fenced and killed in mid-handoff.

The one rule, with real bytes: from the moment rows are released, nobody's late write changes them.
"""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from children import ChildProcess, start

PAGE_BYTES = 4 * 2 * 64 * 1024  # transfer_child.SPECS: layers x pieces x tokens of a page x bytes of a row
PAGES = 16
TOKENS = PAGES * 64
POISON = 0xEE
SILENCE_S = 1.0  # a busy machine stops processes for tenths of it

KINDS = {"local": ("local", {}), "nixl": ("nixl", {}), "nixl-tcp": ("nixl", {"ucx": ["TLS=tcp,self"]})}
SRC = list(range(PAGES))
DST = list(range(20, 20 + PAGES))  # with free pages around them, whose bytes must never change


class Pair:
    def __init__(self, kind: str, *, fences: bool = False, silence_s: float = SILENCE_S) -> None:
        transport, settings = KINDS[kind]
        settings = {**settings, "silence_s": silence_s, "hold_lease_s": 1.0}
        tag = uuid.uuid4().hex[:8]
        self.prefill = ChildProcess(f"prefill-{tag}", transport, num_pages=48, settings=settings)
        self.decode = ChildProcess(f"decode-{tag}", transport, num_pages=48, settings=settings)
        start(self.prefill, self.decode)
        self.port = self.prefill.ask("prefill")
        self.decode.ask("decode", fences=fences)
        self.prefill.ask("fill", seed=1, start=0, stop=PAGES * PAGE_BYTES)
        self.poison()

    def poison(self) -> None:
        self.decode.ask("set", value=POISON, start=0, stop=48 * PAGE_BYTES)

    def open(self, room: int, **limits: float) -> None:
        self.prefill.ask("open", room=room, num_tokens=TOKENS, **limits)
        self.ask(room, **limits)

    def ask(self, room: int, **limits: float) -> None:
        self.decode.ask("ask", room=room, port=self.port, num_tokens=TOKENS, pages=DST, **limits)

    def compute(self, room: int, start: int, stop: int) -> None:
        self.prefill.ask("computed", room=room, start=start, stop=stop, pages=SRC, last=stop == TOKENS)

    def crossed(self) -> bool:
        """Whether every byte of the prompt is at decode and nothing around it has changed."""
        inside = (DST[0] * PAGE_BYTES, (DST[-1] + 1) * PAGE_BYTES)
        same = self.decode.ask("equals", seed=1, start=inside[0], stop=inside[1])
        return bool(same) and self.around_untouched()

    def around_untouched(self) -> bool:
        before = self.decode.ask("changed", value=POISON, start=0, stop=DST[0] * PAGE_BYTES)
        after = self.decode.ask(
            "changed", value=POISON, start=(DST[-1] + 1) * PAGE_BYTES, stop=48 * PAGE_BYTES
        )
        return (before, after) == (0, 0)

    def landed(self) -> int:
        """Bytes of the destination rows that are not poison."""
        return int(
            self.decode.ask(
                "changed", value=POISON, start=DST[0] * PAGE_BYTES, stop=(DST[-1] + 1) * PAGE_BYTES
            )
        )

    def kill(self) -> None:
        self.prefill.kill()
        self.decode.kill()


def is_(kind: str, room: int) -> Any:
    return lambda e: e["kind"] == kind and e["room"] == room


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """One pair for the tests that leave both alive, and for the last of them."""
    made = Pair(str(request.param))
    yield made
    made.kill()


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    """Pairs that a test makes for itself."""
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.kill()


def make(pairs: list[Pair], kind: str, **settings: Any) -> Pair:
    pairs.append(Pair(kind, **settings))
    return pairs[-1]


def test_a_handoff_crosses_in_every_order_of_its_halves(pair: Pair) -> None:
    pair.poison()
    # both halves, then the chunks one by one
    pair.open(1)
    for begin in range(0, TOKENS, 256):
        pair.compute(1, begin, begin + 256)
    arrived = pair.decode.wait_for(is_("Arrived", 1))[-1]
    assert (arrived["num_bytes"], arrived["digest_checked"]) == (PAGES * PAGE_BYTES, True)
    assert arrived["first"]["token"] == 42
    assert pair.crossed()
    sent = pair.prefill.wait_for(is_("Released", 1))
    assert [e["kind"] for e in sent] == ["Sent", "Released"]
    # all computed before decode is heard of: chunks are held
    pair.poison()
    pair.prefill.ask("open", room=2, num_tokens=TOKENS)
    pair.compute(2, 0, 512)
    pair.compute(2, 512, TOKENS)
    pair.ask(2)
    pair.decode.wait_for(is_("Arrived", 2))
    assert pair.crossed()
    # decode first, prefill's half later
    pair.poison()
    pair.ask(3)
    pair.prefill.ask("open", room=3, num_tokens=TOKENS)
    pair.compute(3, 0, TOKENS)
    pair.decode.wait_for(is_("Arrived", 3))
    assert pair.crossed()
    for child in (pair.prefill, pair.decode):
        child.ask("stats")  # runs check()
    record = pair.decode.ask("records")[-1]
    assert record["bytes"] == record["expected_bytes"] == PAGES * PAGE_BYTES
    assert record["digests"][0]["prefill"] == record["digests"][0]["decode"] != ""


def test_prefill_stopped_and_resumed_writes_late_only_into_quarantined_rows(pair: Pair) -> None:
    pair.poison()
    pair.open(11)
    pair.compute(11, 0, 512)
    pair.prefill.wait_until(lambda: pair.landed() > 0)
    pair.prefill.signal(signal.SIGSTOP)
    # the next chunk is written when it wakes, before it reads that decode has given up
    pair.prefill.send("computed", room=11, start=512, stop=TOKENS, pages=SRC, last=True)
    failed = pair.decode.wait_for(is_("ReceiveFailed", 11), timeout_s=10)[-1]
    assert (failed["code"], failed["retriable"]) == ("peer_lost", True)
    stats = pair.decode.ask("stats")
    assert stats["receive_quarantine"] + stats["receive_fencing"] == 1
    pair.decode.ask("set", value=POISON, start=DST[0] * PAGE_BYTES, stop=(DST[-1] + 1) * PAGE_BYTES)
    time.sleep(2 * SILENCE_S)  # a silence is a length of time: nothing may be released however long it lasts
    assert pair.decode.ask("events") == []
    pair.prefill.signal(signal.SIGCONT)
    pair.prefill.answer()
    released = pair.decode.wait_for(is_("Released", 11))[-1]
    assert pair.landed() > 0, "the late write did not happen, so this test shows nothing"
    assert pair.around_untouched()
    assert pair.decode.ask("sum", start=0, stop=48 * PAGE_BYTES) == released["sum"], (
        "written after the release"
    )
    assert pair.decode.ask("stats")["receive_quarantine"] == 0
    # and the pair goes on
    pair.poison()
    pair.open(12)
    pair.compute(12, 0, TOKENS)
    pair.decode.wait_for(is_("Arrived", 12))
    assert pair.crossed()


def test_decode_killed_in_mid_handoff_gives_prefill_its_rows_back(pair: Pair) -> None:
    pair.poison()
    pair.open(21)
    pair.compute(21, 0, 512)
    pair.prefill.wait_until(lambda: pair.landed() > 0)
    pair.decode.signal(signal.SIGSTOP)
    pair.compute(21, 512, 960)  # over TCP this cannot end
    pair.decode.kill()
    events = [e for e in pair.prefill.wait_for(is_("Released", 21), timeout_s=10) if e["room"] == 21]
    assert [e["kind"] for e in events] == ["SendFailed", "Released"]
    assert events[0]["code"] in ("peer_lost", "transfer_failed")
    stats = pair.prefill.ask("stats")
    assert stats["send_draining"] == stats["send_sending"] == 0


@pytest.mark.parametrize("kind", ["nixl", "nixl-tcp"])
def test_a_silent_prefill_is_fenced_and_its_rows_are_released_when_it_is_dead(
    pairs: list[Pair], kind: str
) -> None:
    pair = make(pairs, kind, fences=True)
    pair.open(1)
    pair.compute(1, 0, 512)
    pair.prefill.wait_until(lambda: pair.landed() > 0)
    pair.prefill.signal(signal.SIGSTOP)
    events = pair.decode.wait_for(is_("Released", 1), timeout_s=15)
    assert [e["kind"] for e in events] == ["ReceiveFailed", "Released"]
    assert pair.prefill.process.wait(timeout=5) == -signal.SIGKILL
    assert events[1]["at"] - events[0]["at"] > SILENCE_S * 0.9, "fenced without a second silence"
    assert pair.decode.ask("stats")["fenced_prefills"] == 1
    assert pair.decode.ask("sum", start=0, stop=48 * PAGE_BYTES) == events[1]["sum"]
    assert pair.around_untouched()


@pytest.mark.parametrize("kind", ["nixl", "nixl-tcp"])
def test_killed_in_mid_write_nothing_lands_after_the_release(pairs: list[Pair], kind: str) -> None:
    """Over TCP megabytes of a killed sender are still in the kernel, and our own polls would write them."""
    pair = make(pairs, kind, silence_s=5.0)
    pair.open(1)
    pair.compute(1, 0, 64)
    pair.prefill.wait_until(lambda: pair.landed() > 0)
    pair.decode.ask("still", still=True)  # reads nothing, so that what is sent stays on the way
    pair.prefill.ask("computed", room=1, start=64, stop=960, pages=SRC, last=False)
    pair.prefill.kill()
    before = pair.landed()
    pair.decode.ask("still", still=False)
    events = pair.decode.wait_for(is_("Released", 1), timeout_s=10)
    assert [(e["kind"], e.get("code")) for e in events] == [
        ("ReceiveFailed", "peer_lost"),
        ("Released", None),
    ]
    if kind == "nixl-tcp":
        assert pair.landed() > before, "nothing was on the way, so this test shows nothing"
    for _ in range(20):
        assert pair.decode.ask("sum", start=0, stop=48 * PAGE_BYTES) == events[-1]["sum"]
    assert pair.around_untouched()
    assert pair.decode.ask("stats")["receive_quarantine"] == 0


def test_halves_that_never_meet_end_by_lease_and_deadline(pairs: list[Pair]) -> None:
    pair = make(pairs, "local", silence_s=5.0)
    pair.prefill.ask("open", room=1, num_tokens=TOKENS)  # decode never asks
    pair.compute(1, 0, TOKENS)
    pair.ask(2, deadline_s=1.5)  # prefill never has it
    ended = pair.prefill.wait_for(is_("Released", 1), timeout_s=10)
    assert [(e["kind"], e.get("code")) for e in ended] == [
        ("SendFailed", "deadline_exceeded"),
        ("Released", None),
    ]
    ended = pair.decode.wait_for(is_("Released", 2), timeout_s=10)
    assert [(e["kind"], e.get("code")) for e in ended] == [
        ("ReceiveFailed", "deadline_exceeded"),
        ("Released", None),
    ]
    assert not ended[0]["retriable"]
    # each side cancels
    pair.open(3)
    pair.compute(3, 0, 64)
    pair.decode.ask("cancel", room=3)
    assert [e["kind"] for e in pair.decode.wait_for(is_("Released", 3))] == ["Released"]
    assert [e["kind"] for e in pair.prefill.wait_for(is_("Released", 3))] == ["SendFailed", "Released"]
    pair.open(4)
    pair.prefill.ask("fail", room=4, reason="no memory left")
    failed = pair.decode.wait_for(is_("Released", 4))
    assert [e["kind"] for e in failed] == ["ReceiveFailed", "Released"]
    assert "no memory left" in failed[0]["message"]
