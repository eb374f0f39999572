"""The fabric doctor: what it concludes from made-up links, and one measurement between real processes."""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve import cli
from splitserve.config import TransferConfig
from splitserve.errors import ConfigError
from splitserve.launch import fabric as measuring
from splitserve.plan.fabric import Fabric, Link, judge, pair_up

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


@pytest.mark.parametrize(
    ("lane", "rate", "found"), [("tcp/lo", 9.0, True), ("rc_mlx5", 3.1, True), ("cma", 9.0, False)]
)
def test_a_silent_fallback_is_found_by_name_and_by_rate(lane: str, rate: float, found: bool) -> None:
    fabric = Fabric(links(square(1, rate), lane=lane), memcpy=12.0, tcp=3.0)
    assert ("fallback" in kinds(fabric)) is found
    across_hosts = Fabric(fabric.links, fabric.memcpy, fabric.tcp, same_host=False)
    assert "fallback" not in kinds(across_hosts)


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
        TransferConfig(transport="nixl"), sources=((cpus[0],),), targets=((cpus[-1],),), say=lambda _: None
    )
    (link,) = found.links
    assert min(*link.alone.values(), link.together, found.memcpy, found.tcp) > 0
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
            TransferConfig(transport="nixl", backend="NOSUCH"),
            sources=((),),
            targets=((),),
            say=lambda _: None,
        )


def test_a_deployment_without_a_pair_has_no_fabric(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "u.toml"
    file.write_text('[deployment]\nmodel = "m"\n[unified]\n')
    assert cli.main(["doctor", "--fabric", str(file)]) == 2
    assert "no state crosses" in capsys.readouterr().err
