"""What a decoder model is, in one frozen record, read from config.json or from GGUF metadata. Torch-free.

Families differ by values only: Llama, SmolLM2, Mistral, Qwen2 and Qwen3 are one forward pass (models/llama.py) with
some parts present or not. Source of the HF keys and of their defaults: the configuration classes of transformers 5;
of the GGUF keys: the GGUF specification.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from splitserve.errors import ConfigError, WeightsError


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base and, for longer contexts, how its frequencies are scaled (see models/rope.py)."""

    kind: str = "default"  # default, linear, llama3, yarn, longrope, divided
    theta: float = 10000.0
    factor: float = 1.0
    original_len: int = 0  # tokens of the model before its context was stretched
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None  # yarn, longrope; None: from factor
    short_factor: tuple[float, ...] = ()  # longrope
    long_factor: tuple[float, ...] = ()
    divisors: tuple[float, ...] = ()  # divided: GGUF files carry llama3's result, not its parameters


@dataclass(frozen=True)
class ModelConfig:
    arch: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int  # of dense layers
    vocab: int
    max_len: int  # tokens of prompt and output together
    eps: float = 1e-6
    rope: Rope = Rope()
    tied_head: bool = False  # the output head is the embedding table
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()  # sliding window of each layer, 0: none; empty: none anywhere
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_ffn: int = 0
    norm_experts: bool = False  # scale the chosen experts' weights to sum to one
    sparse_layers: tuple[bool, ...] = ()  # which layers have experts; empty: none
    bos: int | None = None
    eos: tuple[int, ...] = ()  # any of these ends an answer
    encoding: str = "f32"  # of the checkpoint's numbers; f32 for quantised ones
    interleaved: bool = False  # q and k rows lie in llama.cpp's rotary order

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def sparse(self, layer: int) -> bool:
        return bool(self.sparse_layers) and self.sparse_layers[layer]

    def with_max_len(self, max_len: int) -> ModelConfig:
        """The same model served up to `max_len` tokens (0 keeps the model's own). Raises ConfigError when too long."""
        if max_len > self.max_len:
            raise ConfigError(f"max_len={max_len}, the model was made for {self.max_len}", field="max_len")
        return replace(self, max_len=max_len or self.max_len)


_MAX_LAYERS = 1024  # damage in a header must not become a loop over 2^32 layers


def check_layers(number: int, where: str) -> int:
    """`number` of layers, when a model can have it. Raises WeightsError."""
    if not 1 <= number <= _MAX_LAYERS:
        raise WeightsError(
            f"{where}: {number} layers; between 1 and {_MAX_LAYERS} are possible", field="num_layers"
        )
    return number


def check(config: ModelConfig, where: str) -> ModelConfig:
    """Raise WeightsError, naming the file, where the numbers cannot belong to one model; return `config`."""
    for name in ("hidden", "num_heads", "num_kv_heads", "head_dim", "ffn", "vocab", "max_len"):
        if getattr(config, name) < 1:
            raise WeightsError(f"{where}: {name} is {getattr(config, name)}, must be at least 1", field=name)
    if config.num_heads % config.num_kv_heads:
        raise WeightsError(
            f"{where}: {config.num_heads} heads are no multiple of {config.num_kv_heads} KV heads"
        )
    if config.head_dim % 2:
        raise WeightsError(f"{where}: heads of {config.head_dim}; rotary embedding needs an even size")
    if any(config.sparse_layers) and not 0 < config.num_experts_per_token <= config.num_experts:
        raise WeightsError(
            f"{where}: {config.num_experts_per_token} of {config.num_experts} experts for a token"
        )
    if not 0 <= config.eps < 1:
        raise WeightsError(f"{where}: the epsilon of the norms is {config.eps}", field="eps")
    _check_rope(config.rope, config.head_dim // 2, where)
    return config


def _check_rope(rope: Rope, pairs: int, where: str) -> None:
    positive = (rope.factor, *rope.short_factor, *rope.long_factor, *rope.divisors)
    bands = rope.beta_fast > rope.beta_slow > 0 and rope.high_freq_factor > rope.low_freq_factor >= 0
    if not (rope.theta > 1 and all(0 < x < math.inf for x in positive) and bands and rope.original_len >= 0):
        raise WeightsError(f"{where}: impossible rotary embedding: {rope}")
    if rope.kind in ("llama3", "yarn", "longrope") and rope.original_len < 2:
        raise WeightsError(f"{where}: {rope.kind} scaling needs the original length, not {rope.original_len}")
    tables = {"longrope": (rope.short_factor, rope.long_factor), "divided": (rope.divisors,)}.get(
        rope.kind, ()
    )
    for table in tables:
        if len(table) != pairs:
            raise WeightsError(
                f"{where}: {rope.kind} scaling has {len(table)} factors, these heads need {pairs}"
            )
