"""One contract, every transport, two real processes: what transfer/transport.py promises."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from children import ChildError, ChildProcess, start

MIB = 1 << 20
NUM_PAGES = 200  # of 512 KiB

KINDS = {"local": ("local", {}), "nixl": ("nixl", {}), "nixl-tcp": ("nixl", {"ucx": ["TLS=tcp,self"]})}


def child(kind: str, name: str, num_pages: int = NUM_PAGES) -> ChildProcess:
    transport, settings = KINDS[kind]
    return ChildProcess(f"{name}-{uuid.uuid4().hex[:8]}", transport, num_pages=num_pages, settings=settings)


def is_note(name: str) -> Any:
    return lambda e: e["kind"] == "Noted" and e["note"] == name


def late_write(source: ChildProcess, peer: str) -> str:
    """What becomes of a write to a peer that is gone."""
    try:
        number = source.ask("write", peer=peer, runs=[[0, 0, 64]], note="x")
    except ChildError:
        return "refused"
    return str(source.wait_for(is_end(number), timeout_s=10.0)[-1]["kind"])


def is_end(number: int) -> Any:
    return lambda e: e["kind"] in ("Written", "Broken") and e["id"] == number


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(kind: str) -> Iterator[tuple[ChildProcess, ChildProcess, str]]:
    """Source, destination, and the source's handle of the destination."""
    source, target = start(child(kind, "source"), child(kind, "target"))
    yield source, target, source.ask("connect", card=target.ask("card"))
    source.kill()
    target.kill()


@pytest.fixture
def own_pair(kind: str) -> Iterator[tuple[ChildProcess, ChildProcess, str]]:
    """A pair that the test may kill."""
    source, target = start(child(kind, "source"), child(kind, "target"))
    yield source, target, source.ask("connect", card=target.ask("card"))
    source.kill()
    target.kill()


Pair = tuple[ChildProcess, ChildProcess, str]


def test_bytes_are_there_before_their_note(pair: Pair) -> None:
    source, target, peer = pair
    source.ask("fill", seed=1, start=0, stop=8 * MIB)
    target.ask("set", value=0, start=0, stop=8 * MIB)
    source.ask("write", peer=peer, runs=[[0, 0, 8 * MIB]], note="one")
    noted = target.wait_for(is_note("one"))[-1]
    assert noted["sender"] == f"{source.engine}.0"
    assert noted["sum"] == source.ask("sum", start=0, stop=MIB)
    assert target.ask("equals", seed=1, start=0, stop=8 * MIB)


def test_written_means_that_the_bytes_are_in_place_without_the_peers_help(pair: Pair) -> None:
    source, target, peer = pair
    source.ask("fill", seed=2, start=0, stop=4 * MIB)
    number = source.ask("write", peer=peer, runs=[[0, 16 * MIB, 4 * MIB]], note="two")
    assert source.wait_for(is_end(number))[-1]["kind"] == "Written"
    target.ask("still", still=True)
    assert target.ask("equals", seed=2, start=16 * MIB, stop=20 * MIB)
    target.ask("still", still=False)


def test_many_small_runs_land_exactly_where_they_belong(pair: Pair) -> None:
    source, target, peer = pair
    source.ask("fill", seed=3, start=0, stop=16 * MIB)
    target.ask("set", value=7, start=0, stop=32 * MIB)
    runs = [[4096 * (1999 - i), 8192 * i, 4096] for i in range(2000)]
    source.ask("write", peer=peer, runs=runs, note="three")
    target.wait_for(is_note("three"))
    for i in (0, 1, 777, 1999):
        at = 4096 * (1999 - i)
        assert target.ask("sum", start=8192 * i, stop=8192 * i + 4096) == source.ask(
            "sum", start=at, stop=at + 4096
        )
        assert target.ask("changed", value=7, start=8192 * i + 4096, stop=8192 * (i + 1)) == 0


def test_a_big_write_lands(pair: Pair) -> None:
    source, target, peer = pair
    source.ask("fill", seed=4, start=0, stop=64 * MIB)
    source.ask("write", peer=peer, runs=[[0, 20 * MIB, 64 * MIB]], note="four")
    target.wait_for(is_note("four"))
    assert target.ask("equals", seed=4, start=20 * MIB, stop=84 * MIB)


def test_notes_of_many_writes_all_come_once_in_whatever_order(pair: Pair) -> None:
    source, target, peer = pair
    names = [f"n{i}" for i in range(50)]
    for i, name in enumerate(names):
        source.ask("write", peer=peer, runs=[[0, 0, MIB if i % 7 == 0 else 64]], note=name)
    seen: list[str] = []
    while len(seen) < len(names):
        seen += [e["note"] for e in target.wait_for(lambda e: e["kind"] == "Noted")]
    assert sorted(seen) == sorted(names)


def test_a_note_needs_no_bytes_and_may_be_large(pair: Pair) -> None:
    source, target, peer = pair
    number = source.ask("write", peer=peer, runs=[], note="alone")
    assert source.wait_for(is_end(number))[-1]["kind"] == "Written"
    target.wait_for(is_note("alone"))
    source.ask("write", peer=peer, runs=[[0, 0, 64]], note="large", pad=600_000)
    assert target.wait_for(is_note("large"))[-1]["size"] == 600_005


