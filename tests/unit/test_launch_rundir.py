"""Run directories, logs and process identities: private, exclusive, and cleaned by whoever comes next."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from splitserve.errors import ConfigError
from splitserve.launch import children, logs
from splitserve.launch.identity import Identity
from splitserve.launch.rundir import RunDir, names, root


def sleeper() -> subprocess.Popen[bytes]:
    """A process of its own group whose command line names us, waiting for ever."""
    words = [sys.executable, "-c", "import signal; print('on', flush=True); signal.pause()", "splitserve"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, process_group=0)
    assert process.stdout
    assert process.stdout.readline() == b"on\n"
    return process


@pytest.fixture
def where(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def test_it_is_private_and_removed(where: Path):
    run = RunDir("d", where=where)
    run.acquire()
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert run.running()
    assert names(where) == ["d"]
    run.release()
    assert names(where) == []
    assert not run.running()


def test_a_second_of_the_same_name_is_refused(where: Path):
    first = RunDir("d", where=where)
    first.acquire()
    first.write_state({"supervisor": {"pid": 4711}})
    with pytest.raises(ConfigError, match=r"'d' is already up \(supervisor pid 4711\)") as caught:
        RunDir("d", where=where).acquire()
    assert "splitserve down d" in (caught.value.fix or "")
    first.release()
    RunDir("d", where=where).acquire()


def test_what_a_killed_supervisor_left_is_ended_and_removed(where: Path):
    with sleeper() as child:
        who = Identity.of(child.pid)
        assert who
        run = RunDir("d", where=where)
        run.acquire()
        run.write_state({"processes": [{"name": "decode-0", **asdict(who)}]})
        run.log("decode-0").write_text("its last word\n")
        assert run._lock is not None
        os.close(run._lock)  # as the kernel does when the supervisor is killed
        assert RunDir("d", where=where).clean() == [f"decode-0 (pid {child.pid})"]
        assert child.wait(5) == -signal.SIGKILL
        assert [p.name for p in run.path.iterdir()] == ["logs"]
        assert RunDir("d", where=where).clean() == []


def test_what_has_died_with_its_supervisor_is_not_said_to_have_been_ended():
    with sleeper() as child:
        who = Identity.of(child.pid)
        assert who
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie, until the block's end reaps it
        assert who.exists
        assert who.kill_group() == []


def test_a_reused_pid_is_left_alone(where: Path):
    with sleeper() as stranger:
        who = Identity.of(stranger.pid)
        assert who
        run = RunDir("d", where=where)
        run.acquire()
        run.write_state({"processes": [{"name": "decode-0", "pid": who.pid, "start": who.start - 1}]})
        assert run._lock is not None
        os.close(run._lock)
        RunDir("d", where=where).clean()
        assert stranger.poll() is None
        stranger.kill()


def test_a_running_one_is_not_cleaned(where: Path):
    run = RunDir("d", where=where)
    run.acquire()
    assert RunDir("d", where=where).clean() == []
    assert run.path.is_dir()


def test_logs_are_kept_when_asked(where: Path):
    run = RunDir("d", where=where)
    run.acquire()
    run.log("decode-0").write_text("why\n")
    run.write_state({})
    run.release(keep_logs=True)
    assert [p.name for p in run.path.iterdir()] == ["logs"]
    assert not run.running()


@pytest.mark.parametrize("opened", [(), ("supervisor",)])
def test_a_start_that_was_refused_leaves_no_directory(where: Path, opened: tuple[str, ...]):
    run_dir = RunDir("demo", where=where)
    run_dir.acquire()
    for name in opened:
        run_dir.log(name).touch()
    run_dir.release(keep_logs=True)
    assert list(where.iterdir()) == []


def test_a_place_that_others_may_enter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "splitserve").mkdir(mode=0o755)
    (tmp_path / "splitserve").chmod(0o755)
    with pytest.raises(ConfigError, match="not a directory of yours"):
        root()
    (tmp_path / "splitserve").rmdir()
    (tmp_path / "splitserve").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="not a directory of yours"):
        root()


def test_a_name_too_long_for_a_socket_is_told(where: Path):
    with pytest.raises(ConfigError, match="107 bytes"):
        RunDir("d" * 120, where=where).acquire()


def test_a_log_is_cut_and_its_end_kept(tmp_path: Path):
    log = tmp_path / "x.log"
    log.write_text("".join(f"line {i}\n" for i in range(1000)))
    assert logs.bound(log, 2000)
    assert not logs.bound(log, 2000)
    assert log.stat().st_size == 0
    kept = (tmp_path / "x.log.1").read_text().splitlines()
    assert kept[-1] == "line 999"
    assert kept[0].startswith("line ")
    with log.open("a") as still_open:
        still_open.write("more\n")
    assert logs.tail(log, 5) == ["more"]


def test_a_log_is_cut_even_where_its_copy_finds_no_room(tmp_path: Path):
    log = tmp_path / "x.log"
    log.write_bytes(b"line\n" * 1000)
    (tmp_path / "x.log.1").mkdir()  # writing there fails, as on a full disk
    assert logs.bound(log, 1000)
    assert log.stat().st_size == 0


def test_a_child_starts_although_its_log_takes_no_word():
    alive = children.AlivePipe()
    line = ("/bin/sh", "-c", "exit 3")
    cpus = tuple(os.sched_getaffinity(0))
    child = children.start((), Path("/dev/full"), alive=alive, cpus=cpus, env={}, command=line)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert child.reap() == 3
    assert child.popen.stdout
    child.popen.stdout.close()
    alive.close()


def test_a_follower_sees_each_line_once_even_across_a_cut(tmp_path: Path):
    log = tmp_path / "x.log"
    log.write_text("old\n")
    follower = logs.Follower(log)
    with log.open("a") as f:
        f.write("a\nhal")
        f.flush()
        assert list(follower.new_lines()) == ["a"]
        f.write("f\n")
        f.flush()
        assert list(follower.new_lines()) == ["half"]
        assert list(follower.new_lines()) == []
        logs.bound(log, 5)
        f.write("new\n")
        f.flush()
        assert list(follower.new_lines()) == ["new"]


def test_tail_of_no_file_is_empty(tmp_path: Path):
    assert logs.tail(tmp_path / "no.log", 5) == []


@pytest.mark.parametrize("num", [0, 1, 3, 10, 99, 1000])
@pytest.mark.parametrize("block", [1, 64, 1 << 16])
def test_a_tail_has_exactly_the_last_lines_however_long_they_are(tmp_path: Path, num: int, block: int):
    lines = [f"line {i} " + "x" * (7 * i % 50) for i in range(100)]
    (tmp_path / "x.log").write_text("\n".join(lines) + "\n")
    assert logs.tail(tmp_path / "x.log", num, block=block) == (lines[-num:] if num else [])


def test_all_that_is_kept_of_a_log_begins_with_its_older_part(tmp_path: Path):
    log = tmp_path / "x.log"
    assert logs.whole(log) == []
    log.write_text("".join(f"{i}\n" for i in range(10)))
    logs.bound(log, 12)
    log.write_text("new\n")
    assert logs.whole(log) == ["8", "9", "new"]


def test_an_identity_knows_its_process_from_the_next_of_that_pid():
    with sleeper() as child:
        who = Identity.of(child.pid)
        assert who
        assert who.alive
        assert not Identity(who.pid, who.start + 1).alive
        assert not who.wait_gone(0.01)
        child.kill()
        assert who.wait_gone(5.0)
        assert not who.alive  # a zombie cannot write any more
        assert who.exists
    assert not who.exists
    assert Identity.of(who.pid) != who


def test_members_left_by_a_dead_leader_are_killed_with_its_group():
    member_words = "[sys.executable, '-c', 'import signal; signal.pause()', 'splitserve']"
    script = f"import subprocess, sys; subprocess.Popen({member_words})"
    leader = subprocess.Popen(
        [sys.executable, "-c", script + "; print('on', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
    )
    with leader:
        assert leader.stdout
        leader.stdout.readline()
        who = Identity.of(leader.pid)
        assert who
        leader.kill()
    assert not who.exists
    (member,) = who.kill_group()
    left = Identity.of(member)
    assert left is None or left.wait_gone(5.0)


def test_logs_are_merged_by_time_across_midnight_and_lines_without_one_stay_behind_theirs():
    tails = {
        "decode-0": ["$ command", "23:59:59.100 I decode-0/0 a: late", "00:00:01.200 I decode-0/0 a: early"],
        "prefill-0": [
            "00:00:01.100 W prefill-0 b: trouble",
            "  | with more lines",
            "00:00:01.300 I prefill-0 b: over",
        ],
        "vllm": ["INFO 11-30 00:00:01 [core.py:1] said", "no time at 00:00:00 here" + "x" * 40],
    }
    lines = [line for _, line in logs.merged(tails, "00:00:02")]
    assert lines == [
        "$ command",
        "23:59:59.100 I decode-0/0 a: late",
        "no time at 00:00:00 here" + "x" * 40,
        "INFO 11-30 00:00:01 [core.py:1] said",
        "00:00:01.100 W prefill-0 b: trouble",
        "  | with more lines",
        "00:00:01.200 I decode-0/0 a: early",
        "00:00:01.300 I prefill-0 b: over",
    ]
    assert logs.merged({}, "00:00:00") == []


def test_state_is_for_its_owner_alone_whatever_the_umask(where: Path):
    run_dir = RunDir("demo", where=where)
    run_dir.acquire()
    before = os.umask(0)
    try:
        run_dir.write_state({"name": "demo"})
    finally:
        os.umask(before)
    assert (run_dir.path / "state.json").stat().st_mode & 0o777 == 0o600
    run_dir.release()
