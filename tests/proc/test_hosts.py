"""Several hosts: crews and relays on Ray's local cluster of two nodes, started, killed and stopped by the command line."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stub_splitserve import PROGRAM
from test_supervisor import Shell, is_free, ports, shell, until

from splitserve.launch import rundir
from splitserve.launch.hosts import cluster as joining
from splitserve.launch.hosts.crew import Crew
from splitserve.launch.hosts.relay import wait_for_end
from splitserve.launch.identity import Identity, parent_of
from tests.proc.fake_vllm import installation
from tests.proc.real import Deployment
from tests.proc.real import until as patiently
from tests.proc.test_foreign_faults import FILE as FOREIGN
from tests.proc.test_foreign_faults import tree
from tests.tiny_chat import write_chat_checkpoint

__all__ = ["shell"]

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is an extra: pip install 'splitserve[ray]'"
)


# ------------------------------------------------------------------ a crew, without Ray


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew]:
    home = tempfile.mkdtemp(prefix="ss-")  # short: a socket's path has 107 bytes at most
    monkeypatch.setenv("XDG_RUNTIME_DIR", home)
    monkeypatch.setattr("splitserve.launch.children.adopt_orphans", lambda: None)  # tests adopt nobody
    made = Crew("d-host", PROGRAM)
    yield made
    made.close()
    assert list((rundir.root() / ".hosts").iterdir()) == []
    shutil.rmtree(home)


def start(crew: Crew, model: str, name: str = "decode-0") -> int:
    wish = (f"{name}.http", "127.0.0.1", 0)
    port = crew.claim([wish])[wish[0]]
    words = ["serve", model, "--port", str(port)]
    return crew.start(name, words, {}, sorted(os.sched_getaffinity(0)), [(wish[0], wish[1], port)])


def said(crew: Crew, name: str, what: str) -> dict[str, Any]:
    """The first message with this key."""
    end = time.monotonic() + 20.0
    while time.monotonic() < end:
        told = crew.poll(name, 0.5)
        for line in told["lines"]:
            if line.startswith("{") and what in json.loads(line):
                return dict(json.loads(line))
        assert told["code"] is None, told
    raise AssertionError(f"{name} never said {what}")


def ended(crew: Crew, name: str) -> int:
    return int(until("it ends", lambda: [c for c in [crew.poll(name, 0.5)["code"]] if c is not None])[0])


def test_a_crew_starts_watches_and_ends_a_process(crew: Crew) -> None:
    pid = start(crew, "ok")
    assert said(crew, "decode-0", "ready")["ready"]
    crew.signal("decode-0", signal.SIGTERM)
    assert ended(crew, "decode-0") == 0
    again = start(crew, "ok", "prefill-0")
    assert again != pid
    os.kill(again, signal.SIGKILL)
    assert ended(crew, "prefill-0") == -signal.SIGKILL


def test_what_a_killed_crew_left_is_swept_up(crew: Crew) -> None:
    where = rundir.subdirectory(".hosts")
    for name, age_s in (("old", 120.0), ("young", 0.0)):
        (where / name).mkdir(mode=0o700)
        (where / name / "logs").mkdir()
        os.utime(where / name, (time.time() - age_s,) * 2)
    os.utime(where / "d-host", (time.time() - 120.0,) * 2)  # the crew's own, which it holds
    rundir.sweep(where)
    assert sorted(p.name for p in where.iterdir()) == ["d-host", "young"]
    (where / "young" / "logs").rmdir()
    (where / "young").rmdir()


def test_a_crew_describes_its_host(crew: Crew) -> None:
    told = crew.describe()
    assert json.loads(told["topology"])["cores"]
    assert told["version"]


def test_nobody_asks_and_the_process_is_ended(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitserve.launch.hosts.crew.LEASE_S", 0.4)
    start(crew, "ok")
    said(crew, "decode-0", "ready")
    member = crew._members["decode-0"]
    until("it is ended", lambda: member.code == -signal.SIGKILL)


def test_a_pipe_that_somebody_made_non_blocking_has_not_ended() -> None:
    """As a router with uvloop does to the pipe that it shares with all relays."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    waiting = threading.Thread(target=wait_for_end, args=(reader,), daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    os.close(writer)
    waiting.join(5.0)
    assert not waiting.is_alive()
    os.close(reader)


