"""Tiny random checkpoints on disk, made by transformers, and what else tests of the model share.

Weights are drawn with a large scale, so that attention is far from uniform and a wrong mask or angle shows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from splitserve.kv.pool import Pool
from splitserve.layers.forward import Forward, Group
from splitserve.models.config import ModelConfig
from splitserve.models.registry import states
from splitserve.spec import lay_out

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied-bias": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama3": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    },
    "yarn": {
        "model_type": "qwen2",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "longrope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 64,
            "short_factor": [1.0 + 0.1 * i for i in range(4)],
            "long_factor": [1.5 + 0.7 * i for i in range(4)],
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": 24},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 211,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def write_checkpoint(
    path: Path,
    family: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    shard: str = "5GB",
    **changes: Any,
) -> Any:
    """A random model of `family` saved at `path` as safetensors; returns the transformers model, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**SIZES, **FAMILIES[family], **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = weight.shape[-1] ** -0.5
            weight.copy_(
                1 + 0.1 * torch.randn_like(weight)
                if "norm" in name
                else 1.5 * scale * torch.randn_like(weight)
            )
    model.to(dtype).save_pretrained(path, max_shard_size=shard)
    if dtype is torch.float32:
        return model
    # Read it again: model.to() has rounded the rotary frequencies too, which no checkpoint holds.
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


_GGUF_ARCHS = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}


def write_gguf(checkpoint: Path, path: Path, *, kind: str = "F32") -> Path:
    """A safetensors checkpoint of `write_checkpoint` as GGUF, named as llama.cpp does, matrices of `kind`."""
    import gguf
    from safetensors.torch import load_file

    config = json.loads((checkpoint / "config.json").read_text())
    arch = _GGUF_ARCHS[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    for name, array in _gguf_tensors(load_file(checkpoint / "model.safetensors"), config, arch):
        quantised = gguf.GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(array, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_tensors(
    tensors: dict[str, torch.Tensor], config: dict[str, Any], arch: str
) -> Iterator[tuple[str, Any]]:
    """(GGUF name, array): experts of a layer in one stack, and llama's q and k rows in its converter's order."""
    import gguf

    number = next(n for n, its in gguf.MODEL_ARCH_NAMES.items() if its == arch)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        expert = re.search(r"\.experts\.(\d+)", name)
        which = name.split(".")[-2]
        if expert:
            stacks.setdefault(name.replace(expert[0], ".experts"), {})[int(expert[1])] = tensor
        elif arch == "llama" and which in heads:  # the halves of a head become neighbouring rows
            paired = tensor.unflatten(0, (heads[which], 2, -1)).transpose(1, 2).flatten(0, 2)
            yield names.get_name(name, (".weight", ".bias")), paired.numpy()
        else:
            yield names.get_name(name, (".weight", ".bias")), tensor.numpy()
    for name, experts in stacks.items():
        stack = torch.stack([experts[i] for i in range(len(experts))])
        yield names.get_name(name, (".weight", ".bias")), stack.numpy()


def make_pool(
    cfg: ModelConfig,
    *,
    dtype: str = "f32",
    rank: int = 0,
    size: int = 1,
    num_pages: int = 64,
    page_tokens: int = 16,
    device: str = "cpu",
) -> Pool:
    """The states of one rank, all poisoned: a row that is read and was never written gives NaN."""
    specs = states(cfg, dtype=dtype)
    pool = Pool(
        specs,
        layout=lay_out(specs, page_tokens=page_tokens, rank=rank, size=size),
        num_pages=num_pages,
        num_slots=0,
        device=device,
        allocate=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device),
    )
    pool.poison(range(num_pages))
    return pool


@dataclass
class Text:
    """One request of a test: its tokens, how many have state, and its pages."""

    tokens: list[int]
    pages: list[int]
    done: int = 0


def make_forward(
    chunks: Sequence[tuple[Text, int]],
    *,
    states: Any,
    tp: Group,
    page_tokens: int,
    all_rows: bool = True,
    device: str = "cpu",
) -> Forward:
    """A step that computes the next n tokens of each (sequence, n); advances the sequences. One-token chunks first."""
    chunks = sorted(chunks, key=lambda c: c[1] != 1)
    tokens, positions, page, row, last = [], [], [], [], []
    for seq, n in chunks:
        for t in range(seq.done, seq.done + n):
            tokens.append(seq.tokens[t])
            positions.append(t)
            page.append(seq.pages[t // page_tokens])
            row.append(t % page_tokens)
        seq.done += n
        last.append(len(tokens) - 1)
    q_lens = tuple(n for _, n in chunks)
    width = max(len(s.pages) for s, _ in chunks)
    fwd = Forward(
        tokens=torch.tensor(tokens),
        positions=torch.tensor(positions),
        logit_rows=torch.arange(len(tokens)) if all_rows else torch.tensor(last),
        q_start=torch.tensor([0, *q_lens]).cumsum(0),
        q_lens=q_lens,
        kv_lens=tuple(s.done for s, _ in chunks),
        num_decode=sum(n == 1 for n in q_lens),
        pages=torch.tensor([s.pages + [0] * (width - len(s.pages)) for s, _ in chunks]),
        slots=torch.empty(0, dtype=torch.int64),
        write_page=torch.tensor(page),
        write_row=torch.tensor(row),
        page_tokens=page_tokens,
        states=states,
        tp=tp,
    )
    tensors = {f.name: getattr(fwd, f.name) for f in fields(fwd)}
    return replace(fwd, **{n: t.to(device) for n, t in tensors.items() if isinstance(t, torch.Tensor)})
