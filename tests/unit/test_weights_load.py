"""Naming rules and sharding: the ranks of any group hold, together, exactly what one rank holds."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
import torch

from splitserve.errors import ConfigError
from splitserve.models.config import ModelConfig
from splitserve.models.llama import sizes
from splitserve.models.read import read_config
from splitserve.ops.ref import Coded, widen
from splitserve.weights.checkpoint import Rows
from splitserve.weights.load import SCALES, load
from splitserve.weights.locate import locate
from splitserve.weights.open import open_checkpoint
from splitserve.weights.rules import DECODER, Rule, Sizes, expand
from tests.tiny import write_checkpoint, write_gguf

DENSE = ModelConfig(
    "llama", num_layers=2, hidden=12, num_heads=6, num_kv_heads=2, head_dim=4, ffn=10, vocab=23, max_len=64
)


class Recorder:
    """A checkpoint in memory that notes the largest read."""

    format, path = "safetensors", Path("memory")

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.tensors, self.largest = tensors, 0

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def file(self, name: str) -> Path:
        return self.path

    def read(self, name: str, start: int, stop: int) -> Rows:
        part = self.tensors[name][start:stop]
        self.largest = max(self.largest, part.size)
        return Rows(part, "f32")


def parameters(path: Path, rank: int, size: int) -> dict[str, torch.Tensor]:
    source = locate(path)
    cfg, checkpoint = read_config(source), open_checkpoint(source)
    return load(
        checkpoint,
        expand(DECODER, checkpoint.format, sizes(cfg, rank, size)),
        dtype=torch.float32,
        interleaved=cfg.head_dim if cfg.interleaved else 0,
    )


@pytest.mark.parametrize("format", ["safetensors", "gguf"])
@pytest.mark.parametrize(("size", "kv_copies"), [(2, 1), (4, 1), (8, 2)])
def test_ranks_hold_the_whole_between_them(size: int, kv_copies: int, format: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3-moe", mlp_only_layers=[] if format == "gguf" else [1])
    path = write_gguf(tmp_path, tmp_path / "x.gguf") if format == "gguf" else tmp_path
    whole = parameters(path, 0, 1)
    ranks = [parameters(path, r, size) for r in range(size)]
    heads, kv, d, vocab = 8, 4, 16, 211
    for name, full in whole.items():
        parts = [r[name] for r in ranks]
        if name.endswith("qkv.weight"):
            q, k, v = full.split([heads * d, kv * d, kv * d])
            cut = [p.split([heads * d // size, *[kv * d * kv_copies // size] * 2]) for p in parts]
            for i, section in enumerate((q, k, v)):
                copies = kv_copies if i else 1
                assert torch.equal(torch.cat([c[i] for c in cut[::copies]]), section), name
                for c in range(1, copies):
                    assert torch.equal(torch.cat([c_[i] for c_ in cut[c::copies]]), section), name
        elif name.endswith("gate_up.weight"):
            together = [torch.cat(halves) for halves in zip(*(p.chunk(2) for p in parts), strict=True)]
            assert torch.equal(torch.cat(together), full), name
        elif name.endswith("experts.gate_up"):
            together = [torch.cat(h, 1) for h in zip(*(p.chunk(2, 1) for p in parts), strict=True)]
            assert torch.equal(torch.cat(together, 1), full), name
        elif name.endswith(("out.weight", "down.weight", "experts.down")):
            assert torch.equal(torch.cat(parts, -1), full), name
        elif name in ("embed", "head"):
            assert len({len(p) for p in parts}) == 1, "all_gather needs equal shares"
            joined = torch.cat(parts)
            assert torch.equal(joined[:vocab], full), name
            assert not joined[vocab:].any(), "padding is zero"
        else:
            assert all(torch.equal(p, full) for p in parts), name


def test_odd_sizes_are_shared_out() -> None:
    """9 heads over 3 ranks, an FFN and a vocabulary that no rank count divides."""
    shares = [sizes(ModelConfig("llama", 1, 12, 9, 3, 4, 10, 23, 64), r, 3) for r in range(3)]
    assert [s.local("q") for s in shares] == [range(12), range(12, 24), range(24, 36)]
    assert [s.local("kv") for s in shares] == [range(4), range(4, 8), range(8, 12)]
    assert [s.local("ffn") for s in shares] == [range(3), range(3, 6), range(6, 10)]
    assert [s.local("vocab") for s in shares] == [range(8), range(8, 16), range(16, 24)]


@pytest.mark.parametrize("size", [4, 5, 12])
def test_heads_that_cannot_be_shared_out(size: int) -> None:
    with pytest.raises(ConfigError, match=f"tp={size}"):
        sizes(DENSE, 0, size)


def test_a_rank_holds_its_part_and_one_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns, size = 4000, 500, 4
    checkpoint = Recorder({"w": np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)})
    rule = Rule("w", "w", "w", ("rows", "columns"))
    part = Sizes({"rows": rows, "columns": columns}, {"columns": range(100, 225)}, 0, lambda _: set())
    monkeypatch.setattr("splitserve.weights.load._STRETCH", 50_000)
    seen: list[float] = []
    loaded = load(checkpoint, expand([rule], "safetensors", part), dtype=torch.float32, progress=seen.append)
    assert checkpoint.largest == 50_000
    assert seen == [1.0]
    assert torch.equal(loaded["w"], torch.from_numpy(checkpoint.tensors["w"][:, 100:225]))
    assert loaded["w"].numel() == rows * columns // size
    assert loaded["w"].is_contiguous()


def test_rules_apply_by_feature_and_layer() -> None:
    rules = [
        Rule("norm", "n", "gn", ("h",)),
        Rule("layers.{n}.w", "l.{n}.a", "b.{n}.a", ("q", "h")),
        Rule("layers.{n}.w", "l.{n}.b", "b.{n}.b", ("k", "h")),
        Rule("layers.{n}.x", "l.{n}.{e}.x", "b.{n}.x", ("experts", "q", "h"), needs="moe"),
    ]
    axes = Sizes(
        {"h": 5, "q": 6, "k": 2, "experts": 2},
        {"q": range(3, 6), "k": range(1)},
        2,
        lambda layer: {"moe"} if layer == 1 else set(),
    )
    got = expand(rules, "safetensors", axes)
    assert got.shapes == {"norm": (5,), "layers.0.w": (4, 5), "layers.1.w": (4, 5), "layers.1.x": (2, 3, 5)}
    assert set(got.placements) == {"n", "l.0.a", "l.0.b", "l.1.a", "l.1.b", "l.1.0.x", "l.1.1.x"}
    b = got.placements["l.1.b"]
    assert (b.parameter, b.shape, b.cuts) == ("layers.1.w", (2, 5), (range(1), range(5)))
    assert b.into == (slice(3, 4), slice(0, 5))
    assert got.placements["l.1.1.x"].into == (1, slice(0, 3), slice(0, 5))
    assert set(expand(rules, "gguf", axes).placements) == {"gn", "b.0.a", "b.0.b", "b.1.a", "b.1.b", "b.1.x"}


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
@pytest.mark.parametrize("size", [1, 2])
def test_what_is_left_as_stored_is_the_same_numbers(kind: str, size: int, tmp_path: Path) -> None:
    """Bit for bit what the gguf package makes of them; llama's rotated rows are put back either way."""
    write_checkpoint(tmp_path, "llama")
    source = locate(write_gguf(tmp_path, tmp_path / "x.gguf", kind=kind))
    cfg, checkpoint = read_config(source), open_checkpoint(source)
    dense, stored = (
        load(
            checkpoint,
            expand(DECODER, checkpoint.format, sizes(cfg, size - 1, size)),
            dtype=torch.float32,
            interleaved=cfg.head_dim,
            as_stored=as_stored,
        )
        for as_stored in (False, True)
    )
    kept = torch.uint8 if kind[0] == "Q" else {"F16": torch.float16, "BF16": torch.bfloat16}[kind]
    for name, numbers in dense.items():
        scales = stored.get(name + SCALES)
        weight = stored[name] if scales is None else Coded(stored[name], scales)
        assert torch.equal(widen(weight, torch.float32), numbers), name
        columns_cut_a_group = kind[0] == "Q" and numbers.dim() == 2 and numbers.shape[1] % 32
        matrix = numbers.dim() == 2 and not columns_cut_a_group
        assert stored[name].dtype is (kept if matrix else torch.float32), name
