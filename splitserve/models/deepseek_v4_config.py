"""What a DeepSeek-V4 model is, read from either spelling of its config.json. Torch-free.

DeepSeek's own spelling has `compress_ratios`, `num_hash_layers`, `qk_rope_head_dim` and `rope_scaling`; transformers
rewrites these on saving into `layer_types` with `compress_rates`, `mlp_layer_types`, `partial_rotary_factor` and
nested `rope_parameters`. Both are accepted, and both give the same record.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitserve.errors import WeightsError

from .config import ModelConfig, Rope, check

ARCH = "deepseek_v4"
SWA, CSA, HCA = 0, 4, 128
"""Compression ratio of a layer: window only, compressed sparse attention, heavily compressed attention."""

_RATIOS = {
    "sliding_attention": SWA,
    "compressed_sparse_attention": CSA,
    "heavily_compressed_attention": HCA,
}
_TILE = 128  # quantised linears: one scale for each 128 x 128 weights


@dataclass(frozen=True)
class DeepseekV4Config(ModelConfig):
    """Names in comments are those of config.json. `head_dim` counts the rotary part; one KV head serves all heads."""

    rope_dim: int = 0  # qk_rope_head_dim: the trailing numbers of a head (and of an index head) that turn
    compress_rope: Rope = field(
        default_factory=Rope
    )  # of layers with ratio 4 or 128; `rope` is that of the others and of MTP
    q_lora: int = 0
    out_groups: int = 1  # o_groups
    out_lora: int = 0  # o_lora_rank, of each group
    window_len: int = 0  # sliding_window, the query's own token included
    ratios: tuple[int, ...] = ()  # of each layer, then of the MTP layer when there is one
    index_heads: int = 0
    index_dim: int = 0
    index_topk: int = 0
    streams: int = 4  # hc_mult
    sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    num_hash_layers: int = 0  # the first layers route by token id
    route_scale: float = 1.0  # routed_scaling_factor
    swiglu_limit: float = 10.0
    num_mtp: int = 0  # num_nextn_predict_layers

    @property
    def nope_dim(self) -> int:
        """Numbers of a head that do not turn."""
        return self.head_dim - self.rope_dim

    def layers_of(self, ratio: int) -> tuple[int, ...]:
        return tuple(i for i in range(self.num_layers) if self.ratios[i] == ratio)


def from_json(values: dict[str, Any], path: Path, *, eos: tuple[int, ...] = ()) -> DeepseekV4Config:
    """The record of a config.json; `eos` are end tokens found elsewhere (generation_config.json).

    Raises WeightsError, naming the file and the key, for what is missing, contradictory or not DeepSeek-V4.
    """
    keys = _Reader(values, str(path))
    keys.require("scoring_func", "sqrtsoftplus")
    keys.require("hidden_act", "silu")
    keys.require("norm_topk_prob", True)
    keys.require("n_shared_experts", 1)
    keys.require("tie_word_embeddings", False)
    _check_quantization(values, str(path))
    layers, head_dim = keys.int("num_hidden_layers"), keys.int("head_dim")
    experts, ffn = keys.int("n_routed_experts"), keys.int("moe_intermediate_size")
    num_mtp = keys.int("num_nextn_predict_layers", 0)
    config = DeepseekV4Config(
        arch=ARCH,
        num_layers=layers,
        hidden=keys.int("hidden_size"),
        num_heads=keys.int("num_attention_heads"),
        num_kv_heads=keys.int("num_key_value_heads", 1),
        head_dim=head_dim,
        ffn=ffn,
        vocab=keys.int("vocab_size"),
        max_len=keys.int("max_position_embeddings", 1 << 20),
        eps=keys.float("rms_norm_eps", 1e-6),
        rope=Rope(theta=_main_theta(keys)),
        compress_rope=_compress_rope(keys),
        rope_dim=_rope_dim(keys, head_dim),
        q_lora=keys.int("q_lora_rank"),
        out_groups=keys.int("o_groups"),
        out_lora=keys.int("o_lora_rank"),
        window_len=keys.int("sliding_window"),
        ratios=_ratios(keys, layers, num_mtp),
        index_heads=keys.int("index_n_heads"),
        index_dim=keys.int("index_head_dim"),
        index_topk=keys.int("index_topk"),
        streams=keys.int("hc_mult", 4),
        sinkhorn_iters=keys.int("hc_sinkhorn_iters", 20),
        hc_eps=keys.float("hc_eps", 1e-6),
        num_experts=experts,
        num_experts_per_token=keys.int("num_experts_per_tok"),
        expert_ffn=ffn,
        norm_experts=True,
        num_hash_layers=_num_hash_layers(keys, layers),
        route_scale=keys.float("routed_scaling_factor", 1.5),
        swiglu_limit=keys.float("swiglu_limit", 10.0),
        num_mtp=num_mtp,
        bos=keys.int("bos_token_id", 0),
        eos=_eos(values.get("eos_token_id", 1), eos),
        encoding="bf16",
    )
    return _check(config, str(path))


class _Reader:
    """Typed look-ups that name the file and the key when they fail."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def int(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, value)
        return value

    def float(self, key: str, default: float) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, value)
        return float(value)

    def require(self, key: str, only: Any) -> None:
        """`key` may be absent; if it is there it must say what this model does."""
        if self.values.get(key, only) != only:
            raise WeightsError(
                f"{self.where}: {key} is {self.values[key]!r}; DeepSeek-V4 has {only!r}", field=key
            )

    def wrong(self, key: str, value: Any) -> WeightsError:
        if value is None:
            return WeightsError(f"{self.where} lacks {key!r}", field=key)
        return WeightsError(f"{self.where}: {key} is {value!r}: not usable", field=key)


