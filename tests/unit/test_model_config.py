"""ModelConfig from the configurations that are out there: older spellings, missing keys, end tokens in two places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from splitserve.errors import ConfigError
from splitserve.models.config import ModelConfig
from splitserve.models.read import read_config
from splitserve.models.registry import states
from splitserve.spec import Growth
from splitserve.weights.locate import Source

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 211,
    "max_position_embeddings": 512,
}


def read(path: Path, arch: str, **changes: Any) -> ModelConfig:
    (path / "config.json").write_text(json.dumps({"model_type": arch, **BASE, **changes}))
    return read_config(Source(path, "safetensors"))


@pytest.mark.parametrize(
    ("arch", "changes", "windows"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}, (0, 0, 0, 9)),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 3}, ()),
        ("mistral", {"sliding_window": 9}, (9, 9, 9, 9)),
        ("mistral", {"sliding_window": None}, ()),
        ("llama", {"sliding_window": 9}, ()),
    ],
)
def test_windows(arch: str, changes: dict[str, Any], windows: tuple[int, ...], tmp_path: Path) -> None:
    """Checkpoints from before transformers 4.5x have no `layer_types`."""
    assert read(tmp_path, arch, **changes).windows == windows


def test_old_and_new_spellings_of_rope_agree(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    old = read(tmp_path, "llama", rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    new = read(tmp_path, "llama", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert old == new
    assert (old.rope.kind, old.rope.theta, old.rope.original_len) == ("llama3", 5e5, 64)


def test_end_tokens_of_both_files_count_once(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert read(tmp_path, "llama", eos_token_id=2).eos == (2, 7)


def test_biases_and_norms_by_family(tmp_path: Path) -> None:
    def parts(arch: str, **changes: Any) -> tuple[bool, bool, bool]:
        cfg = read(tmp_path, arch, **changes)
        return cfg.qkv_bias, cfg.out_bias, cfg.qk_norm

    assert parts("llama") == (False, False, False)
    assert parts("llama", attention_bias=True) == (True, True, False)
    assert parts("qwen2") == (True, False, False)
    assert parts("qwen3") == (False, False, True)


def test_max_len_can_only_shrink(tmp_path: Path) -> None:
    cfg = read(tmp_path, "llama")
    assert (cfg.with_max_len(0).max_len, cfg.with_max_len(100).max_len) == (512, 100)
    with pytest.raises(ConfigError, match="max_len=513, the model was made for 512"):
        cfg.with_max_len(513)


@pytest.mark.parametrize(("dtype", "row_bytes"), [("f32", 64), ("bf16", 32), ("f16", 32)])
def test_states(dtype: str, row_bytes: int, tmp_path: Path) -> None:
    """A row is key and value of one KV head: 2 * 8 numbers."""
    specs = states(read(tmp_path, "llama"), dtype=dtype)
    assert [s.layer for s in specs] == [0, 1, 2, 3]
    assert {(s.name, s.growth, s.row_bytes, s.pieces, s.encoding) for s in specs} == {
        ("kv", Growth.PAGED, row_bytes, 4, dtype)
    }
