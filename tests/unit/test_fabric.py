"""The fabric doctor: what it concludes from made-up links, and one measurement between real processes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve import cli
from splitserve.cli import report
from splitserve.config import TransferConfig
from splitserve.errors import ConfigError
from splitserve.launch import fabric as measuring
from splitserve.launch import measured
from splitserve.launch.deployment import parse
from splitserve.launch.fabric_end import Spot
from splitserve.launch.pairing import RankSeat
from splitserve.launch.topology import Core, Gpu, Node, Topology
from splitserve.plan.fabric import Fabric, Link, best_order, choose_direction, judge, pair_up

SIZE = 1 << 26


def links(
    rate: dict[tuple[int, int], float], *, together: float = 0.0, lane: str = "cma"
) -> tuple[Link, ...]:
    return tuple(Link(s, t, {SIZE: r}, lane, together if s == t else 0.0) for (s, t), r in rate.items())


def square(n: int, rate: float) -> dict[tuple[int, int], float]:
    return dict.fromkeys(product(range(n), range(n)), rate)


def kinds(fabric: Fabric) -> list[str]:
    return [f.kind for f in judge(fabric).findings]


def test_equal_links_that_share_well_have_no_finding() -> None:
    verdict = judge(Fabric(links(square(4, 50.0), together=20.0), memcpy=12.0, tcp=3.0))
    assert not verdict.findings
    assert sorted(verdict.pairing) == [0, 1, 2, 3]
    assert len(set(verdict.pairing.values())) == 4


def test_posted_writes_under_one_switch_collapse() -> None:
    # four x16 links of 50 GB/s that carry 6 GB/s in all when they all write
    assert kinds(Fabric(links(square(4, 50.0), together=1.5), memcpy=12.0, tcp=3.0)) == ["collapse"]


def test_a_halved_link_is_named_and_not_paired() -> None:
    rate = square(2, 25.0) | {(0, 1): 12.0}
    verdict = judge(Fabric(links(rate, together=20.0), memcpy=12.0, tcp=3.0))
    assert [f.kind for f in verdict.findings] == ["halved"]
    assert "prefill rank 0 to decode rank 1" in verdict.findings[0].text
    assert verdict.pairing == {0: 0, 1: 1}


def test_the_narrow_slot_of_one_card_is_named_by_all_its_links() -> None:
    rate = square(4, 50.0) | {(2, t): 26.0 for t in range(4)}
    found = judge(Fabric(links(rate), memcpy=0.0, tcp=0.0)).findings
    assert [f.kind for f in found] == ["halved"] * 4
    assert all("prefill rank 2" in f.text for f in found)


def both_ways(put: float, get: float, n: int = 4) -> Fabric:
    """Four links of 50 GB/s alone; what all pairs carry at once, a pair."""
    return Fabric(
        tuple(
            replace(link, get={SIZE: 48.0}, get_together=get if link.together else 0.0)
            for link in links(square(n, 50.0), together=put)
        ),
        memcpy=12.0,
        tcp=3.0,
    )


def test_where_posted_writes_collapse_and_reads_do_not_decode_fetches() -> None:
    verdict = judge(both_ways(put=1.5, get=20.0))
    assert [f.kind for f in verdict.findings] == ["collapse"]
    assert verdict.direction == "get"
    assert "80.00" in verdict.why


def test_where_reads_go_over_sockets_prefill_writes() -> None:
    # no NVLink: UCX sends reads by TCP and writes by cuda_ipc
    fabric = both_ways(put=20.0, get=0.3)
    slow = tuple(replace(link, get={SIZE: 0.5}) for link in fabric.links)
    assert judge(replace(fabric, links=slow)).direction == "put"


def test_reads_that_are_a_little_faster_are_not_worth_a_message() -> None:
    assert judge(both_ways(put=20.0, get=22.0)).direction == "put"
    assert choose_direction(links(square(2, 50.0))) == ("put", "reads were not measured")


def test_links_are_paired_by_the_direction_that_is_used() -> None:
    rate = {(0, 0): 50.0, (0, 1): 10.0, (1, 0): 10.0, (1, 1): 50.0}
    crossed = tuple(
        replace(link, get={SIZE: 60.0 - link.best}, get_together=40.0, together=1.0) for link in links(rate)
    )
    verdict = judge(Fabric(crossed, memcpy=0.0, tcp=0.0))
    assert verdict.direction == "get"
    assert verdict.pairing == {0: 1, 1: 0}


def test_a_wrong_network_card_is_named() -> None:
    through = [
        replace(link, near=("mlx5_0",)) for link in links(square(1, 20.0), lane="rc_mlx5/mlx5_3:1/path0")
    ]
    fabric = Fabric(tuple(through), 12.0, 3.0, same_host=False, nics=("mlx5_0", "mlx5_3"))
    (finding,) = judge(fabric).findings
    assert finding.kind == "wrong_nic"
    assert "NET_DEVICES=mlx5_0:1" in finding.fix
    right = replace(through[0], lane="rc_mlx5/mlx5_0:1/path0")
    assert not judge(replace(fabric, links=(right,))).findings
    assert not judge(replace(fabric, links=(replace(right, lane="cma/memory"),))).findings


@given(st.integers(1, 5), st.randoms())
def test_no_order_of_seats_has_a_faster_slowest_rank(n: int, rng) -> None:
    rate = {(rank, seat): rng.choice([1.0, 2.0, 5.0]) for rank, seat in product(range(n), range(n))}
    order = best_order(rate, n)
    assert sorted(order) == list(range(n))
    slowest = min(rate[r, s] for r, s in enumerate(order))
    assert all(min(rate[r, s] for r, s in enumerate(way)) <= slowest for way in permutations(range(n)))
    assert best_order(dict.fromkeys(rate, 1.0), n) == tuple(range(n))
    assert sorted(best_order(dict.fromkeys(product(range(12), range(12)), 1.0), 12)) == list(range(12))


@pytest.mark.parametrize(
    ("lane", "rate", "found"), [("tcp/lo", 9.0, True), ("unknown", 3.1, True), ("cma", 9.0, False)]
)
def test_a_silent_fallback_is_found_by_name_and_by_rate(lane: str, rate: float, found: bool) -> None:
    fabric = Fabric(links(square(1, rate), lane=lane), memcpy=12.0, tcp=3.0)
    assert ("fallback" in kinds(fabric)) is found
    across_hosts = Fabric(fabric.links, fabric.memcpy, fabric.tcp, same_host=False)
    assert "fallback" not in kinds(across_hosts)


@pytest.mark.parametrize(
    "lane",
    [
        "cma/memory",
        "0..8184: tcp/lo; 8185..inf: cma/memory",
        "posix/memory",
        "cuda_ipc/cuda",
        "rc_mlx5/mlx5_0:1",
    ],
)
def test_a_known_lane_that_is_no_socket_is_at_most_slow(lane: str) -> None:
    """The rates of a healthy machine of two cores that other work kept busy."""
    link = replace(links(square(1, 3.01), lane=lane)[0], get={SIZE: 3.0}, tcp=2.40, copy=5.77)
    verdict = judge(Fabric((link,), memcpy=5.77, tcp=2.40))
    assert not verdict.findings
    assert [f.kind for f in verdict.warnings] == ["slow"]
    told = report.fabric(Fabric((link,), memcpy=5.77, tcp=2.40), verdict)
    assert any(line.startswith("warn  slow:") for line in told)
    assert told[-1].startswith("ok ")
    assert sum(line.endswith("lane") for line in told) == 1  # it is known of writes only
    assert not judge(Fabric((replace(link, alone={SIZE: 4.0}),), memcpy=5.77, tcp=2.40)).warnings


@given(st.integers(1, 4), st.integers(1, 4), st.randoms())
def test_no_pairing_has_a_faster_slowest_link(sources: int, targets: int, rng) -> None:
    rate = {pair: rng.uniform(1, 100) for pair in product(range(sources), range(targets))}
    chosen = pair_up(links(rate))
    assert set(chosen) == set(range(targets))
    most = -(-targets // sources)
    uses = [list(chosen.values()).count(s) for s in range(sources)]
    assert max(uses) <= most
    slowest = min(rate[s, t] for t, s in chosen.items())
    for way in product(range(sources), repeat=targets):
        if max(way.count(s) for s in range(sources)) <= most:
            assert min(rate[s, t] for t, s in enumerate(way)) <= slowest + 1e-9


def test_many_ranks_are_paired_without_trying_all_ways() -> None:
    assert len(set(pair_up(links(square(16, 1.0))).values())) == 16


def test_real_links_between_processes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    found = measuring.measure(
        TransferConfig(transport="nixl"),
        sources=[RankSeat("prefill-0", 0, (cpus[0],))],
        targets=[RankSeat("decode-0", 0, (cpus[-1],))],
        say=lambda _: None,
    )
    (link,) = found.links
    assert min(*link.alone.values(), link.together, found.memcpy, found.tcp) > 0
    assert min(*link.get.values(), link.get_together, link.copy, link.tcp) > 0
    assert link.lane
    monkeypatch.setattr(measuring, "measure", lambda *_, **__: found)
    code = cli.main(["doctor", "--fabric", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == bool(told["verdict"]["findings"])
    assert cli.main(["doctor", "--fabric"]) == code
    assert "64 MiB" in capsys.readouterr().out


def test_a_transport_that_does_not_start_is_an_error_and_no_hang() -> None:
    with pytest.raises(ConfigError, match="rank 0"):
        measuring.measure(
            TransferConfig(transport="nosuch"),
            sources=[RankSeat("prefill-0", 0, ())],
            targets=[RankSeat("decode-0", 0, ())],
            say=lambda _: None,
        )


def test_a_deployment_without_a_pair_has_no_fabric(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "u.toml"
    file.write_text('[deployment]\nmodel = "m"\n[unified]\n')
    assert cli.main(["doctor", "--fabric", str(file)]) == 2
    assert "no state crosses" in capsys.readouterr().err


def test_links_between_hosts_are_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--fabric", "deploy/two-hosts.toml"]) == 2
    assert "measures one host" in capsys.readouterr().err


# ------------------------------------------------------------------ what is kept for `up`


def box(uuid: str = "u") -> Topology:
    gpus = tuple(Gpu(i, "gpu", f"{uuid}{i}", 1, 1, f"0000:{i:02x}:00.0", 0) for i in range(2))
    return Topology((Core(0, 0, 0, (0,)), Core(0, 0, 1, (1,))), (Node(0, 1, 1),), gpus, 0.0, 1, 1, 1)


def test_what_was_measured_is_kept_for_up_and_says_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    d = parse(
        {"deployment": {"model": "m"}, "prefill": {}, "decode": {}}, f"file {tmp_path}/d.toml", environ={}
    )
    assert measured.find(d) is None
    assert measured.note(None, "", d) == ""
    taken = Fabric(links({(0, 0): 3.0}, together=2.0), memcpy=4.0, tcp=1.0)
    seats = ([RankSeat("prefill-0", 0, (0,))], [RankSeat("decode-0", 0, (1,))])
    measured.keep(measured.of(d, box(), taken, judge(taken), seats), measured.path_of(d))
    found = measured.find(d)
    assert found is not None
    assert (found.direction, found.pairing, found.best) == (
        "put",
        {"cpus 1": "cpus 0"},
        {("cpus 0", "cpus 1"): 3.0},
    )
    assert measured.stale(found, box(), d.transfer) == ""
    assert measured.stale(found, box("other"), replace(d.transfer, ucx=("TLS=tcp",))) == "GPUs, [transfer]"
    assert "GPUs changed since" in measured.note(found, "GPUs", d)
    assert "direction put" in measured.note(found, "", d)
    other = parse(
        {"deployment": {"model": "m"}, "prefill": {}, "decode": {}}, "file other/d.toml", environ={}
    )
    assert measured.find(other) is None  # of the same name, and another file
    measured.path_of(d).write_text("{}")
    assert measured.find(d) is None


def test_ranks_on_gpus_are_measured_there_and_kept_by_their_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    seen: list[str] = []

    def measure(config: TransferConfig, *, sources, targets, say) -> Fabric:
        seen.extend(s.seat for s in (*sources, *targets))
        memory = measuring.memory_of(sources, targets)
        return Fabric(links({(0, 0): 3.0}, together=2.0), memcpy=4.0, tcp=1.0, memory=memory)

    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setattr("splitserve.launch.topology.read", box)
    for device, memory in (("cuda", "gpu"), ("cpu", "host")):
        file = tmp_path / f"{device}.toml"
        file.write_text(f'[deployment]\nmodel = "m"\n[engine]\ndevice = "{device}"\n[prefill]\n[decode]\n')
        cli.main(["doctor", str(file), "--fabric", "--json"])
        told = json.loads(capsys.readouterr().out)
        assert told["fabric"]["memory"] == memory
        kept = json.loads(Path(told["kept"]).read_text())
        assert (kept["memory"], kept["rates"][0]["source"]) == (memory, seen[-2])
        cli.main(["doctor", "--fabric", str(file)])
        assert f"memory: {memory}" in capsys.readouterr().out
    assert seen == ["gpu 0", "gpu 1"] * 2 + ["cpus 0", "cpus 1"] * 2


@pytest.mark.parametrize(
    ("lane", "best", "found"),
    [
        ("cuda_ipc/cuda", 300.0, False),
        ("cuda_ipc/cuda", 0.4, False),  # slow, and no fallback
        ("cma/memory", 0.4, True),
        ("cma/memory", 15.0, False),  # no peer access: a plain copy is no faster
        ("unknown", 300.0, False),
        ("tcp/lo", 15.0, True),
    ],
)
def test_a_lane_between_gpus_that_is_not_peer_memory_is_a_fallback_where_a_plain_copy_is_faster(
    lane: str, best: float, found: bool
) -> None:
    copy = 20.0 if best == 15.0 else 380.0
    link = replace(links(square(1, best), lane=lane)[0], copy=copy, tcp=3.0)
    fabric = Fabric((link,), copy, 3.0, memory="gpu")
    assert ("fallback" in kinds(fabric)) is found
    if found:
        assert "cuda_ipc" in judge(fabric).findings[0].fix


def test_ends_see_the_gpus_of_their_engine_and_pairs_with_a_gpu_have_a_copy_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two engines of two GPUs that pretend: what each process is told, and whose rates land in which link."""
    spots: dict[str, tuple[Spot, Any]] = {}

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name
            self.due: list[tuple[Any, ...]] = []

        def post(self, op: str, *args: Any) -> None:
            self.due.append((op, *args))

        def answer(self, within_s: float = 0.0) -> Any:
            return self.call(*self.due.pop(0)) if self.due else None

        def call(self, op: str, *args: Any) -> Any:
            if op == "rate":
                return 100.0 * args[0] + args[1]
            if op == "move_until":
                return [1.0] * len(args[1])
            return {"copy": 7.0, "move": 3.0, "lane": "cuda_ipc", "tcp": 1.0, "listen": 1}.get(op)

    @contextmanager
    def child(who: str, name: str, make: Any, spot: Spot) -> Iterator[Fake]:
        spots[who] = spot, make
        yield Fake(who)

    monkeypatch.setattr(measuring, "_child", child)
    found = measuring.measure(
        TransferConfig(transport="nixl", direction="get"),
        sources=[RankSeat("prefill-0", r, (r,), (5, 2)[r]) for r in range(2)],
        targets=[RankSeat("decode-0", 0, (2,), 3), RankSeat("decode-1", 0, (3,))],
        say=lambda _: None,
    )
    assert spots["plain copies"][0].gpus == (5, 2, 3)
    assert spots["source prefill-0 rank 1 (gpu 2)"][0] == Spot((1,), (5, 2), 1)
    assert spots["target decode-0 rank 0 (gpu 3)"][0] == Spot((2,), (3,), 0)
    spot, make = spots["target decode-1 rank 0 (cpus 3)"]
    assert (spot, make.args[-1]) == (Spot((3,)), -1)
    assert make.args[1].direction == "put"
    copies = {(link.source, link.target): link.copy for link in found.links}
    assert copies == {(0, 0): 2.0, (0, 1): -1.0, (1, 0): 102.0, (1, 1): 99.0}
    assert found.memory == "gpu to gpu or host"


def test_a_gpu_that_is_not_there_is_an_error_of_its_rank_and_no_hang() -> None:
    with pytest.raises(ConfigError, match=r"plain copies: .*no GPU"):
        measuring.measure(
            TransferConfig(transport="nixl"),
            sources=[RankSeat("prefill-0", 0, (), 0)],
            targets=[RankSeat("decode-0", 0, (), 1)],
            say=lambda _: None,
        )


def test_plain_copies_have_a_rate() -> None:
    from splitserve.engine.yardstick import copy_rate

    assert copy_rate(-1, -1, 1 << 20, 0.01) > 0
