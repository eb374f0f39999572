"""What each architecture keeps for a token or a request, as StateSpecs. Torch-free."""

from __future__ import annotations

from splitserve.spec import Growth, StateSpec

from .config import ModelConfig

BYTES = {"f32": 4, "bf16": 2, "f16": 2}
"""Bytes of one number by encoding."""


def decoder_states(cfg: ModelConfig, *, dtype: str) -> list[StateSpec]:
    """One PAGED spec a layer. A row is one token of one KV head: its key, then its value, `head_dim` numbers each."""
    row_bytes = 2 * cfg.head_dim * BYTES[dtype]
    return [
        StateSpec("kv", layer, Growth.PAGED, row_bytes, pieces=cfg.num_kv_heads, encoding=dtype)
        for layer in range(cfg.num_layers)
    ]
