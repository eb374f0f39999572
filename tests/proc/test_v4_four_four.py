"""The mission's own shape on a CPU: DeepSeek-V4 prefill TP4 and decode TP4, eight rank processes over gloo and NIXL.

What is proved is everything that does not depend on the devices: ranks, ports, who writes to whom, that the replicated
latent is sent once to each destination rank, and that every answer is the unified engine's.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from splitserve.models import registry
from splitserve.models.make_checkpoint import T1, TINY
from splitserve.models.read import read_config
from splitserve.spec import live_bytes
from splitserve.weights.locate import locate
from tests.proc.real import Deployment
from tests.proc.test_v4_split import deployed, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SIZE = 4
CONFIGS: dict[str, dict[str, Any]] = {"tiny": TINY | {"o_groups": 4}, "t1": T1}
"""Four ranks share four output groups."""


@pytest.fixture(scope="module", params=list(CONFIGS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp(request.param), CONFIGS[request.param])


@pytest.fixture(scope="module")
def pair(checkpoint: Path) -> Iterator[Deployment]:
    with deployed(checkpoint, tp=(SIZE, SIZE), deadline_s=120.0) as deployment:
        yield deployment


def test_every_rank_and_port_is_there_once(pair: Deployment) -> None:
    processes = {p["name"]: p for p in pair.state()["processes"]}
    ranks = [who["pid"] for name in ("prefill-0", "decode-0") for who in processes[name]["ranks"]]
    assert len(ranks) == len(set(ranks)) == 2 * SIZE
    assert all(Path(f"/proc/{pid}").exists() for pid in ranks)
    ports = [port for p in processes.values() for port in p["ports"].values()]
    assert len(ports) == len(set(ports)) == 4  # three doors of HTTP and the rendezvous
    for name in ("prefill-0", "decode-0"):
        assert processes[name]["misbound"] == []
        assert pair.call(name, "/server_info")[1]["tp"] == SIZE


def test_the_latent_goes_once_to_each_rank_from_the_rank_beside_it(
    pair: Deployment, checkpoint: Path
) -> None:
    pair.call("decode-0", "/debug/digests", {"all": True})
    draw = random.Random(7)
    length = 300
    status, answer = pair.generate([draw.randrange(6, 262) for _ in range(length)], 4, timeout_s=300.0)
    assert status == 200, answer
    sent = pair.call("prefill-0", "/debug/handoffs")[1]["sent"][-1]
    received = pair.call("decode-0", "/debug/handoffs")[1]["received"][-1]
    specs = registry.states(read_config(locate(checkpoint)), dtype="f32")
    assert received["bytes"] == sent["bytes"] == SIZE * live_bytes(specs, 0, length)
    links = [(d["src_rank"], d["dst_rank"]) for d in received["digests"]]
    assert sorted(links) == [(r, r) for r in range(SIZE)]
    assert all(d["prefill"] == d["decode"] for d in received["digests"])
    # All ranks of prefill hold the same rows, and each wrote them whole.
    assert len({d["decode"] for d in received["digests"]}) == 1
    pair.check()


def test_verify_proves_it_and_catches_every_planted_fault(pair: Deployment) -> None:
    done = pair.run("verify", str(pair.file), "--plant", "all", "--json", timeout_s=800)
    assert done.stdout, done.stderr
    proof = json.loads(done.stdout)
    assert [f for c in proof["cases"] for f in c["findings"]] == []
    assert [p["fault"] for p in proof["planted"] if not p["caught"]] == []
    assert len(proof["cases"]) == 9
    assert done.returncode == 0