def test_without_ray_the_line_that_installs_it_is_printed(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError\n")
    shell.env["PYTHONPATH"] = str(tmp_path)
    done = shell("up", hosted(shell))
    assert done.returncode == 2
    assert "pip install 'splitserve[ray]'" in done.stderr


def hosted(
    shell: Shell, address: str = "auto", *, prefill: str = "ok", decode: str = "ok", tp: int = 1
) -> str:
    path = Path(shell.file(prefill, decode))
    text = path.read_text().replace("[decode]", f"tp = {tp}\n[decode]\ntp = {tp}")
    path.write_text(f'{text}[hosts]\nbackend = "ray"\naddress = "{address}"\nwait_s = 5\n')
    return str(path)


# ------------------------------------------------------------------ Ray


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    """A cluster of two nodes with one cpu each, all on this machine."""
    joining.load_ray()
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 80 << 20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **small})
    made.add_node(num_cpus=1, object_store_memory=80 << 20)
    yield made
    made.shutdown()


@pytest.fixture
def address(two_nodes: Any) -> str:
    return str(two_nodes.address)


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_pair_on_two_hosts_comes_up_heals_and_goes(shell: Shell, address: str) -> None:
    up = shell.background("up", hosted(shell, address), "--json")
    until("it is up", lambda: (shell.run_dir() / "state.json").exists() and shell.state()["overall"] == "up")
    state = shell.state()
    hosts = {p["name"]: p["host"] for p in state["processes"]}
    assert hosts["router"] == ""
    assert hosts["prefill-0"] != hosts["decode-0"]
    assert "to the log" in shell("logs", "d", "decode-0").stdout
    assert "is pid" in shell("logs", "d", "decode-0").stdout

    # the engine itself dies, on its host
    remote = pid_of(shell, "decode-0")
    os.kill(remote, signal.SIGKILL)
    until("it was started again", lambda: shell.process("decode-0")["restarts"] == 1)
    until("all are ready", lambda: all(p["phase"] == "ready" for p in shell.state()["processes"]))
    assert pid_of(shell, "decode-0") != remote

    # its relay dies: the crew ends what nobody asks after, when the next one starts it at the latest
    os.kill(shell.process("prefill-0")["pid"], signal.SIGKILL)
    until("it was started again", lambda: shell.process("prefill-0")["restarts"] == 1)
    until("all are ready", lambda: all(p["phase"] == "ready" for p in shell.state()["processes"]))

    # its crew dies: Ray makes another, and the engine there is started anew
    crew_pid = parent_of(pid_of(shell, "decode-0"))
    before = shell.process("decode-0")["restarts"]
    os.kill(crew_pid, signal.SIGKILL)
    until("it was started again", lambda: shell.process("decode-0")["restarts"] > before)
    until("all are ready", lambda: all(p["phase"] == "ready" for p in shell.state()["processes"]))
    assert parent_of(pid_of(shell, "decode-0")) != crew_pid

    held = ports(shell.state())
    assert shell("down").returncode == 0
    assert up.wait(30) == 0
    until("ports are free", lambda: all(is_free(port) for port in held))


def pid_of(shell: Shell, process: str) -> int:
    lines = [x for x in shell("logs", "d", process).stdout.splitlines() if f"{process} is pid" in x]
    return int(lines[-1].partition("is pid ")[2].split()[0])


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_dead_supervisor_leaves_nothing_on_any_host(shell: Shell, address: str) -> None:
    up = shell.background("up", hosted(shell, address), "--json")
    until("it is up", lambda: (shell.run_dir() / "state.json").exists() and shell.state()["overall"] == "up")
    remotes = [pid_of(shell, name) for name in ("prefill-0", "decode-0")]
    up.send_signal(signal.SIGKILL)
    until("the engines are gone", lambda: not any(Path(f"/proc/{pid}").exists() for pid in remotes))
    shell("status")


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_no_host_has_room_for_is_an_error_with_the_sum(shell: Shell, address: str) -> None:
    done = shell("up", hosted(shell, address, tp=2))
    assert done.returncode == 2
    assert "prefill-0 wants 2 cores of one host; free:" in done.stderr


