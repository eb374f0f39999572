"""The main job with decode reading instead of prefill writing: real processes, real NIXL, a tiny model."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.proc.real import Deployment, until
from tests.tiny_chat import write_chat_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def is_back(d: Deployment, name: str, restarts: int) -> bool:
    ready = all(p["phase"] == "ready" for p in d.state()["processes"])
    return ready and d.process(name)["restarts"] > restarts


@pytest.mark.parametrize("tp", [(1, 1), (2, 1)])
def test_split_is_unified_and_every_planted_fault_is_caught(tmp_path: Path, tp: tuple[int, int]) -> None:
    d = Deployment(write_chat_checkpoint(tmp_path / "tiny"), name="get", tp=tp)
    d.env["SPLITSERVE_TRANSFER_DIRECTION"] = "get"
    try:
        d.up()
        done = d.run("verify", str(d.file), "--plant", "all", "--json", timeout_s=280)
        assert done.stdout, done.stderr
        proof = json.loads(done.stdout)
        assert done.returncode == 0, proof
        assert not [p for p in proof["planted"] if not p["caught"]]
        sent = d.call("prefill-0", "/debug/handoffs")[1]["sent"][-1]
        assert sent["lanes"] == ["the peer reads"]

        for name in ("prefill-0", "decode-0"):  # and each comes back from a death
            before = d.process(name)["restarts"]
            os.kill(d.process(name)["ranks"][0]["pid"], signal.SIGKILL)
            until("it is back", lambda: is_back(d, name, before), within_s=120.0)
            until("it serves", lambda: d.generate(list(range(6, 70)), 2)[0] == 200, within_s=60.0)
        until("all pages are free", d.all_pages_free, within_s=30.0)
        d.check()
    finally:
        d.close()
