"""A ModelConfig from a checkpoint's files: config.json beside safetensors, or the metadata of GGUF. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from splitserve.errors import WeightsError
from splitserve.weights.gguf import GgufFile
from splitserve.weights.locate import Source

from . import deepseek_v4_config
from .config import ModelConfig, Rope, check, check_layers

T = TypeVar("T")

HF_ARCHS = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
}
"""`model_type` of config.json -> our arch."""

HF_CLASSES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""`architectures` of config.json -> our arch: what the weights compute, where `model_type` says how they are read."""

GGUF_ARCHS = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
"""`general.architecture` of GGUF -> our arch (llama.cpp calls Mistral llama)."""

_ROPE_KINDS = {
    "default": "default",
    "none": "default",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
}


def read_config(source: Source) -> ModelConfig:
    """Raises WeightsError: unreadable or unknown, always naming the file and the key."""
    if source.format == "gguf":
        return _from_gguf(GgufFile(source.path))
    return from_hf(
        _read_json(source.path / "config.json"), source.path / "config.json", generation=_generation(source)
    )


class _Keys:
    """Typed look-ups in a metadata dictionary that name the file when they fail."""

    def __init__(self, values: dict[str, Any], where: str, prefix: str = "") -> None:
        self._values, self.where, self._prefix = values, where, prefix

    def raw(self, key: str) -> Any:
        return self._values.get(self._prefix + key)

    def get(self, key: str, default: T, kind: Callable[[Any], T] | None = None) -> T:
        """The value of `key` as the type of `default` (or by `kind`); `default` where it is absent or null."""
        value = self.raw(key)
        return default if value is None else self._typed(key, value, kind or type(default))

    def need(self, key: str) -> int:
        value = self.raw(key)
        if value is None:
            raise WeightsError(f"{self.where} lacks {self._prefix + key!r}", field=key)
        return self._typed(key, value, int)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers; empty where it is absent or null."""
        items = self.raw(key)
        if items is not None and not isinstance(items, list):
            raise WeightsError(f"{self.where}: {self._prefix + key} is {items!r}: no list", field=key)
        return tuple(self._typed(key, item, float) for item in items or ())

    def ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them; empty where it is absent or null."""
        value = self.raw(key)
        items = value if isinstance(value, list) else [] if value is None else [value]
        return tuple(self._typed(key, item, int) for item in items)

    def _typed(self, key: str, value: Any, kind: Callable[[Any], T]) -> T:
        try:
            number = kind(value)
        except (TypeError, ValueError, OverflowError):
            number = None
        # int("3"), bool("no") and int(2.5) succeed and are wrong: a value must survive its own conversion.
        if number is None or (isinstance(value, str) and kind is not str) or number != value:
            raise WeightsError(f"{self.where}: {self._prefix + key} is {value!r}: not usable", field=key)
        return number


# ------------------------------------------------------------------ Hugging Face


