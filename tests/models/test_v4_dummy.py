"""Random weights made on the device: they run, and they spread over the experts."""

from __future__ import annotations

from dataclasses import replace
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
from tests import tiny
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


def test_models_that_cannot_make_weights_up_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama = ModelConfig("llama", 1, 8, 1, 1, 8, 8, 8, 8)
    monkeypatch.setitem(registry.FAMILIES, "llama", replace(registry.FAMILIES["llama"], dummies=False))
    with pytest.raises(ConfigError, match="llama cannot make its weights up"):
        registry.load(None, llama, Source(tmp_path, "safetensors"), dummy=True, progress=lambda _: None)


def test_llama_of_random_weights_runs() -> None:
    cfg = ModelConfig("llama", 2, 64, 4, 2, 16, 96, 211, 64)
    model = registry.build(cfg, SoloGroup(), dtype="f32")
    registry.load(model, cfg, Source(Path(), "safetensors"), dummy=True, progress=lambda _: None)
    text = tiny.Text([5, 3, 9, 200, 7], [1])
    logits = model.forward(
        tiny.make_forward([(text, 5)], states=tiny.make_pool(cfg), tp=SoloGroup(), page_tokens=16)
    )
    assert logits.isfinite().all()
    assert 0.1 < logits.std() < 100
