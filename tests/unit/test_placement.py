"""Placement: a pure function, so its rules are tried on machines and deployments made up at random."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.errors import ConfigError
from splitserve.launch import topology
from splitserve.launch.commands import fill
from splitserve.launch.deployment import Deployment, load, parse
from splitserve.launch.placement import explain, place
from splitserve.launch.procs import ProcSpec
from splitserve.launch.topology import Core, Gpu, Node, Topology
from splitserve.numa import share_of


def machine(
    nodes: int = 1, cores: int = 2, threads: int = 1, *, quota: float = 0.0, gpus: int = 0
) -> Topology:
    """`nodes` x `cores` x `threads`, siblings numbered as Linux does: all first threads, then all second ones."""
    total = nodes * cores
    return Topology(
        cores=tuple(
            Core(n, n, c, tuple(n * cores + c + t * total for t in range(threads)))
            for n in range(nodes)
            for c in range(cores)
        ),
        nodes=tuple(Node(n, 1 << 34, 1 << 33) for n in range(nodes)),
        gpus=tuple(Gpu(i, "gpu", f"u{i}", 1, 1, f"0000:{i:02x}:00.0", i % nodes) for i in range(gpus)),
        cpu_quota=quota,
        memory_total=1 << 34,
        memory_free=1 << 33,
        shm_free=1 << 30,
    )


def deployment(**sections: Any) -> Deployment:
    tables = {"deployment": {"model": "m"}, **(sections or {"prefill": {}, "decode": {}})}
    return parse(tables, "file x.toml", environ={})


def engines(specs: list[ProcSpec]) -> list[ProcSpec]:
    return [s for s in specs if s.role != "router"]


def test_two_cores_one_each_and_the_router_floats():
    specs = place(machine(), deployment())
    assert [(s.name, s.stage, s.cpus, s.front_cpus) for s in specs] == [
        ("prefill-0", 0, (0,), (0, 1)),
        ("decode-0", 0, (1,), (0, 1)),
        ("router", 1, (), (0, 1)),
    ]
    assert any("floats over cpus 0,1" in line for line in explain(specs))


def test_prefill_and_decode_get_a_node_each():
    prefill, decode, router = place(machine(nodes=2, cores=4), deployment())
    assert (prefill.cpus, prefill.memory_node) == ((0, 1, 2), 0)
    assert (decode.cpus, decode.memory_node) == ((4, 5, 6), 1)
    assert router.front_cpus == (3, 7)


def test_hyperthreads_of_computing_cores_are_left_to_the_fronts():
    prefill, decode, router = place(machine(cores=2, threads=2), deployment())
    assert (prefill.cpus, decode.cpus, router.front_cpus) == ((0,), (1,), (2, 3))
    assert prefill.env["OMP_NUM_THREADS"] == "1"


def test_too_few_cores_are_shared_and_said():
    specs = place(machine(cores=1), deployment())
    assert [s.cpus for s in specs] == [(0,), (0,), ()]
    assert sum("share" in line and "1 cores for 2 ranks" in line for line in explain(specs)) == 2


def test_a_quota_bounds_the_cores():
    specs = place(machine(cores=16, quota=4.0), deployment())
    assert sum(len(s.cpus) for s in specs) == 4
    assert "quota of 4" in " ".join(explain(specs))


def test_named_cpus_are_kept_and_no_other_engine_gets_them():
    d = deployment(prefill={"cpus": [1]}, decode={"replicas": 2})
    prefill, *decodes, _ = place(machine(cores=4), d)
    assert prefill.cpus == (1,)
    assert all(1 not in s.cpus for s in decodes)


def test_named_cpus_are_shared_out_among_replicas():
    d = deployment(prefill={"cpus": "0-3", "replicas": 2}, decode={})
    specs = place(machine(cores=8), d)
    assert [s.cpus for s in specs[:2]] == [(0, 1), (2, 3)]


def test_cpus_outside_the_cpuset_are_refused():
    with pytest.raises(ConfigError, match="cpus 7 are not among") as caught:
        place(machine(), deployment(prefill={"cpus": [7]}, decode={}))
    assert "splitserve topology" in (caught.value.fix or "")


def test_gpus_go_round_once_and_a_missing_one_is_said():
    d = deployment(engine={"device": "cuda", "tp": 2}, prefill={}, decode={})
    specs = place(machine(nodes=2, cores=8, gpus=4), d)
    assert [s.gpus for s in specs] == [(0, 2), (1, 3), ()]
    assert specs[0].env["CUDA_VISIBLE_DEVICES"] == "0,2"
    assert (
        specs[0].env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    )  # else CUDA counts the fastest first, NVML by the bus
    with pytest.raises(ConfigError, match="4 GPU ranks but 3 GPUs"):
        place(machine(gpus=3), d)


def test_a_gpu_that_is_named_twice_is_shared_and_each_says_what_it_may_have():
    wish = {"device": "cuda", "tp": 2, "gpus": [1, 1], "memory_mb": 100}
    specs = place(machine(cores=8, gpus=2), deployment(prefill=wish, decode=wish))
    for spec in specs[:2]:
        assert spec.gpus == (1, 1)
        assert spec.env["CUDA_VISIBLE_DEVICES"] == "1"
        words = list(spec.argv)
        assert words[words.index("--gpus") + 1] == "0,0"
    with pytest.raises(ConfigError, match=r"gpu 1 is named 4 times \(decode-0,prefill-0\)") as e:
        place(machine(gpus=2), deployment(prefill={**wish, "memory_mb": 0}, decode=wish))
    assert e.value.field == "memory_mb"


def test_gpus_that_nvml_does_not_tell_of_are_missed_with_its_reason():
    told = "nvidia-ml-py is not installed"
    for wish in ({"device": "cuda"}, {"device": "cuda", "gpus": [0]}):
        with pytest.raises(ConfigError, match=f"0 GPUs here: {told}"):
            place(replace(machine(), no_gpus=told), deployment(unified=wish))
    with pytest.raises(ConfigError, match=r"0 GPUs here$"):  # a machine that was made up, or an older file
        place(machine(), deployment(unified={"device": "cuda"}))


def test_the_routers_command_names_every_engine_and_wished_ports_count_up():
    d = deployment(prefill={"replicas": 2}, decode={}, server={"port": 9000})
    specs = place(machine(cores=4), d)
    assert [w.port for s in engines(specs) for w in s.ports if w.key == "http"] == [9000, 9001, 9002]
    ports = {f"{s.name}.{w.key}": w.port or 7000 + i for i, s in enumerate(specs) for w in s.ports}
    words = " ".join(fill(specs[-1].argv, ports))
    assert "--prefill http://127.0.0.1:9000,7000 --prefill http://127.0.0.1:9001,7001" in words
    assert "--decode http://127.0.0.1:9002" in words


def test_a_server_bound_everywhere_is_reached_by_loopback_and_a_bound_address_may_be_named():
    everywhere = place(machine(), deployment(prefill={}, decode={}, server={"host": "0.0.0.0"}))
    assert "--decode http://127.0.0.1:{decode-0.http}" in " ".join(everywhere[-1].argv)
    one = place(machine(), deployment(prefill={}, decode={}, server={"host": "10.1.2.3"}))
    assert "--allow-hosts 10.1.2.3" in " ".join(one[1].argv)


machines = st.builds(
    machine,
    st.integers(1, 4),
    st.integers(1, 16),
    st.integers(1, 2),
    quota=st.sampled_from([0.0, 0.5, 1.0, 3.0, 7.5]),
)
pairs = st.builds(
    lambda p, d, tp, tq: deployment(prefill={"replicas": p, "tp": tp}, decode={"replicas": d, "tp": tq}),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3]),
)


@given(machines, pairs)
def test_no_core_computes_twice_while_there_are_enough(t: Topology, d: Deployment):
    specs = place(t, d)
    ranks = sum(g.replicas * g.engine.tp for g in d.groups)
    usable = min(len(t.cores), max(1, int(t.cpu_quota))) if t.cpu_quota else len(t.cores)
    core_of = {cpu: core for core in t.cores for cpu in core.cpus}
    used = Counter(core_of[cpu] for s in specs for cpu in s.cpus)
    assert all(cpu in t.cpus for s in specs for cpu in (*s.cpus, *s.front_cpus))
    assert all(s.front_cpus for s in specs)
    assert all(s.cpus for s in engines(specs))
    if usable >= ranks:
        assert max(used.values()) == 1
        tp = {s.name: next(g.engine.tp for g in d.groups if g.role == s.role) for s in engines(specs)}
        assert len({len(s.cpus) / tp[s.name] for s in engines(specs)}) == 1  # equal shares for every rank
        assert all(len(s.cpus) % tp[s.name] == 0 for s in engines(specs))
    else:
        assert any("share" in line for line in explain(specs))
    assert place(t, d) == specs


TOPOLOGIES = Path(__file__).parents[1] / "fixtures" / "topologies"
DEPLOY = Path(__file__).parents[2] / "deploy"


def test_the_box_of_eight_is_split_along_its_memory_nodes():
    machine = topology.load(TOPOLOGIES / "rtx-pro-6000-x8.json")
    prefill, decode, router = place(machine, load(str(DEPLOY / "rtx-pro-6000-x8.toml")))
    assert (prefill.gpus, prefill.memory_node, prefill.memory) == ((0, 1, 2, 3), 0, "bind:0")
    assert (decode.gpus, decode.memory_node, decode.memory) == ((4, 5, 6, 7), 1, "bind:1")
    assert prefill.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert {c.node for c in machine.cores if set(c.cpus) & set(prefill.cpus)} == {0}
    assert {c.node for c in machine.cores if set(c.cpus) & set(decode.cpus)} == {1}
    assert len(prefill.cpus) == len(decode.cpus) == 28
    assert router.ports[0].port == 8000


def planned(file: str, machine: Topology) -> list[ProcSpec]:
    return place(machine, load(str(DEPLOY / f"rtx-pro-6000-x8-{file}.toml"), environ={}))


def nodes_of(machine: Topology, cpus: tuple[int, ...]) -> set[int]:
    return {c.node for c in machine.cores if set(c.cpus) & set(cpus)}


def test_tp8_over_both_halves_gives_each_rank_cores_beside_its_gpu():
    machine = topology.load(TOPOLOGIES / "rtx-pro-6000-x8.json")
    engine, router = planned("tp8", machine)
    assert (engine.gpus, engine.memory_node, engine.memory) == (tuple(range(8)), None, "default")
    node_of = {g.index: g.node for g in machine.gpus}
    for rank, gpu in enumerate(engine.gpus):
        assert nodes_of(machine, share_of(engine.cpus, rank, 8)) == {node_of[gpu]}
    assert len(engine.cpus) == 56
    assert router.ports[0].port == 8000


def test_two_replicas_get_a_half_of_the_box_each():
    machine = topology.load(TOPOLOGIES / "rtx-pro-6000-x8.json")
    *replicas, router = planned("2xtp4", machine)
    assert [(s.name, s.gpus, s.memory) for s in replicas] == [
        ("unified-0", (0, 1, 2, 3), "bind:0"),
        ("unified-1", (4, 5, 6, 7), "bind:1"),
    ]
    assert [nodes_of(machine, s.cpus) for s in replicas] == [{0}, {1}]
    assert router.argv.count("--worker") == 2


def test_2p2d_has_prefill_on_one_half_and_decode_on_the_other():
    machine = topology.load(TOPOLOGIES / "rtx-pro-6000-x8.json")
    *pairs, router = planned("2p2d", machine)
    assert [(s.name, s.gpus, s.memory) for s in pairs] == [
        ("prefill-0", (0, 1), "bind:0"),
        ("prefill-1", (2, 3), "bind:0"),
        ("decode-0", (4, 5), "bind:1"),
        ("decode-1", (6, 7), "bind:1"),
    ]
    assert [nodes_of(machine, s.cpus) for s in pairs] == [{0}, {0}, {1}, {1}]
    assert max(Counter(cpu for s in pairs for cpu in s.cpus).values()) == 1
    assert (router.argv.count("--prefill"), router.argv.count("--decode")) == (2, 2)


@pytest.mark.parametrize("file", ["tp8", "2xtp4", "2p2d"])
def test_the_box_of_eights_files_ask_for_more_than_four_cards(file: str):
    with pytest.raises(ConfigError, match="8 GPU ranks but 4 GPUs"):
        planned(file, topology.load(TOPOLOGIES / "rtx-4090-x4.json"))


@pytest.mark.parametrize("swapped", [False, True])
def test_cores_and_memory_follow_the_gpus(swapped: bool):
    machine = topology.load(TOPOLOGIES / "rtx-pro-6000-x8.json")
    engine = {"device": "cuda", "tp": 4}
    wish = (
        {"prefill": {**engine, "node": 1}, "decode": engine}
        if swapped
        else {"prefill": engine, "decode": engine}
    )
    prefill, decode, _ = place(machine, deployment(**wish))
    assert (prefill.memory_node, decode.memory_node) == ((1, 0) if swapped else (0, 1))
    for spec in (prefill, decode):
        near = {g.index for g in machine.gpus if g.node == spec.memory_node}
        assert set(spec.gpus) == near


def test_what_the_machine_does_not_have_is_refused_by_name():
    machine = topology.load(TOPOLOGIES / "rtx-4090-x4.json")
    cuda = {"device": "cuda", "tp": 2}
    for wish, field in (
        ({**cuda, "gpus": [0, 9]}, "gpus"),
        ({**cuda, "gpus": [0]}, "gpus"),
        ({"node": 2}, "node"),
        ({"device": "cuda", "tp": 4}, "device"),
    ):
        with pytest.raises(ConfigError) as e:
            place(machine, deployment(prefill=wish, decode=cuda))
        assert (e.value.field, bool(e.value.fix)) == (field, True)


@pytest.mark.parametrize("policy", ["bind", "prefer", "interleave", "none"])
def test_a_named_memory_policy_is_kept(policy: str):
    specs = place(machine(nodes=2, cores=4), deployment(prefill={"memory_bind": policy}, decode={}))
    assert specs[0].memory == {"interleave": "interleave:0-1", "none": "default"}.get(policy, f"{policy}:0")
    assert specs[1].memory == "bind:1"


def test_a_file_that_is_no_topology_is_refused(tmp_path: Path):
    for text in ("", "{}", '{"cores": 3}'):
        (tmp_path / "t.json").write_text(text)
        with pytest.raises(ConfigError, match="is no topology"):
            topology.load(tmp_path / "t.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        topology.load(tmp_path / "absent.json")
