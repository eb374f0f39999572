"""Which seat each decode rank takes: by nearness, by measured rates, and what prefill is told to expect."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from splitserve.launch import measured
from splitserve.launch.deployment import Deployment, parse
from splitserve.launch.measured import FORMAT, Measured, Rate
from splitserve.launch.nvml import Gpu, GpuPair
from splitserve.launch.pairing import carried, rank_seats
from splitserve.launch.placement import explain, place
from splitserve.launch.procs import ProcSpec
from splitserve.launch.topology import Core, Node, Topology
from splitserve.transfer.probed import parse as parse_probed


def box(num_gpus: int, *, nvlinks: tuple[tuple[int, int], ...] = ()) -> Topology:
    """GPUs on one node, some of them joined in twos by NVLink bridges."""
    return Topology(
        cores=tuple(Core(0, 0, c, (c,)) for c in range(2 * num_gpus + 2)),
        nodes=(Node(0, 1 << 34, 1 << 33),),
        gpus=tuple(Gpu(i, "gpu", f"u{i}", 1, 1, f"0000:{i:02x}:00.0", 0) for i in range(num_gpus)),
        cpu_quota=0.0,
        memory_total=1 << 34,
        memory_free=1 << 33,
        shm_free=1 << 30,
        pairs=tuple(
            GpuPair(a, b, "ok", 4 if (a, b) in nvlinks else 0)
            for a in range(num_gpus)
            for b in range(a + 1, num_gpus)
        ),
    )


def deployment(prefill: int, decode: int, device: str = "cuda", **decode_more: Any) -> Deployment:
    tables = {
        "deployment": {"model": "m"},
        "engine": {"device": device},
        "prefill": {"tp": prefill},
        "decode": {"tp": decode, **decode_more},
    }
    return parse(tables, "file x.toml", environ={})


def links(rates: dict[tuple[str, str], float], *, together: float = 0.0) -> Measured:
    taken = tuple(Rate(a, b, {1 << 16: rate / 4, 1 << 24: rate}, together) for (a, b), rate in rates.items())
    return Measured(FORMAT, "/x.toml", "2026-01-01T00:00:00Z", {}, "put", "", taken, {})


def of_role(specs: list[ProcSpec], role: str) -> list[ProcSpec]:
    return [s for s in specs if s.role == role]


def test_state_goes_between_ranks_that_lie_over_each_other():
    assert carried(2, 2) == ((0, 0), (1, 1))
    assert carried(4, 2) == ((0, 0), (1, 0), (2, 1), (3, 1))
    assert carried(1, 3) == ((0, 0), (0, 1), (0, 2))
    assert carried(2, 3) == ((0, 0), (0, 1), (1, 1), (1, 2))


def test_ranks_sit_across_the_bridge_from_whom_they_hear():
    specs = place(box(4, nvlinks=((0, 3), (1, 2))), deployment(2, 2))
    prefill, decode = specs[0], specs[1]
    assert (prefill.gpus, decode.gpus) == ((0, 1), (3, 2))
    assert decode.env["CUDA_VISIBLE_DEVICES"] == "3,2"
    assert any("each as near as can be" in line for line in explain(specs))


def test_measured_rates_beat_the_tree():
    machine = box(4, nvlinks=((0, 3), (1, 2)))
    rates = {
        ("gpu 0", "gpu 2"): 50.0,
        ("gpu 0", "gpu 3"): 12.0,
        ("gpu 1", "gpu 2"): 12.0,
        ("gpu 1", "gpu 3"): 50.0,
    }
    specs = place(machine, deployment(2, 2), links(rates))
    assert specs[1].gpus == (2, 3)
    swapped = {(a, b): 62.0 - rate for (a, b), rate in rates.items()}
    specs = place(machine, deployment(2, 2), links(swapped))
    assert specs[1].gpus == (3, 2)
    assert any(
        "slowest measured link 50.00 GB/s, in order of number 12.00" in line for line in explain(specs)
    )


def test_seats_that_a_person_named_stay_and_the_better_order_is_said():
    rates = {(f"gpu {a}", f"gpu {b}"): 50.0 if a + b == 3 else 12.0 for a, b in product((0, 1), (2, 3))}
    specs = place(box(4), deployment(2, 2, gpus=[2, 3]), links(rates))
    assert specs[1].gpus == (2, 3)
    assert any("with gpu 3, gpu 2 instead: slowest measured link 50.00" in line for line in explain(specs))


def test_rates_of_some_pairs_only_are_not_compared_with_nearness():
    rates = {("gpu 0", "gpu 2"): 1.0}
    assert place(box(4, nvlinks=((0, 3), (1, 2))), deployment(2, 2), links(rates))[1].gpus == (3, 2)


def test_prefill_is_told_what_its_links_carry_at_most_as_much_as_while_all_move():
    rates = {(f"gpu {a}", f"gpu {b}"): 40.0 if a == 1 else 50.0 for a, b in product((0, 1), (2, 3))}
    specs = place(box(4), deployment(2, 2), links(rates, together=45.0))
    words = [w for at, w in enumerate(specs[0].argv) if specs[0].argv[at - 1] == "--probed"]
    assert parse_probed(words) == {
        (0, 0): {65536: 12.5, 1 << 24: 45.0},
        (1, 1): {65536: 10.0, 1 << 24: 40.0},
    }
    assert "--probed" not in specs[1].argv
    assert "--probed" not in place(box(4), deployment(2, 2))[0].argv


def test_of_several_decode_engines_the_slowest_is_expected():
    d = parse(
        {"deployment": {"model": "m"}, "prefill": {"cpus": [0]}, "decode": {"cpus": [1, 2], "replicas": 2}},
        "file x.toml",
        environ={},
    )
    specs = place(box(2), d, links({("cpus 0", "cpus 1"): 8.0, ("cpus 0", "cpus 2"): 4.0}))
    assert specs[0].argv[specs[0].argv.index("--probed") + 1] == "0-0/65536=1/16777216=4"


tps = st.sampled_from([1, 2, 3, 4])


@given(tps, tps, st.integers(1, 2), st.randoms())
def test_no_order_of_the_same_seats_has_a_better_slowest_link(prefill: int, decode: int, replicas: int, rng):
    machine = box(prefill + decode * replicas)
    d = deployment(prefill, decode, replicas=replicas)
    plain = place(machine, d)
    sources, targets = rank_seats(plain)
    rate = {(a.seat, b.seat): rng.uniform(1, 60) for a, b in product(sources, targets)}
    specs = place(machine, d, links(rate))
    (source,) = of_role(specs, "prefill")
    for before, after in zip(of_role(plain, "decode"), of_role(specs, "decode"), strict=True):
        assert sorted(after.gpus) == sorted(before.gpus)
        assert sorted(after.cpus) == sorted(before.cpus)

        def slowest(order: tuple[int, ...]) -> float:
            pairs = carried(prefill, decode)
            return min(rate[f"gpu {source.gpus[i]}", f"gpu {order[j]}"] for i, j in pairs)

        best = max(map(slowest, permutations(before.gpus)))
        assert slowest(after.gpus) == best


@given(tps, st.randoms())
def test_cores_travel_with_their_rank(tp: int, rng):
    machine = box(4)
    plain = place(machine, deployment(tp, tp, device="cpu"))
    sources, targets = rank_seats(plain)
    rate = {(a.seat, b.seat): rng.uniform(1, 60) for a, b in product(sources, targets)}
    _, after = rank_seats(place(machine, deployment(tp, tp, device="cpu"), links(rate)))
    assert {s.cpus for s in after} == {s.cpus for s in targets}
    assert measured.stale(links(rate), machine, deployment(1, 1).transfer) != ""  # an empty list of devices


def test_the_measured_direction_is_taken_by_both_sides_unless_one_is_given():
    rates = {("gpu 0", "gpu 1"): 50.0}
    get = replace(links(rates), direction="get")
    for specs in (place(box(2), deployment(1, 1), get),):
        assert all(s.argv[s.argv.index("--direction") + 1] == "get" for s in specs[:2])
        assert "--probed" in specs[0].argv
    d = parse(
        {"deployment": {"model": "m"}, "engine": {"device": "cuda"}, "prefill": {}, "decode": {}}
        | {"transfer": {"direction": "put"}},
        "file x.toml",
        environ={},
    )
    assert all("--direction" not in s.argv and "--probed" not in s.argv for s in place(box(2), d, get))
