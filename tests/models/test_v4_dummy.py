"""Random weights made on the device: they run, and they spread over the experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from splitserve.dist.group import SoloGroup
from splitserve.errors import ConfigError
from splitserve.layers.v4 import kernels as ops
from splitserve.models import registry
from splitserve.models.config import ModelConfig
from splitserve.models.deepseek_v4 import DeepseekV4
from splitserve.models.deepseek_v4_config import from_json
from splitserve.models.make_checkpoint import TINY
from splitserve.weights.locate import Source
from tests.models.v4_oracle import make_bench, random_text


def dummy(seed: int = 0) -> DeepseekV4:
    model = DeepseekV4(from_json(TINY, Path("config.json")), SoloGroup(), "bf16", draft=True)
    model.load_dummy(seed)
    return model


def test_runs_and_follows_from_its_seed() -> None:
    logits = [make_bench(dummy(seed), dtype="bf16").run(random_text(140), [135, 1, 4]) for seed in (0, 0, 1)]
    assert logits[0].isfinite().all()
    assert 0.1 < logits[0].std() < 100
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


def test_tokens_spread_over_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.Tensor] = []
    route, by_token = ops.route, ops.route_by_token

    class Spy:
        def __init__(self, op: object) -> None:
            self.op = op

        def __call__(self, *args: object, **kwargs: object) -> object:
            weights, experts = self.op(*args, **kwargs)  # type: ignore[operator]
            chosen.append(experts.flatten())
            return weights, experts

    monkeypatch.setattr(ops, "route", Spy(route))
    monkeypatch.setattr(ops, "route_by_token", Spy(by_token))
    make_bench(dummy(), dtype="bf16").run(random_text(256), [256])
    assert len(chosen) == 4
    for layer in chosen:
        counts = layer.bincount(minlength=8)
        assert (counts > 0).all(), counts
        assert counts.max() < 0.5 * counts.sum()


def test_models_that_cannot_make_weights_up_say_so(tmp_path: Path) -> None:
    llama = ModelConfig("llama", 1, 8, 1, 1, 8, 8, 8, 8)
    with pytest.raises(ConfigError, match="llama cannot make its weights up"):
        registry.load(None, llama, Source(tmp_path, "safetensors"), dummy=True, progress=lambda _: None)
