"""DeepSeek-V4's configuration in both spellings, and what it says of the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from splitserve.errors import ConfigError, WeightsError
from splitserve.models.deepseek_v4_config import DeepseekV4Config, from_json
from splitserve.models.deepseek_v4_states import deepseek_v4_states, least_bytes
from splitserve.models.make_checkpoint import FLASH, T1, TINY, flash
from splitserve.spec import Growth, StateSpec, lay_out, live_bytes, page_tokens

PATH = Path("config.json")


def config(values: dict[str, Any] = FLASH, **changes: Any) -> DeepseekV4Config:
    return from_json(values | changes, PATH)


def as_transformers_writes_it(values: dict[str, Any]) -> dict[str, Any]:
    names = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    layers, hashed = values["num_hidden_layers"], values["num_hash_layers"]
    part = values["qk_rope_head_dim"] / values["head_dim"]
    yarn = {k: v for k, v in values["rope_scaling"].items() if k != "type"}
    gone = ("compress_ratios", "num_hash_layers", "qk_rope_head_dim", "rope_scaling", "rope_theta")
    return {k: v for k, v in values.items() if k not in gone} | {
        "layer_types": [names[r] for r in values["compress_ratios"][:layers]],
        "compress_rates": {names[4]: 4, names[128]: 128},
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (layers - hashed),
        "partial_rotary_factor": part,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": part},
            "compress": {
                **yarn,
                "rope_type": "yarn",
                "rope_theta": 160000,
                "partial_rotary_factor": part,
                "attention_factor": 1.0,
            },
        },
    }


@pytest.mark.parametrize("values", [FLASH, TINY, T1], ids=["flash", "tiny", "t1"])
def test_both_spellings_are_one_model(values: dict[str, Any]) -> None:
    assert config(as_transformers_writes_it(values)) == config(values)


def test_flash() -> None:
    cfg = config()
    assert (len(cfg.layers_of(0)), len(cfg.layers_of(4)), len(cfg.layers_of(128))) == (2, 21, 20)
    assert (cfg.nope_dim, cfg.rope_dim, cfg.num_hash_layers, cfg.ratios[43]) == (448, 64, 3, 0)
    assert (cfg.rope.theta, cfg.compress_rope.theta, cfg.compress_rope.attention_factor) == (1e4, 1.6e5, 1.0)
    assert (cfg.bos, cfg.eos, cfg.max_len) == (0, (1,), 1 << 20)


def test_first_layers_of_flash() -> None:
    cfg = from_json(flash(5), PATH)
    assert (cfg.num_layers, cfg.ratios) == (5, (0, 0, 4, 128, 4, 0))
    with pytest.raises(ConfigError, match="43"):
        flash(44)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": None}, "neither compress_ratios nor layer_types"),
        ({"compress_ratios": [0, 4]}, "2 entries for 43 layers"),
        ({"compress_ratios": [0, 4, 16] + [4] * 41}, "holds 16"),
        ({"compress_ratios": [4] * 44}, "MTP layer with compression"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'"),
        ({"num_key_value_heads": 8}, "8 KV heads"),
        ({"o_groups": 7}, "64 heads in 7 output groups"),
        ({"qk_rope_head_dim": 63}, "rotary part of 63"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"num_experts_per_tok": 300}, "300 of 256 experts"),
        ({"num_nextn_predict_layers": 2}, "2 MTP layers"),
        ({"rope_scaling": {"type": "linear"}}, "'linear'"),
        ({"quantization_config": {"weight_block_size": [64, 64]}}, "weight_block_size"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_what_is_not_served_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message) as raised:
        config(**changes)
    assert "config.json" in str(raised.value)


def minimal_bytes(s: int, entry: int, index: int) -> int:
    """What a request of Flash must keep after s tokens, compressor state in float32 at full width."""
    window, c4, c128 = 43 * min(s, 128) * entry, 21 * (s // 4) * entry, 20 * (s // 128) * entry
    pending = 21 * (min(4, s // 4 * 4) + s % 4) * 2 * (1024 + 256) * 4 + 20 * (s % 128) * 2 * 512 * 4
    return window + c4 + 21 * (s // 4) * index + c128 + pending


@pytest.mark.parametrize("s", [3, 127, 256, 4096, 4097, 4223, 131072, 131073])
@pytest.mark.parametrize(("kv", "entry", "index"), [("bf16", 1024, 256), ("fp8", 584, 132)])
def test_a_handoff_moves_little_more_than_it_must(s: int, kv: str, entry: int, index: int) -> None:
    specs = deepseek_v4_states(config(), dtype="bf16", kv=kv)
    moved = live_bytes(specs, 0, s)
    assert moved <= 1.05 * minimal_bytes(s, entry, index)
    assert moved >= 0.9 * minimal_bytes(s, entry, index)
    assert least_bytes(config(), s, dtype="bf16", kv=kv) == minimal_bytes(s, entry, index)


def test_growth_per_token() -> None:
    def growth(kv: str) -> float:
        specs = deepseek_v4_states(config(), dtype="bf16", kv=kv)
        return sum(s.row_bytes / s.tokens_per_row for s in specs if s.growth is Growth.PAGED)

    assert (growth("bf16"), growth("fp8")) == (6880.0, 3850.25)


def test_pages_hold_whole_windows() -> None:
    specs = deepseek_v4_states(config(TINY), dtype="f32")
    with pytest.raises(ConfigError, match="multiple of 128"):
        lay_out(specs, page_tokens=64)
    assert lay_out(specs, page_tokens=128).page_bytes
    assert page_tokens(specs) == 256
    assert page_tokens(specs, 128) == 128
    assert page_tokens([StateSpec("kv", 0, Growth.PAGED, 64)]) == 64


def test_an_unknown_row_encoding_is_named() -> None:
    with pytest.raises(ConfigError, match="fp4"):
        deepseek_v4_states(config(), dtype="bf16", kv="fp4")


def test_packed_rows_are_another_encoding_and_only_where_a_model_has_them() -> None:
    from splitserve.models import registry
    from splitserve.models.config import ModelConfig

    plain, packed = (
        {(s.name, s.layer): s.encoding for s in registry.states(config(TINY), dtype="bf16", kv=kv)}
        for kv in ("auto", "fp8")
    )
    differ = {name for name, _ in plain if any(plain[k] != packed[k] for k in plain if k[0] == name)}
    assert differ == {"window", "c4", "index", "c128"}, "so that cards of the two refuse each other"
    llama = ModelConfig("llama", 1, 8, 1, 1, 8, 8, 8, 8)
    with pytest.raises(ConfigError, match="llama has no packed rows"):
        registry.states(llama, dtype="bf16", kv="fp8")
