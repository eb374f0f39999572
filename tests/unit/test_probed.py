"""Writes against what the fabric doctor measured: when one is slow, who is told, and when nobody is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.errors import ConfigError
from splitserve.transfer.events import SlowWrite
from splitserve.transfer.faults import Faults
from splitserve.transfer.judged import Judged
from splitserve.transfer.layout import Copies
from splitserve.transfer.paced import Paced
from splitserve.transfer.probed import Expectations, SlowPairs, expected_s, parse, probed_word
from splitserve.transfer.transport import Broken, Slow, Written

MB = 1 << 20
WORDS = ("0-0/65536=0.5/1048576=2/16777216=2",)


@given(
    st.integers(0, 9),
    st.integers(0, 9),
    st.dictionaries(st.integers(1, 1 << 40), st.floats(0.001, 1e4), min_size=1),
)
def test_words_there_and_back(rank: int, peer: int, sizes: dict[int, float]):
    (back,) = parse([probed_word(rank, peer, sizes)]).items()
    assert back[0] == (rank, peer)
    assert back[1] == pytest.approx(sizes, rel=1e-3)


@pytest.mark.parametrize("word", ["", "0-0", "0/65536=1", "0-0/65536=0", "0-0/x=1", "0-0/65536"])
def test_a_word_that_means_nothing_is_refused(word: str):
    with pytest.raises(ConfigError, match="probed"):
        parse([word])


def test_time_to_expect_grows_with_bytes_and_is_never_below_that_of_the_least_measured():
    sizes = parse(WORDS)[0, 0]
    assert expected_s(sizes, 100) == expected_s(sizes, 65536) == pytest.approx(65536 / 0.5e9)
    assert expected_s(sizes, 200_000) == pytest.approx(200_000 / 0.5e9)  # the slower of its neighbours
    assert expected_s(sizes, 8 * MB) == pytest.approx(8 * MB / 2e9)
    assert expected_s(sizes, 640 * MB) == pytest.approx(640 * MB / 2e9)


def judge(*looks: float, words: tuple[str, ...] = WORDS, nbytes: int = 2 * MB) -> list[Slow]:
    """A write posted at 0 that was seen unfinished at all times but the last, when it had ended."""
    e = Expectations(0, words)
    e.posted(7, "decode-0-abc.0", 0, nbytes, 0.0)
    for at in looks[:-1]:
        assert e.looked([], [], at) == []
    slow = e.looked([7], [], looks[-1])
    assert e.num_flying == 0
    return slow


def test_a_write_seen_unfinished_for_too_long_is_slow():
    (slow,) = judge(0.001, 0.01, 0.0101)  # 2 MiB at 2 GB/s take 1 ms
    assert slow.peer == "decode-0-abc.0"
    assert slow.rate == pytest.approx(2 * MB / 0.01 / 1e9)
    assert slow.usual == pytest.approx(2.0)
    assert judge(0.001, 0.003, 0.0031) == []


def test_who_looks_late_does_not_blame_the_link():
    assert judge(5.0) == []
    assert judge(0.001, 5.0) == []


def test_a_write_of_many_pieces_may_take_its_time():
    e = Expectations(0, WORDS)
    e.posted(1, "p", 0, 2 * MB, 0.0, pieces=1000)  # 1 ms for its bytes and 8 for its pieces
    e.posted(2, "p", 0, 2 * MB, 0.0)  # behind them
    assert e.looked([], [], 0.030) == []
    assert e.looked([1], [], 0.031) == []
    assert e.looked([2], [], 0.032) == []
    e.posted(3, "p", 0, 2 * MB, 1.0, pieces=1000)
    assert e.looked([], [], 1.050) == []
    (slow,) = e.looked([3], [], 1.051)
    assert slow.rate == pytest.approx(2 * MB / 0.05 / 1e9)


def test_bytes_in_the_way_count():
    e = Expectations(0, WORDS)
    e.posted(1, "p", 0, 16 * MB, 0.0)
    e.posted(2, "p", 0, 2 * MB, 0.0)  # 18 MiB take 9.4 ms
    assert e.looked([1], [], 0.012) == []
    assert e.looked([], [], 0.020) == []
    assert e.looked([2], [], 0.021) == []


def test_unmeasured_links_empty_writes_and_broken_ones_are_not_judged():
    e = Expectations(1, WORDS)
    e.posted(1, "p", 0, MB, 0.0)
    assert e.num_flying == 0
    e = Expectations(0, WORDS)
    e.posted(1, "p", 0, 0, 0.0)
    assert e.num_flying == 0
    e.posted(2, "p", 0, MB, 0.0)
    e.looked([], [], 50.0)
    assert e.looked([], [2], 51.0) == []


def test_a_pair_is_warned_of_at_its_first_tenth_and_hundredth_slow_write_under_the_names_of_its_ranks():
    pairs = SlowPairs()
    said = [
        pairs.add(SlowWrite("prefill-0-00112233aabb.1", "decode-0-0123456789ab.2", 0.1, 3.0))
        for _ in range(100)
    ]
    assert [i + 1 for i, text in enumerate(said) if text] == [1, 10, 100]
    assert (
        "prefill-0 rank 1 to decode-0 rank 2 crossed at 0.1 GB/s or less, the fabric probe had 3" in said[0]
    )
    assert pairs.counts == {"prefill-0 rank 1 to decode-0 rank 2": 100}


class Wire:
    """A transport under test conditions: every write ends at the next poll."""

    name = "wire"

    def __init__(self) -> None:
        self.posted = 0
        self.events: list[Written | Broken] = []

    def connect(self, card: object) -> str:
        return "decode-0-abc.0"

    def write(self, peer: str, copies: Copies, note: bytes) -> int:
        self.posted += 1
        self.events.append(Written(self.posted))
        return self.posted

    def poll(self) -> list[Written | Broken]:
        events, self.events = self.events, []
        return events


def test_a_throttled_link_is_noticed_and_a_good_one_is_not():
    now = 0.0
    faults = Faults()
    link = Judged(Paced(Wire(), faults, clock=lambda: now), Expectations(0, WORDS), clock=lambda: now)  # type: ignore[arg-type]
    peer = link.connect(type("Card", (), {"tp_rank": 0})())  # type: ignore[arg-type]
    two_mb = Copies(np.array([[0, 2 * MB, 0]], np.uint64), np.array([[0, 2 * MB, 0]], np.uint64))

    def write() -> list[object]:
        nonlocal now
        link.write(peer, two_mb, b"note")
        seen: list[object] = []
        while not any(isinstance(e, Written) for e in seen):
            seen += link.poll()
            now += 0.001
        return seen

    assert not any(isinstance(e, Slow) for e in write())
    faults.slow("slow_link", 0.2)
    (slow,) = [e for e in write() if isinstance(e, Slow)]
    assert slow.rate < slow.usual / 4
    faults.slow("slow_link", 0.0)
    assert not any(isinstance(e, Slow) for e in write())
