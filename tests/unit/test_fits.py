"""Memory and cores that are not there: refused with the sum before anything starts, on machines made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doctor_facts import GIB, LAPTOP, box

from splitserve import cli
from splitserve.errors import CapacityError, ConfigError
from splitserve.launch import topology
from splitserve.launch.deployment import Deployment, parse
from splitserve.launch.fits import Footprint, check_memory, check_quota
from splitserve.launch.placement import place
from splitserve.launch.topology import Topology

DEMO = str(Path(__file__).parents[2] / "deploy" / "demo.toml")


def deployment(**sections: Any) -> Deployment:
    return parse({"deployment": {"model": "m"}, **sections}, "file x.toml", environ={})


def host(**changes: Any) -> Topology:
    return replace(LAPTOP.topology, **changes)


def fit(machine: Topology, footprint: Footprint, **sections: Any) -> None:
    d = deployment(**sections)
    check_memory(machine, place(machine, d), {str(g.role): footprint for g in d.groups})


def test_engines_of_one_host_are_added_up():
    two = {"prefill": {}, "decode": {"replicas": 2}}
    fit(host(memory_free=30 * GIB), Footprint(8 * GIB, 2 * GIB), **two)
    with pytest.raises(CapacityError) as caught:
        fit(host(memory_free=29 * GIB), Footprint(8 * GIB, 2 * GIB), **two)
    assert caught.value.message == (
        "at least 30.0 GiB of memory are needed together: prefill-0 8.0 GiB weights + 2.0 GiB state; "
        "decode-0 8.0 GiB weights + 2.0 GiB state; decode-1 8.0 GiB weights + 2.0 GiB state; "
        "29.0 GiB are free of 32.0 GiB (a cgroup's memory.max counts)"
    )
    assert "memory.max" in (caught.value.fix or "")


def test_state_counts_once_for_each_rank_and_weights_for_each_engine():
    with pytest.raises(CapacityError, match=r"at least 26\.0 GiB .* 6\.0 GiB weights \+ 4 x 5\.0 GiB state"):
        fit(host(), Footprint(6 * GIB, 5 * GIB), unified={"tp": 4})


def test_a_gpu_that_cannot_hold_its_part_of_the_weights():
    cuda = {"device": "cuda", "tp": 2}
    fit(box().topology, Footprint(150 * GIB, 20 * GIB), prefill=cuda, decode=cuda)
    with pytest.raises(
        CapacityError, match=r"gpu 0 has 96\.0 GiB, and at least 98\.0 GiB .* prefill-0 98\.0"
    ) as caught:
        fit(box().topology, Footprint(156 * GIB, 20 * GIB), prefill=cuda, decode=cuda)
    assert "raise tp" in (caught.value.fix or "")
    fit(box().topology, Footprint(156 * GIB, 20 * GIB), unified={"device": "cuda", "tp": 4})


def test_engines_that_share_a_gpu_are_added_up():
    shared = {"device": "cuda", "gpus": [0], "memory_mb": 1000}
    with pytest.raises(
        CapacityError, match=r"at least 100\.0 GiB .* prefill-0 50\.0 GiB; a rank of decode-0 50\.0"
    ):
        fit(box().topology, Footprint(40 * GIB, 10 * GIB), prefill=shared, decode=shared)


def test_other_engines_answer_for_themselves():
    check_memory(host(memory_free=1), place(host(), deployment(prefill={}, decode={})), {})


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"prefill": {"cpus": [0, 1]}, "decode": {"cpus": [2, 3]}},
            "4 cpus are asked for, .* cpu.max pays for 2.5",
        ),
        ({"engine": {"threads": 2}, "prefill": {}, "decode": {}}, "4 threads are asked for"),
    ],
)
def test_cpus_and_threads_beyond_the_quota_are_refused(sections: dict[str, Any], says: str):
    check_quota(host(), deployment(**sections))
    check_quota(host(cpu_quota=4.0), deployment(**sections))
    with pytest.raises(ConfigError, match=says) as caught:
        check_quota(host(cpu_quota=2.5), deployment(**sections))
    assert "docker: --cpus=4" in (caught.value.fix or "")


@pytest.mark.parametrize(
    ("changes", "words", "says"),
    [
        ({"memory_free": 300 << 20}, ("engine.memory_mb=150",), "needed together: prefill-0 0.1 GiB weights"),
        ({"memory_free": 100 << 20}, ("engine.memory_mb=150",), "free memory 104,857,600"),
        ({"cpu_quota": 1.0}, ("prefill.cpus=0", "decode.cpus=1"), "cpu.max pays for 1"),
        ({}, ("server.host=192.0.2.1",), "cannot bind to '192.0.2.1'"),
        ({}, ("transfer.bootstrap_host=no.such.host.invalid",), "cannot bind to 'no.such.host.invalid'"),
    ],
)
def test_up_says_so_and_starts_nothing(
    changes: dict[str, Any],
    words: tuple[str, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
):
    """A cgroup's limits come in through the topology; an address that is not this host's comes out of the ports."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(topology, "read", lambda: host(**changes))
    assert (
        cli.main(["up", DEMO, *(w for word in words for w in ("--set", word)), "--set", "router.port=0"]) == 2
    )
    told = capsys.readouterr().err
    assert says in told
    assert "\nfix: " in told
    assert not list(tmp_path.rglob("prefill-0.log")), "a process was started"
