"""Random DeepSeek-V4 checkpoints in DeepSeek's original format, for tests and for measuring without a download.

Each tensor is drawn from its own stream, seeded by (seed, name): the same seed gives the same bytes in any order, and a
model with fewer layers is a prefix of one with more. Scales of the draws keep logits informative (attention far from
uniform, experts unlike each other), so that a wrong mask, angle or route shows.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from splitserve.errors import ConfigError
from splitserve.ops.ref.v4 import quantise_mxfp4, quantise_tiles, ue8m0_to_float
from splitserve.weights.parameters import Form, Parameter, scale_name

from .deepseek_v4_config import from_json
from .deepseek_v4_weights import Share, parameters

FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 43,
    "num_hash_layers": 3,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "vocab_size": 129280,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}
"""The configuration of DeepSeek-V4-Flash."""

_FOUR_LAYERS = {
    "num_hidden_layers": 4,
    "num_hash_layers": 2,
    "compress_ratios": [0, 4, 128, 4, 0],
    "rope_scaling": FLASH["rope_scaling"] | {"original_max_position_embeddings": 64},
    "max_position_embeddings": 32768,
}

TINY: dict[str, Any] = FLASH | {
    **_FOUR_LAYERS,
    "hidden_size": 256,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "num_attention_heads": 8,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 128,
    "index_n_heads": 32,
    "index_head_dim": 32,
    "index_topk": 8,
    "sliding_window": 16,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
}
"""Every code path in four layers and six megabytes: window + hash, CSA + hash, HCA + learned, CSA + learned."""

T1: dict[str, Any] = FLASH | {
    **_FOUR_LAYERS,
    "hidden_size": 512,
    "num_attention_heads": 16,
    "q_lora_rank": 256,
    "o_groups": 4,
    "o_lora_rank": 128,
    "index_n_heads": 16,
    "index_topk": 64,
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
    "vocab_size": 2048,
}
"""The released models' head, rotary, window and index sizes, so that kernels run unmodified; 52 megabytes."""


def flash(num_layers: int) -> dict[str, Any]:
    """DeepSeek-V4-Flash cut to its first layers. Raises ConfigError when it has fewer."""
    if not 1 <= num_layers <= FLASH["num_hidden_layers"]:
        raise ConfigError(f"{num_layers} layers; DeepSeek-V4-Flash has {FLASH['num_hidden_layers']}")
    return FLASH | {
        "num_hidden_layers": num_layers,
        "num_hash_layers": min(num_layers, FLASH["num_hash_layers"]),
        "compress_ratios": [*FLASH["compress_ratios"][:num_layers], 0],
    }


def changed(config: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """`config` with the numbers that "key=value" strings give. ConfigError for keys that it has not as a number."""
    numbers = [key for key, value in config.items() if type(value) is int]
    for word in words:
        key, _, value = word.partition("=")
        if key not in numbers or not value.isdigit():
            near = difflib.get_close_matches(key, numbers, n=1)
            raise ConfigError(
                f"--set {word}: no change of a whole number",
                field="set",
                fix=f"did you mean {near[0]}?" if near else f"KEY=NUMBER, one of {', '.join(numbers)}",
            )
        config = config | {key: int(value)}
    return config


def write_config(directory: Path, config: dict[str, Any], *, fp8_experts: bool = False) -> None:
    """Write config.json alone. ConfigError where it describes no model."""
    from_json(config, directory / "config.json")
    directory.mkdir(parents=True, exist_ok=True)
    written = config | ({"expert_dtype": "fp8"} if fp8_experts else {})
    (directory / "config.json").write_text(json.dumps(written, indent=1))


def write_checkpoint(
    directory: Path,
    config: dict[str, Any],
    *,
    seed: int = 0,
    shard_bytes: int = 4 << 30,
    fp8_experts: bool = False,
    progress: Callable[[float], None] = lambda _: None,
) -> int:
    """Write config.json, shards and their index; returns the bytes of all tensors. At most one shard is in memory.

    `fp8_experts` makes the -Base variant: experts in E4M3 with float32 tile scales.
    """
    directory.mkdir(parents=True, exist_ok=True)
    cfg = from_json(config, directory / "config.json")
    form = Form.TILES if fp8_experts else Form.MXFP4
    wanted = parameters(cfg, Share(0, 1), expert_form=form)
    files: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    total = held = 0

    def flush() -> None:
        nonlocal held
        name = f"model-{len(set(files.values())) + 1:05d}.safetensors"
        save_file(pending, directory / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(pending, name))
        pending.clear()
        held = 0

    for i, parameter in enumerate(wanted):
        for name, tensor in _tensors(parameter, seed, num_experts=cfg.num_experts):
            nbytes = tensor.numel() * tensor.element_size()
            if pending and held + nbytes > shard_bytes:
                flush()
            pending[name] = tensor
            total, held = total + nbytes, held + nbytes
        progress((i + 1) / len(wanted))
    flush()
    write_config(directory, config, fp8_experts=fp8_experts)
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _tensors(parameter: Parameter, seed: int, *, num_experts: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every tensor of the file that a parameter is made of, each once."""
    seen = set()
    for part in (p for parts in parameter.stack for p in parts):
        if part.tensor in seen:
            continue
        seen.add(part.tensor)
        draw = torch.Generator().manual_seed(_seed_of(seed, part.tensor))
        if parameter.form is Form.INT:
            scores = torch.rand(part.shape[0], num_experts, generator=draw)
            yield part.tensor, scores.topk(part.shape[1], dim=-1).indices
            continue
        values = _draw(part.tensor, part.shape, draw)
        match parameter.form:
            case Form.TILES:
                codes, bits = quantise_tiles(values)
                base = ".experts." in part.tensor
                scales = ue8m0_to_float(bits) if base else bits.view(torch.float8_e8m0fnu)
                yield part.tensor, codes
                yield scale_name(part.tensor), scales
            case Form.MXFP4:
                codes, bits = quantise_mxfp4(values)
                yield part.tensor, codes.view(torch.int8)
                yield scale_name(part.tensor), bits.view(torch.float8_e8m0fnu)
            case Form.F32 if not part.tensor.endswith("norm.weight"):
                yield part.tensor, values
            case _:
                yield part.tensor, values.bfloat16()


def _draw(name: str, shape: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    mean, deviation = spread(name, shape[-1])
    return mean + deviation * torch.randn(shape, generator=draw)


def spread(tensor: str, num_inputs: int) -> tuple[float, float]:
    """Mean and deviation of the numbers of a tensor of the file."""
    leaf = tensor.removesuffix(".weight").rsplit(".", 1)[-1]
    if "norm" in leaf:
        return 1.0, 0.1
    if leaf in {"embed", "ape"} or leaf.endswith("_base"):
        return 0.0, 0.5
    if leaf.endswith("_scale"):
        return 0.5, 0.1
    if leaf == "attn_sink":
        return 0.0, 1.0
    if leaf == "bias":
        return 0.0, 0.1
    gain = 1.0 if leaf.endswith("_fn") else 1.5
    return 0.0, gain / math.sqrt(num_inputs)


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
