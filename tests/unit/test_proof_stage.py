"""Where the engine that a proof compares with takes its GPUs: those of the engines it is compared with."""

from __future__ import annotations

from typing import Any

import pytest

from splitserve.proof.stage import _gpus


@pytest.mark.parametrize(
    ("facts", "tp", "flags", "visible"),
    [
        ({}, 1, [], None),  # a CPU
        ({"visible_gpus": "4,5", "gpus": []}, 2, [], "4,5"),
        ({"visible_gpus": "3", "gpus": [0, 0]}, 2, ["--gpus", "0,0"], "3"),  # ranks that share one
        ({"visible_gpus": "4,5", "gpus": []}, 4, [], None),  # more than these: any others
    ],
)
def test_gpus(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], tp: int, flags: list[str], visible: str | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found, env = _gpus(facts, tp)
    assert found == flags
    assert env.get("CUDA_VISIBLE_DEVICES") == visible