@needs_ray
def test_a_cluster_that_nobody_answers_for_is_an_error_at_once(shell: Shell) -> None:
    begun = time.monotonic()
    done = shell("up", hosted(shell, "127.0.0.1:1"), "--dry-run")
    assert done.returncode == 2
    assert "no Ray cluster at 127.0.0.1:1: Connection refused" in done.stderr
    assert "fix: ray start --head" in done.stderr
    assert time.monotonic() - begun < 15.0


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_host_is_examined_before_anything_is_started(address: str, tmp_path: Path) -> None:
    model = write_chat_checkpoint(tmp_path / "tiny")
    d = Deployment(model, name="look")
    text = d.file.read_text() + f'[hosts]\nbackend = "ray"\naddress = "{address}"\n'
    d.file.write_text(text)
    try:
        told = json.loads(d.run("doctor", str(d.file), "--quick", "--json").stdout)["findings"]
        hosts = {f["host"] for f in told if f["subject"] == "torch"}
        (placed,) = [f for f in told if f["subject"] == "placement"]
        assert hosts
        assert (placed["host"], placed["level"]) == ("all hosts", "ok"), placed
        assert "prefill-0 on " in placed["text"]
        assert len([f for f in told if f["subject"] == "python"]) == 2
        assert "all hosts:" in d.run("doctor", str(d.file), "--quick").stdout
        assert d.run("up", str(d.file), "--dry-run").returncode == 0

        d.file.write_text(text.replace(str(model), "/nowhere/m"))
        failed = d.run("doctor", str(d.file), "--quick")
        assert failed.returncode == 1
        assert "FAIL  placement" in failed.stdout
        for words in (("up", "--dry-run"), ("up",)):
            refused = d.run(words[0], str(d.file), *words[1:])
            assert refused.returncode == 2, refused.stdout
            assert "error: host " in refused.stderr
            assert "/nowhere/m" in refused.stderr
    finally:
        d.close()


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_real_engines_on_two_hosts_hand_over_state(address: str, tmp_path: Path) -> None:
    d = Deployment(write_chat_checkpoint(tmp_path / "tiny"), name="far")
    with d.file.open("a") as f:
        f.write(f'[hosts]\nbackend = "ray"\naddress = "{address}"\n')
    try:
        d.up()
        status, answer = d.generate(list(range(6, 70)), 4)
        assert status == 200, answer
        received = d.call("decode-0", "/debug/handoffs")[1]["received"][-1]
        assert received["ok"]
        assert received["bytes"] == received["expected_bytes"] > 0
        shown = d.run("status").stdout
        assert "host" in shown.splitlines()[1]
        assert d.run("verify", str(d.file), timeout_s=200).returncode == 0
    finally:
        d.close()


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_another_engine_on_another_host_comes_back_with_nothing_left_of_it(
    address: str, tmp_path: Path
) -> None:
    d = Deployment(tmp_path, name="v")
    text = FOREIGN.format(python=installation(tmp_path), decodes=1)
    d.file.write_text(f'{text}[hosts]\nbackend = "ray"\naddress = "{address}"\n')
    try:
        d.up()
        old = [Identity.of(pid) for pid in tree(engine_pid(d, "decode-0"))]
        assert len(old) == 3  # attendant, server, engine core
        os.kill(old[1].pid, signal.SIGKILL)  # type: ignore[union-attr]
        until("it is back", lambda: reborn(d, "decode-0"))
        assert not [who for who in old if who and who.alive]
        body = {"prompt": "one two", "max_tokens": 2}
        answered = lambda: d.call("router", "/v1/completions", body)[0] == 200  # noqa: E731
        until("it answers", answered)
    finally:
        d.close()