def from_hf(values: dict[str, Any], path: Path, *, generation: dict[str, Any] | None = None) -> ModelConfig:
    """The record of a config.json (and of generation_config.json, whose end tokens count too)."""
    if values.get("model_type") == deepseek_v4_config.ARCH:
        return deepseek_v4_config.from_json(
            values, path, eos=_Keys(generation or {}, str(path)).ids("eos_token_id")
        )
    keys = _Keys(values, str(path))
    arch = _known_arch(values.get("model_type"), HF_ARCHS, str(path))
    _check_class(values.get("architectures"), arch, str(path))
    act = values.get("hidden_act", "silu")
    if act != "silu":
        raise WeightsError(f"{path}: hidden_act is {act!r}; these models use 'silu'")
    heads, hidden = keys.need("num_attention_heads"), keys.need("hidden_size")
    layers = check_layers(keys.need("num_hidden_layers"), str(path))
    max_len = keys.get("max_position_embeddings", 2048)
    attention_bias = keys.get("attention_bias", False)
    config = ModelConfig(
        arch=arch,
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=keys.get("num_key_value_heads", heads),
        head_dim=keys.get("head_dim", 128 if arch.startswith("qwen3") else hidden // max(heads, 1)),
        ffn=keys.need("intermediate_size"),
        vocab=keys.need("vocab_size"),
        max_len=max_len,
        eps=keys.get("rms_norm_eps", 1e-6),
        rope=_hf_rope(values, str(path), max_len),
        tied_head=keys.get("tie_word_embeddings", False),
        qkv_bias=arch == "qwen2" or attention_bias,
        out_bias=arch != "qwen2" and attention_bias,
        mlp_bias=keys.get("mlp_bias", False),
        qk_norm=arch.startswith("qwen3"),
        windows=_hf_windows(keys, arch, layers),
        **(_hf_experts(keys, layers) if arch == "qwen3_moe" else {}),
        bos=keys.get("bos_token_id", None, int),
        eos=tuple(
            dict.fromkeys(keys.ids("eos_token_id") + _Keys(generation or {}, str(path)).ids("eos_token_id"))
        ),
        encoding=_hf_encoding(values),
    )
    return check(config, str(path))


def _check_class(classes: Any, arch: str, where: str) -> None:
    """Refuse a model of a known type whose class is another: it would load and compute something else."""
    if not classes:
        return
    known = [name for name, of in HF_CLASSES.items() if of == arch]
    if not isinstance(classes, list) or not set(classes) & set(known):
        raise WeightsError(
            f"{where}: architectures is {classes!r}, and model_type {arch!r} is served as {known[0]}",
            field="architectures",
            fix=f"serve a checkpoint of {', '.join(sorted(HF_CLASSES))}",
        )


def _hf_windows(keys: _Keys, arch: str, layers: int) -> tuple[int, ...]:
    """Mistral slides everywhere when it slides; Qwen only where `use_sliding_window` and the layer's type say so."""
    window = keys.get("sliding_window", 0)
    if not window or arch == "llama" or (arch != "mistral" and not keys.get("use_sliding_window", False)):
        return ()
    types = keys.raw("layer_types")
    if arch in ("mistral", "qwen3_moe"):
        return (window,) * layers
    if types is None:
        first = keys.get("max_window_layers", 28)
        return tuple(window if i >= first else 0 for i in range(layers))
    if not isinstance(types, list) or len(types) != layers:
        raise WeightsError(f"{keys.where}: layer_types is not a list of {layers}")
    return tuple(window if t == "sliding_attention" else 0 for t in types)


def _hf_experts(keys: _Keys, layers: int) -> dict[str, Any]:
    dense = keys.numbers("mlp_only_layers")
    every = keys.get("decoder_sparse_step", 1)
    experts = keys.get("num_experts", keys.get("num_local_experts", 128))
    return {
        "num_experts": experts,
        "num_experts_per_token": keys.get("num_experts_per_tok", 8),
        "expert_ffn": keys.get("moe_intermediate_size", 768),
        "norm_experts": keys.get("norm_topk_prob", False),
        "sparse_layers": tuple(i not in dense and every > 0 and (i + 1) % every == 0 for i in range(layers)),
    }


def _hf_rope(values: dict[str, Any], where: str, max_len: int) -> Rope:
    """`rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise WeightsError(f"{where}: the rope scaling {scaling!r} is no object")
    keys = _Keys(scaling, f"{where} (rope)")
    name = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if name not in _ROPE_KINDS:
        raise WeightsError(
            f"{where}: rope scaling {name!r} is not known", fix=f"known: {', '.join(sorted(_ROPE_KINDS))}"
        )
    if keys.get("partial_rotary_factor", _Keys(values, where).get("partial_rotary_factor", 1.0)) != 1.0:
        raise WeightsError(f"{where}: rotary embedding over part of a head is not supported")
    original = keys.get(
        "original_max_position_embeddings",
        _Keys(values, where).get("original_max_position_embeddings", max_len),
    )
    return Rope(
        kind=_ROPE_KINDS[name],
        theta=keys.get("rope_theta", _Keys(values, where).get("rope_theta", 10000.0)),
        factor=keys.get("factor", max_len / max(original, 1)),
        original_len=original,
        low_freq_factor=keys.get("low_freq_factor", 1.0),
        high_freq_factor=keys.get("high_freq_factor", 4.0),
        beta_fast=keys.get("beta_fast", 32.0),
        beta_slow=keys.get("beta_slow", 1.0),
        truncate=keys.get("truncate", True),
        mscale=keys.get("mscale", 0.0),
        mscale_all_dim=keys.get("mscale_all_dim", 0.0),
        attention_factor=keys.get("attention_factor", None, float),
        short_factor=keys.numbers("short_factor"),
        long_factor=keys.numbers("long_factor"),
    )


def _hf_encoding(values: dict[str, Any]) -> str:
    name = str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch.")
    return {"bfloat16": "bf16", "float16": "f16"}.get(name, "f32")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except OSError as e:
        raise WeightsError(f"{path} cannot be read: {e.strerror or e}") from e
    except (ValueError, RecursionError) as e:
        raise WeightsError(f"{path} is no JSON: {e}") from e
    if not isinstance(values, dict):
        raise WeightsError(f"{path} holds no JSON object")
    return values


def _generation(source: Source) -> dict[str, Any]:
    path = source.path / "generation_config.json"
    return _read_json(path) if path.is_file() else {}


# ------------------------------------------------------------------ GGUF


def _from_gguf(file: GgufFile) -> ModelConfig:
    where, meta = str(file.path), file.metadata
    name = meta.get("general.architecture")
    arch = _known_arch(name, GGUF_ARCHS, where)
    keys = _Keys(meta, where, f"{name}.")
    tokens = _Keys(meta, where, "tokenizer.ggml.")
    names = file.names()
    if "token_embd.weight" not in names:
        raise WeightsError(f"{where} lacks tensor 'token_embd.weight'")
    heads, hidden = keys.need("attention.head_count"), keys.need("embedding_length")
    layers = check_layers(keys.need("block_count"), where)
    window = keys.get("attention.sliding_window", 0)
    config = ModelConfig(
        arch=arch,
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=keys.get("attention.head_count_kv", heads),
        head_dim=keys.get("attention.key_length", hidden // max(heads, 1)),
        ffn=keys.get("feed_forward_length", 0) or keys.get("expert_feed_forward_length", 0),
        vocab=file.shape("token_embd.weight")[0],
        max_len=keys.need("context_length"),
        eps=keys.get("attention.layer_norm_rms_epsilon", 1e-6),
        rope=_gguf_rope(keys, file),
        tied_head="output.weight" not in names,
        qkv_bias="blk.0.attn_q.bias" in names,
        out_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_up.bias" in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
        windows=(window,) * layers if window else (),
        num_experts=keys.get("expert_count", 0),
        num_experts_per_token=keys.get("expert_used_count", 0),
        expert_ffn=keys.get("expert_feed_forward_length", 0),
        norm_experts=arch == "qwen3_moe",  # llama.cpp scales Qwen3's experts always
        sparse_layers=tuple(f"blk.{i}.ffn_gate_inp.weight" in names for i in range(layers)),
        bos=tokens.get("bos_token_id", None, int),
        eos=tuple(dict.fromkeys(tokens.ids("eos_token_id") + tokens.ids("eot_token_id"))),
        encoding={1: "f16", 30: "bf16"}.get(file.type("token_embd.weight"), "f32"),  # ggml's type numbers
        interleaved=name == "llama",
    )
    return check(config, where)


def _gguf_rope(keys: _Keys, file: GgufFile) -> Rope:
    theta = keys.get("rope.freq_base", 10000.0)
    if "rope_freqs.weight" in file.names():
        rows = file.read("rope_freqs.weight", 0, file.shape("rope_freqs.weight")[0])
        return Rope("divided", theta, divisors=tuple(float(x) for x in rows.array))
    name = keys.get("rope.scaling.type", "none", str) if keys.raw("rope.scaling.type") != "" else "none"
    if name not in ("none", "linear", "yarn"):
        raise WeightsError(
            f"{keys.where}: rope scaling {name!r} is not read from GGUF", fix="use safetensors"
        )
    return Rope(
        kind=_ROPE_KINDS[name],
        theta=theta,
        factor=keys.get("rope.scaling.factor", 1.0),
        original_len=keys.get("rope.scaling.original_context_length", keys.need("context_length")),
    )


def _known_arch(name: object, known: dict[str, str], where: str) -> str:
    if not isinstance(name, str) or name not in known:
        raise WeightsError(
            f"{where}: architecture {name!r} is not known",
            field="model",
            fix=f"known: {', '.join(sorted(known))}",
        )
    return known[name]
