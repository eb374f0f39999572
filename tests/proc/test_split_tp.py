"""Prefill and decode at unequal TP, with real ranks over gloo and real NIXL: split is unified within the bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.proc.real import Deployment
from tests.tiny_chat import write_chat_checkpoint

SLOW = [pytest.param(pair, marks=pytest.mark.slow) for pair in ((1, 2), (2, 2), (2, 4), (4, 2), (1, 8))]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("tp", [(2, 1), *SLOW], ids=str)
def test_split_is_unified_at_unequal_tp(tmp_path: Path, tp: tuple[int, int]) -> None:
    """8 heads and 4 KV heads: at tp 8 every KV head lives on two ranks."""
    model = write_chat_checkpoint(tmp_path / "tiny")
    deployment = Deployment(model, tp=tp)
    deployment.up()
    try:
        done = deployment.run("verify", str(deployment.file), "--json", timeout_s=300)
        proof = json.loads(done.stdout)
        assert not [f for c in proof["cases"] for f in c["findings"]], done.stderr
        assert done.returncode == 0
    finally:
        deployment.close()