def test_bytes_without_a_note_tell_nobody(pair: Pair) -> None:
    source, target, peer = pair
    source.ask("fill", seed=5, start=0, stop=MIB)
    number = source.ask("write", peer=peer, runs=[[0, 0, MIB]], note="")
    assert source.wait_for(is_end(number))[-1]["kind"] == "Written"
    assert target.ask("equals", seed=5, start=0, stop=MIB)
    source.ask("write", peer=peer, runs=[], note="end")
    assert "" not in [e["note"] for e in target.wait_for(is_note("end"))]


def test_a_prepared_write_moves_what_is_there_when_it_is_posted(pair: Pair) -> None:
    source, target, peer = pair
    source.ask("fill", seed=6, start=0, stop=MIB)
    source.ask("prepare", peer=peer, runs=[[0, 4096, MIB]])
    target.ask("set", value=7, start=0, stop=2 * MIB)
    source.ask("fill", seed=7, start=0, stop=MIB)
    for note in ("prepared", "and once more"):  # the second time there is nothing ready for it
        number = source.ask("write_prepared", peer=peer, note=note)
        target.wait_for(is_note(note))
        assert source.wait_for(is_end(number))[-1]["kind"] == "Written"
        assert target.ask("equals", seed=7, start=4096, stop=4096 + MIB)
    assert target.ask("changed", value=7, start=0, stop=4096) == 0


def test_what_was_prepared_for_a_peer_ends_with_its_connection(pair: Pair) -> None:
    source, target, peer = pair
    source.ask("prepare", peer=peer, runs=[[0, 0, 64]])
    source.ask("disconnect", peer=peer)
    with pytest.raises(ChildError, match="not connected"):
        source.ask("write_prepared", peer=peer, note="late")
    assert source.ask("connect", card=target.ask("card")) == peer
    source.ask("write_prepared", peer=peer, note="with the new one")
    target.wait_for(is_note("with the new one"))


def test_poll_never_waits_even_for_a_stopped_peer(pair: Pair) -> None:
    source, target, peer = pair
    assert source.ask("polls", count=200) < 0.5  # nothing to do; the bound is for a busy machine
    target.signal(signal.SIGSTOP)
    try:
        source.ask("write", peer=peer, runs=[[0, 0, 32 * MIB]], note="slow")
        assert source.ask("polls", count=50) < 0.5
    finally:
        target.signal(signal.SIGCONT)
    target.wait_for(is_note("slow"))


def test_the_lane_is_known_after_a_write(pair: Pair, kind: str) -> None:
    source, _, peer = pair
    lane = source.ask("lanes")[peer]
    assert {"local": "shared memory", "nixl-tcp": "tcp"}.get(kind, "/") in lane
    assert lane != "unknown"


def test_starting_moves_no_thread_and_leaves_no_settings_in_the_environment(pair: Pair) -> None:
    found = pair[0].ask("surroundings")
    assert found["ucx"] == sorted(n for n in os.environ if n.startswith(("UCX_", "NIXL_")))
    assert found["threads"] == [sorted(os.sched_getaffinity(0))] * len(found["threads"])


def test_a_write_to_an_address_that_is_not_registered_is_refused(pair: Pair) -> None:
    source, _, peer = pair
    with pytest.raises(ChildError):
        source.ask("write", peer=peer, runs=[[0, 1 << 40, 64]], note="nowhere")
    source.ask("check")


def test_after_disconnect_nothing_is_written_until_connected_again(pair: Pair) -> None:
    source, target, peer = pair
    source.ask("disconnect", peer=peer)
    with pytest.raises(ChildError, match="not connected"):
        source.ask("write", peer=peer, runs=[[0, 0, 64]], note="late")
    assert source.ask("connect", card=target.ask("card")) == peer
    source.ask("write", peer=peer, runs=[[0, 0, 64]], note="again")
    target.wait_for(is_note("again"))


def test_a_peer_that_dies_breaks_its_writes_and_leaves_nothing_behind(own_pair: Pair) -> None:
    source, target, peer = own_pair
    before = set(os.listdir("/dev/shm")), set(os.listdir("/tmp"))
    first = source.ask("write", peer=peer, runs=[[0, 0, MIB]], note="x")
    source.wait_for(is_end(first))
    target.signal(signal.SIGSTOP)  # so that the next write is under way when its peer dies
    number = source.ask("write", peer=peer, runs=[[0, 0, 90 * MIB]], note="x")
    target.kill()
    assert source.wait_for(is_end(number), timeout_s=10.0)
    assert late_write(source, peer) in ("refused", "Broken")
    source.ask("check")
    assert source.ask("polls", count=10) < 0.5
    source.kill()
    assert set(os.listdir("/dev/shm")) <= before[0]
    assert not [f for f in set(os.listdir("/tmp")) - before[1] if "ucx" in f or "splitserve" in f]
    assert source.engine not in Path("/proc/net/unix").read_text()


def test_close_gives_everything_back_and_check_finds_what_is_not(pair: Pair) -> None:
    source, target, peer = pair
    source.ask("write", peer=peer, runs=[[0, 0, MIB]], note="x")
    target.wait_for(is_note("x"))
    assert source.ask("leak") != ""
    left = target.ask("close")
    assert left["shm"] == []
    assert [
        f for f in left["fds"] if f.startswith("socket:") or ("splitserve-" in f and "ucx-log" not in f)
    ] == []
