"""Several hosts, planned: engines to hosts, addresses instead of loopback, and the file that ships for two boxes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve import cli
from splitserve.errors import ConfigError
from splitserve.launch import topology
from splitserve.launch.commands import fill
from splitserve.launch.deployment import Deployment, load, parse
from splitserve.launch.hosts.spread import Host, place_all, rehouse, spread
from splitserve.launch.nvml import Gpu
from splitserve.launch.topology import Core, Node, Topology

BOX = Path(__file__).parent.parent / "fixtures" / "topologies" / "rtx-pro-6000-x8.json"


def machine(cores: int, gpus: int = 0) -> Topology:
    return Topology(
        tuple(Core(0, 0, c, (c,)) for c in range(cores)),
        (Node(0, 1 << 34, 1 << 33),),
        tuple(Gpu(i, "gpu", f"u{i}", 1, 1, f"0000:{i:02x}:00.0", 0) for i in range(gpus)),
        0.0,
        1 << 34,
        1 << 33,
        1 << 30,
    )


def hosts(*cores: int) -> list[Host]:
    return [Host(f"h{i}", f"10.0.0.{i + 1}", machine(n)) for i, n in enumerate(cores)]


def deployment(prefill: dict[str, Any], decode: dict[str, Any]) -> Deployment:
    tables = {"deployment": {"model": "m"}, "prefill": prefill, "decode": decode, "hosts": {"backend": "ray"}}
    return parse(tables, "file x.toml", environ={})


def test_a_pair_that_fits_stays_on_one_host_and_the_next_goes_to_the_next():
    d = deployment({"replicas": 2, "tp": 2}, {"replicas": 2, "tp": 2})
    assert spread(hosts(4, 4), d) == {
        "prefill-0": "h0",
        "prefill-1": "h1",
        "decode-0": "h0",
        "decode-1": "h1",
    }


def test_halves_that_fill_a_host_each_part_ways():
    assert spread(hosts(4, 4), deployment({"tp": 4}, {"tp": 4})) == {"prefill-0": "h0", "decode-0": "h1"}


def test_an_engine_that_fits_nowhere_is_said_with_the_sum():
    with pytest.raises(ConfigError, match="decode-0 wants 3 cores of one host; free: h0 2 of 4, h1 2 of 2"):
        spread(hosts(4, 2), deployment({"tp": 2}, {"tp": 3}))


def test_an_engine_of_a_lost_host_goes_where_room_is_and_the_router_knows_it_there():
    d = deployment({"tp": 2}, {"tp": 2, "replicas": 2})
    three = [Host(f"h{i}", f"10.0.0.{i + 1}", machine(4)) for i in range(3)]
    placed = place_all(three, d, {"prefill-0": "h0", "decode-0": "h0", "decode-1": "h1"})
    assert [s.host for s in placed] == ["h0", "h0", "h1", ""]
    spec, router = rehouse(three, [three[0], three[2]], d, placed, "decode-1")
    assert (spec.name, spec.host, spec.cpus) == ("decode-1", "h2", (0, 1, 2, 3))
    ports = {f"{s.name}.{w.key}": 7000 for s in placed for w in s.ports}
    assert "--decode http://10.0.0.1:7000 --decode http://10.0.0.3:7000" in " ".join(fill(router.argv, ports))
    assert "--allow-hosts 10.0.0.2" in " ".join(fill(spec.argv, ports))  # of all that there were
    with pytest.raises(ConfigError, match="decode-1 wants 2 cores of one host; free: h0 0 of 4"):
        rehouse(three, three[:1], d, placed, "decode-1")
    with pytest.raises(ConfigError, match="free: no hosts"):
        rehouse(three, [], d, placed, "decode-1")


def test_an_engine_that_comes_later_takes_no_gpu_and_if_it_can_no_core_of_another():
    d = deployment({"tp": 2, "device": "cuda"}, {"tp": 2, "device": "cuda"})
    two = [Host(f"h{i}", f"10.0.0.{i + 1}", machine(8, gpus=4)) for i in range(2)]
    placed = place_all(two, d, {"prefill-0": "h0", "decode-0": "h1"})
    (_, decode, _) = placed
    spec, _ = rehouse(two, [two[1]], d, placed, "prefill-0")
    assert spec.host == "h1"
    assert not set(spec.gpus) & set(decode.gpus)
    assert len(spec.gpus) == 2
    assert "other engines stay as they are" in spec.why[0]


def test_engines_are_reached_at_their_hosts_addresses_and_the_router_runs_on_the_first():
    specs = place_all(hosts(4, 4), deployment({"tp": 4}, {"tp": 4}))
    assert [(s.name, s.host) for s in specs] == [("prefill-0", "h0"), ("decode-0", "h1"), ("router", "")]
    ports = {f"{s.name}.{w.key}": 7000 for s in specs for w in s.ports}
    prefill, decode, router = (" ".join(fill(s.argv, ports)) for s in specs)
    assert "--prefill http://10.0.0.1:7000,7000 --decode http://10.0.0.2:7000" in router
    assert "--host 10.0.0.1 " in prefill
    assert "--bootstrap-host 10.0.0.1 " in prefill
    assert "--host 10.0.0.2 " in decode
    assert "--allow-hosts 10.0.0.1" in decode  # the rendezvous that requests will name
    assert [w.host for s in specs for w in s.ports] == ["10.0.0.1", "10.0.0.1", "10.0.0.2", "127.0.0.1"]


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_no_host_gets_more_ranks_than_it_has_cores(room: list[int], prefills: int, decodes: int, tp: int):
    d = deployment({"replicas": prefills, "tp": tp}, {"replicas": decodes, "tp": tp})
    try:
        where = spread(hosts(*room), d)
    except ConfigError:
        return
    assert len(where) == prefills + decodes
    for i, cores in enumerate(room):
        assert sum(tp for name in where if where[name] == f"h{i}") <= cores
    placed = place_all(hosts(*room), d, where)
    assert [s.name for s in placed] == [*where, "router"]
    for i in range(len(room)):
        cpus = [cpu for s in placed if s.host == f"h{i}" for cpu in s.cpus]
        assert len(cpus) == len(set(cpus))


def test_the_file_for_two_boxes_is_planned_without_them(capsys: pytest.CaptureFixture[str]):
    words = [
        "up",
        "deploy/two-hosts.toml",
        "--dry-run",
        "--topology",
        str(BOX),
        "--topology",
        str(BOX),
        "--json",
    ]
    assert cli.main(words) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [(p["name"], p["host"], p["gpus"]) for p in plan["processes"]] == [
        ("prefill-0", "host-0", list(range(8))),
        ("decode-0", "host-1", list(range(8))),
        ("router", "", []),
    ]
    assert cli.main([w for w in words if w != "--json"]) == 0
    assert "on host host-1" in capsys.readouterr().out


def test_several_topologies_are_for_several_hosts(capsys: pytest.CaptureFixture[str]):
    words = ["up", "deploy/demo.toml", "--dry-run", "--topology", str(BOX), "--topology", str(BOX)]
    assert cli.main(words) == 2
    assert "[hosts]" in capsys.readouterr().err


def test_the_same_file_serves_one_host_or_many():
    d = load("deploy/two-hosts.toml", overrides=["hosts.backend=local", "engine.tp=4"], environ={})
    assert d.hosts.backend == "local"
    assert topology.load(BOX).gpus