@pytest.fixture
def three_nodes() -> Iterator[Any]:
    """One cpu each, and a head that gives up nodes within seconds where they do not answer."""
    joining.load_ray()
    from ray.cluster_utils import Cluster

    health = {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 500,
        "health_check_timeout_ms": 500,
        "health_check_failure_threshold": 3,
    }
    small = {"object_store_memory": 80 << 20, "num_cpus": 1}
    made = Cluster(
        initialize_head=True, head_node_args={**small, "include_dashboard": False, "_system_config": health}
    )
    for _ in range(2):
        made.add_node(**small)
    yield made
    made.shutdown()


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_engine_of_a_host_that_is_cut_off_is_ended_there_and_then_moved(
    three_nodes: Any, tmp_path: Path
) -> None:
    """The raylet of its node is stopped, so that Ray gives the node up while crew and engine live on."""
    d = Deployment(write_chat_checkpoint(tmp_path / "tiny"), name="far")
    with d.file.open("a") as f:
        f.write(f'[hosts]\nbackend = "ray"\naddress = "{three_nodes.address}"\n')
    try:
        d.up()
        before = d.process("decode-0")
        prefill = d.process("prefill-0")["pid"]
        old = engine_pid(d, "decode-0")
        cut = next(n for n in three_nodes.list_all_nodes() if n.node_id == before["host"])
        assert cut is not three_nodes.head_node
        raylet = cut.all_processes["raylet"][0].process.pid
        os.kill(raylet, signal.SIGSTOP)
        try:
            patiently("the engine there is ended", lambda: not alive(old), within_s=90.0)
            assert d.process("decode-0")["host"] == before["host"]  # and no sooner is another one made
            moved = lambda: d.process("decode-0")["host"] != before["host"]  # noqa: E731
            patiently("it is moved", moved, within_s=60.0)
            ready = lambda: d.call("router", "/ready")[0] == 200  # noqa: E731
            patiently("a token comes through", ready, within_s=90.0)
        finally:
            os.kill(raylet, signal.SIGCONT)
        status, answer = d.generate(list(range(6, 70)), 4)
        assert status == 200, answer
        workers = {w["worker_type"]: w["url"] for w in d.call("router", "/workers")[1]["workers"]}
        assert workers["decode"] == d.url("decode-0") != before["url"]
        assert d.process("prefill-0")["pid"] == prefill
        loads = json.loads(d.run("status", "--json").stdout)["deployments"][0]["processes"]
        assert all(p["load"] for p in loads if p["role"] != "router")
        assert d.run("restart", "router").returncode == 0
        until("the router is back", lambda: reborn(d, "router"))
        patiently("its next life knows it, too", ready)
        assert d.generate(list(range(6, 70)), 4)[0] == 200
    finally:
        d.close()


def reborn(d: Deployment, process: str) -> bool:
    now = d.process(process)
    return now["restarts"] > 0 and now["phase"] == "ready"


def engine_pid(d: Deployment, process: str) -> int:
    lines = [x for x in d.run("logs", d.name, process).stdout.splitlines() if f"{process} is pid" in x]
    return int(lines[-1].partition("is pid ")[2].split()[0])


def alive(pid: int) -> bool:
    who = Identity.of(pid)
    return who is not None and who.alive


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_host_that_is_gone_is_the_death_of_its_engines(shell: Shell, two_nodes: Any) -> None:
    file = hosted(shell, str(two_nodes.address))
    text = Path(file).read_text().replace("[prefill]", "max_restarts = 0\n[prefill]")
    Path(file).write_text(text)
    up = shell.background("up", file, "--json")
    until("it is up", lambda: (shell.run_dir() / "state.json").exists() and shell.state()["overall"] == "up")
    there = shell.process("decode-0")["host"]
    gone = next(n for n in two_nodes.list_all_nodes() if n.node_id == there)
    assert gone is not two_nodes.head_node, "the first host is where the command runs"
    two_nodes.remove_node(gone, allow_graceful=False)
    try:
        out, err = up.communicate(timeout=60)
        assert up.returncode == 1, out + err
        assert "no decode is left" in err
    finally:
        two_nodes.add_node(num_cpus=1, object_store_memory=80 << 20)
