"""Our logits against transformers', float32, for each family; and one text cut in any way against itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from splitserve.dist.group import SoloGroup
from splitserve.kv.pool import Pool
from splitserve.models.read import read_config
from splitserve.models.registry import build
from splitserve.weights.locate import locate
from tests.tiny import FAMILIES, Text, make_forward, make_pool, write_checkpoint, write_gguf

PAGE = 16


def load(path: Path, *, max_len: int = 0, dtype: str = "f32") -> Any:
    source = locate(path)
    model = build(read_config(source).with_max_len(max_len), SoloGroup(), dtype=dtype)
    model.load(source)
    return model


def text(length: int, *, vocab: int = 211, seed: int = 0, first_page: int = 1) -> Text:
    draw = random.Random(seed)
    count = -(-length // PAGE)
    pages = list(range(first_page, first_page + count))
    draw.shuffle(pages)
    return Text([draw.randrange(vocab) for _ in range(length)], pages)


def run(model: Any, states: Pool, seq: Text, sizes: list[int]) -> torch.Tensor:
    """Logits of all tokens of one text, computed in chunks of `sizes`."""
    return torch.cat(
        [
            model.forward(make_forward([(seq, n)], states=states, tp=SoloGroup(), page_tokens=PAGE))
            for n in sizes
        ]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path, family)
    model, seq = load(tmp_path), text(90)
    assert (model._decoder is None) == ("moe" in family), "every dense layer is two compiled calls"
    with torch.no_grad():
        expected = reference(torch.tensor([seq.tokens])).logits[0]
    assert expected.std() > 0.3, "a flat model proves nothing"
    torch.testing.assert_close(run(model, make_pool(model.cfg), seq, [90]), expected, atol=1e-4, rtol=0)


def test_longrope_within_the_original_length(tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path, "longrope")
    seq = text(60)
    with torch.no_grad():
        expected = reference(torch.tensor([seq.tokens])).logits[0]
    short, long = load(tmp_path, max_len=64), load(tmp_path, max_len=65)
    torch.testing.assert_close(run(short, make_pool(short.cfg), seq, [60]), expected, atol=1e-4, rtol=0)
    assert (run(long, make_pool(long.cfg), text(60), [60]) - expected).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sharded_half_precision_checkpoints(dtype: torch.dtype, tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path, "qwen3", dtype=dtype, shard="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    model, seq = load(tmp_path), text(40)
    with torch.no_grad():
        expected = reference(torch.tensor([seq.tokens])).logits[0]
    torch.testing.assert_close(run(model, make_pool(model.cfg), seq, [40]), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("dtype", "error"), [("bf16", 0.04), ("f16", 0.005)])
def test_half_precision_stays_near(dtype: str, error: float, tmp_path: Path) -> None:
    """The root mean square error against float32, over the logits' own: some roundings of 2^-9 and 2^-11."""
    write_checkpoint(tmp_path, "qwen3")
    exact, model = load(tmp_path), load(tmp_path, dtype=dtype)
    expected = run(exact, make_pool(exact.cfg), text(60), [60])
    for sizes in ([60], [1] * 60, [30, 30]):
        found = run(model, make_pool(model.cfg, dtype=dtype), text(60), sizes)
        assert found.dtype is torch.float32
        assert (found - expected).std() < error * expected.std()


@pytest.mark.parametrize("family", ["llama", "llama-tied-bias", "qwen2", "qwen3", "qwen3-moe"])
def test_gguf_equals_safetensors(family: str, tmp_path: Path) -> None:
    """Above all that llama's q and k rows are put back: any other order gives other logits."""
    all_sparse = {"mlp_only_layers": []} if family == "qwen3-moe" else {}  # GGUF has no mixed ones
    write_checkpoint(tmp_path, family, **all_sparse)
    expected, found = (
        run(model, make_pool(model.cfg), text(40), [40])
        for model in (load(tmp_path), load(write_gguf(tmp_path, tmp_path / "x.gguf", kind="F32")))
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2-window", "qwen3-moe"])
@pytest.mark.parametrize(
    "sizes", [[1] * 70, [33, 37], [16, 16, 16, 16, 6], [5, 1, 1, 62, 1]], ids=lambda s: f"{len(s)}-chunks"
)
def test_chunks_equal_the_whole(family: str, sizes: list[int], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    model = load(tmp_path)
    whole = run(model, make_pool(model.cfg), text(70), [70])
    torch.testing.assert_close(run(model, make_pool(model.cfg), text(70), sizes), whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_mixed_step_equals_each_alone(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    model = load(tmp_path)
    lengths = [40, 17, 64, 49]
    alone = []
    for i, n in enumerate(lengths):
        alone.append(run(model, make_pool(model.cfg), text(n, seed=i), [n]))
    states = make_pool(model.cfg)
    seqs = [text(n, seed=i, first_page=1 + 10 * i) for i, n in enumerate(lengths)]
    for seq, n in zip(seqs, (39, 16, 30, 20), strict=True):
        run(model, states, seq, [n])
    # two decode, one continues a chunk across pages, one ends its prompt
    step = make_forward(
        [(seqs[0], 1), (seqs[1], 1), (seqs[2], 20), (seqs[3], 29)],
        states=states,
        tp=SoloGroup(),
        page_tokens=PAGE,
    )
    logits = model.forward(step)
    expected = torch.cat([alone[0][39:40], alone[1][16:17], alone[2][30:50], alone[3][20:49]])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
