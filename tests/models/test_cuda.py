"""The same model and sampler on CUDA devices, alone and as a group over NCCL, against the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from splitserve.dist.group import SoloGroup
from splitserve.engine.sampler import sample
from splitserve.layers.forward import Group
from splitserve.models.read import read_config
from splitserve.models.registry import build
from splitserve.types import SamplingParams
from splitserve.weights.locate import locate
from tests.ranks import on_ranks
from tests.tiny import Text, make_forward, make_pool, write_checkpoint

pytestmark = pytest.mark.gpu
PAGE = 16
TEXTS = [[(7 * i + 3 * j) % 211 for j in range(n)] for i, n in enumerate((41, 20, 33))]


@pytest.fixture(autouse=True)
def _exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def compute(path: Path, tp: Group, device: str, dtype: str = "f32") -> torch.Tensor:
    source = locate(path)
    cfg = read_config(source)
    model: Any = build(cfg, tp, dtype=dtype, device=device)
    model.load(source)
    pool = make_pool(cfg, rank=tp.rank, size=tp.size, page_tokens=PAGE, device=device, dtype=dtype)
    texts = [Text(t, list(range(3 * i, 3 * i + 3))) for i, t in enumerate(TEXTS)]
    steps = [[(texts[0], 40), (texts[1], 19)], [(texts[0], 1), (texts[1], 1), (texts[2], 33)]]
    rows = [
        model.forward(make_forward(s, states=pool, tp=tp, page_tokens=PAGE, device=device)) for s in steps
    ]
    return torch.cat(rows).cpu()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2-window", "qwen3-moe"])
def test_one_device_equals_the_cpu(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    expected = compute(tmp_path, SoloGroup(), "cpu")
    torch.testing.assert_close(compute(tmp_path, SoloGroup(), "cuda:0"), expected, atol=1e-4, rtol=0)
    half = compute(tmp_path, SoloGroup(), "cuda:0", "bf16")
    assert (half - expected).abs().mean() < 0.1 * expected.std()


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_two_devices_equal_the_cpu(family: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    write_checkpoint(tmp_path, family)
    expected = compute(tmp_path, SoloGroup(), "cpu")
    for got in on_ranks(2, lambda g: compute(tmp_path, g, f"cuda:{g.rank}"), device="cuda"):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_the_sampler_chooses_alike() -> None:
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(0)) * 3
    params = [
        SamplingParams(temperature=t, seed=s, top_p=p, top_k=k, logprobs=2, repetition_penalty=1.1)
        for s in range(8)
        for t, p, k in ((0.0, 1.0, 0), (1.0, 1.0, 0), (0.7, 0.9, 0), (1.0, 1.0, 40))
        for _ in range(2)
    ]
    kwargs: dict[str, Any] = {"num_prompts": [2] * 64, "histories": [[1, 2, 3]] * 64}
    here = sample(logits, params, list(range(64)), **kwargs)
    there = sample(logits.cuda(), params, list(range(64)), **kwargs)
    assert here[0] == there[0]
    assert [lp.top_ids for lp in here[1] if lp] == [lp.top_ids for lp in there[1] if lp]