def _ratios(keys: _Reader, layers: int, num_mtp: int) -> tuple[int, ...]:
    """Of each layer and of the MTP layers, which are window-only in every released model."""
    listed, types = keys.values.get("compress_ratios"), keys.values.get("layer_types")
    if listed is None and types is None:
        raise WeightsError(
            f"{keys.where} says nothing of compression: neither compress_ratios nor layer_types",
            fix="take config.json from the model's own repository",
        )
    rates = keys.values.get("compress_rates") or {}
    for name, rate in rates.items():
        if _RATIOS.get(name) != rate:
            raise WeightsError(f"{keys.where}: compress_rates[{name!r}] is {rate!r}; 4 and 128 are served")
    ratios: list[Any] = [_RATIOS.get(t, t) for t in types or ()] if listed is None else list(listed)
    key = "layer_types" if listed is None else "compress_ratios"
    for ratio in ratios:
        if ratio not in (SWA, CSA, HCA):
            raise WeightsError(f"{keys.where}: {key} holds {ratio!r}; 0, 4 and 128 are served", field=key)
    if len(ratios) < layers:
        raise WeightsError(f"{keys.where}: {key} has {len(ratios)} entries for {layers} layers", field=key)
    after = [*ratios[layers : layers + num_mtp], *[SWA] * num_mtp][:num_mtp]
    if any(after):
        raise WeightsError(f"{keys.where}: an MTP layer with compression {after} is not served", field=key)
    return (*ratios[:layers], *after)


def _num_hash_layers(keys: _Reader, layers: int) -> int:
    types = keys.values.get("mlp_layer_types")
    if types is None:
        return keys.int("num_hash_layers", 3)
    count = list(types).count("hash_moe")
    if len(types) < layers or any(t not in ("hash_moe", "moe") for t in types) or "hash_moe" in types[count:]:
        raise WeightsError(
            f"{keys.where}: mlp_layer_types is not some 'hash_moe' followed by 'moe', {layers} in all",
            field="mlp_layer_types",
        )
    return count


