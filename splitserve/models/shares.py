"""Whether a model can be dealt out to a tensor-parallel group. Torch-free: asked before anything is started."""

from __future__ import annotations

from splitserve.errors import ConfigError

from .config import ModelConfig
from .deepseek_v4_config import DeepseekV4Config

_CODED_GROUP = 32
"""Numbers that share a scale in MXFP4: a rank's part of an expert holds whole groups."""

_MOST_RANKS = 16  # of which a fix speaks


def check_decoder(cfg: ModelConfig, size: int) -> None:
    """ConfigError where query heads cannot be dealt out evenly; everything else of a decoder may be uneven."""
    if cfg.num_heads % size:
        raise _error(size, cfg.num_heads, "heads")


def check_deepseek_v4(cfg: DeepseekV4Config, size: int, *, whole_experts: bool = False) -> None:
    """The same for DeepSeek-V4; `whole_experts`: routed experts are dealt out whole, not a slice of each."""
    for what, count in (("output groups", cfg.out_groups), ("heads", cfg.num_heads)):
        if count % size:
            raise _error(size, count, what)
    if whole_experts and cfg.num_experts % size:
        raise _error(size, cfg.num_experts, "experts")
    if cfg.expert_ffn % (_CODED_GROUP * size):
        raise ConfigError(
            f"tp={size} cuts experts of {cfg.expert_ffn} into parts that are no multiple of {_CODED_GROUP}",
            field="tp",
            fix=_fix(cfg.expert_ffn // _CODED_GROUP),
        )


def _error(size: int, count: int, what: str) -> ConfigError:
    return ConfigError(f"tp={size} does not divide {count} {what}", field="tp", fix=_fix(count))


def _fix(count: int) -> str:
    fits = [str(n) for n in range(1, _MOST_RANKS + 1) if count % n == 0]
    return f"tp may be {', '.join(fits)}; more GPUs than that serve as replicas"
