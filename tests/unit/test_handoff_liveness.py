"""Deaths by pidfd with real processes, silences with a clock that the test moves."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from splitserve.errors import InvariantError
from splitserve.transfer.liveness import Dead, Silent, Watch, host_id, start_ticks
from splitserve.wire import Card


def card(pid: int, **other: Any) -> Card:
    made = Card("list", b"", f"e.{pid}", 0, 1, 4, (), (), host_id(), pid, start_ticks(pid))
    return msgspec.structs.replace(made, **other)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    made = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield made
    made.kill()
    made.communicate()


@pytest.fixture
def watch() -> Iterator[Watch]:
    made = Watch(silence_s=2.0)
    yield made
    made.check()
    made.close()


def test_a_kill_is_known_at_once_and_reported_once(watch: Watch, process: subprocess.Popen[bytes]) -> None:
    watch.add("e", (card(process.pid),))
    assert watch.poll(0.0) == []
    (fd,) = watch.fds()
    process.kill()
    assert select.select([fd], [], [], 5.0)[0] == [fd]  # wakes the engine loop, before anybody has reaped it
    assert watch.poll(0.1) == [Dead("e")]
    assert watch.poll(0.2) == []
    assert (watch.dead("e"), watch.fds()) == (True, [])


def test_an_engine_is_dead_when_its_last_process_is(watch: Watch, process: subprocess.Popen[bytes]) -> None:
    watch.add("e", (card(process.pid), card(os.getpid())))
    process.kill()
    process.wait()
    assert watch.poll(0.0) == []
    assert not watch.dead("e")


def test_a_reused_pid_is_not_the_peer(watch: Watch, process: subprocess.Popen[bytes]) -> None:
    watch.add("e", (card(process.pid, pid_start=start_ticks(process.pid) - 1),))
    assert watch.poll(0.0) == [Dead("e")]
    process.kill()
    process.wait()
    watch.add("gone", (card(process.pid, pid_start=1),))
    assert watch.poll(0.0) == [Dead("gone")]


def test_a_process_of_another_host_or_namespace_is_never_taken_for_dead(watch: Watch) -> None:
    watch.add("far", (card(2**22 - 1, host="another/kernel", pid_start=5),))
    assert watch.poll(0.0) == []
    assert watch.fds() == []


def test_start_ticks_survive_any_process_name() -> None:
    code = (
        "import ctypes; ctypes.CDLL(None).prctl(15, b') 1 2 (x', 0, 0, 0); print('go', flush=True); input()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    assert 0 < start_ticks(process.pid) - start_ticks(os.getpid()) < 10**6
    process.kill()
    process.communicate()
    assert start_ticks(process.pid) == 0


def silences(
    watch: Watch, until: float, *, step: float = 0.25, start: float = 0.0
) -> list[tuple[float, int]]:
    found = []
    now = start
    while now <= until:
        found += [(now, e.count) for e in watch.poll(now) if isinstance(e, Silent)]
        now += step
    return found


def test_silence_counts_only_where_rows_are_at_stake_and_from_the_last_word(watch: Watch) -> None:
    watch.add("far", ())
    assert silences(watch, 10.0) == []
    watch.stake("far", True)
    assert silences(watch, 15.0, start=10.25) == [(12.0, 1), (14.0, 2)]
    watch.heard("far")
    assert silences(watch, 17.0, start=15.25) == [(17.0, 1)]
    watch.stake("far", False)
    assert silences(watch, 30.0, start=17.25) == []


def test_our_own_absence_is_not_the_peers_silence(watch: Watch) -> None:
    watch.add("far", ())
    watch.stake("far", True)
    assert watch.poll(0.0) == []
    assert watch.poll(1000.0) == []  # we were stopped; its words may be waiting to be read
    assert watch.next_deadline(1000.0) == pytest.approx(1001.5)
    assert [e.count for e in watch.poll(1000.5) + watch.poll(1001.0) + watch.poll(1001.5)] == [1]


def test_fencing_asks_once_for_each_living_process_and_proves_nothing(
    process: subprocess.Popen[bytes],
) -> None:
    asked: list[Card] = []
    watch = Watch(silence_s=2.0, fence=asked.append)
    watch.add("e", (card(process.pid), card(os.getpid())))
    assert watch.fence("e")
    assert [c.pid for c in asked] == [process.pid, os.getpid()]
    assert not watch.dead("e")
    assert not watch.fence("nobody")
    watch.close()
    unarmed = Watch(silence_s=2.0)
    unarmed.add("e", (card(process.pid),))
    assert not unarmed.fence("e")
    unarmed.close()
    assert process.poll() is None


def test_check_finds_a_descriptor_of_the_dead(process: subprocess.Popen[bytes]) -> None:
    watch = Watch(silence_s=2.0)
    watch.add("e", (card(process.pid),))
    watch._engines["e"].dead = True
    with pytest.raises(InvariantError, match="is dead and still watched"):
        watch.check()
    watch.close()