def _rope_dim(keys: _Reader, head_dim: int) -> int:
    if keys.values.get("qk_rope_head_dim") is not None:
        return keys.int("qk_rope_head_dim")
    return round(head_dim * keys.float("partial_rotary_factor", 0.125))


def _main_theta(keys: _Reader) -> float:
    nested = (keys.values.get("rope_parameters") or {}).get("main")
    return _Reader(nested or keys.values, keys.where).float("rope_theta", 10000.0)


def _compress_rope(keys: _Reader) -> Rope:
    """YaRN with cos and sin left at modulus one: the model does not scale attention by YaRN's factor."""
    parameters = keys.values.get("rope_parameters") or keys.values.get("rope_scaling") or {}
    nested = parameters.get("compress")
    yarn = _Reader(nested or parameters, keys.where)
    theta = yarn.float("rope_theta", 160000.0) if nested else keys.float("compress_rope_theta", 160000.0)
    kind = yarn.values.get("rope_type", yarn.values.get("type", "default"))
    if kind == "default":
        return Rope(theta=theta)
    if kind != "yarn":
        raise WeightsError(
            f"{keys.where}: rope_scaling is {kind!r}; DeepSeek-V4 has 'yarn'", field="rope_scaling"
        )
    return Rope(
        kind="yarn",
        theta=theta,
        factor=yarn.float("factor", 16.0),
        original_len=yarn.int("original_max_position_embeddings", 65536),
        beta_fast=yarn.float("beta_fast", 32.0),
        beta_slow=yarn.float("beta_slow", 1.0),
        attention_factor=1.0,
    )


def _check_quantization(values: dict[str, Any], where: str) -> None:
    quantization = values.get("quantization_config") or {}
    tile = quantization.get("weight_block_size", [_TILE, _TILE])
    if list(tile) != [_TILE, _TILE]:
        raise WeightsError(f"{where}: weight_block_size is {tile!r}; {_TILE} x {_TILE} is served")
    if quantization.get("quant_method", "fp8") != "fp8":
        raise WeightsError(f"{where}: quant_method is {quantization['quant_method']!r}; 'fp8' is served")


def _eos(own: Any, others: tuple[int, ...]) -> tuple[int, ...]:
    ids = own if isinstance(own, list) else [own]
    return tuple(dict.fromkeys([*(i for i in ids if isinstance(i, int)), *others]))


def _check(config: DeepseekV4Config, where: str) -> DeepseekV4Config:
    check(config, where)
    for name in (
        "q_lora",
        "out_groups",
        "out_lora",
        "window_len",
        "streams",
        "sinkhorn_iters",
        "num_experts",
    ):
        if getattr(config, name) < 1:
            raise WeightsError(f"{where}: {name} is {getattr(config, name)}, must be at least 1", field=name)
    if config.num_kv_heads != 1:
        raise WeightsError(f"{where}: {config.num_kv_heads} KV heads; DeepSeek-V4 has one latent for all")
    if config.num_heads % config.out_groups:
        raise WeightsError(f"{where}: {config.num_heads} heads in {config.out_groups} output groups")
    if (
        not 0 < config.rope_dim < min(config.head_dim, config.index_dim or config.head_dim)
        or config.rope_dim % 2
    ):
        raise WeightsError(f"{where}: a rotary part of {config.rope_dim} in heads of {config.head_dim}")
    if CSA in config.ratios and min(config.index_heads, config.index_dim, config.index_topk) < 1:
        raise WeightsError(f"{where}: layers of ratio 4 need index_n_heads, index_head_dim and index_topk")
    if not 0 < config.num_experts_per_token <= config.num_experts:
        raise WeightsError(
            f"{where}: {config.num_experts_per_token} of {config.num_experts} experts for a token"
        )
    if config.num_mtp > 1:
        raise WeightsError(f"{where}: {config.num_mtp} MTP layers; none or one is served")
    return config
