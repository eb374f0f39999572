"""Which kernels a DeepSeek-V4 runs on: layers/v4/kernels.py anywhere, gpu.py beside it for bf16 on a GPU it serves."""

from __future__ import annotations

from typing import Any

import torch

from splitserve.layers.v4 import kernels
from splitserve.ops.choose import served

from .deepseek_v4_config import DeepseekV4Config

_BLOCK = 128  # numbers that the kernels of four-bit codes take at once


def kernels_for(cfg: DeepseekV4Config, device: str | torch.device, dtype: torch.dtype, *, tp: int) -> Any:
    """An object with the functions of kernels.py, for one rank of `tp`."""
    if dtype != torch.bfloat16 or not served(torch.device(device)) or not fits(cfg, tp):
        return kernels
    from splitserve.layers.v4.gpu import GpuKernels  # Triton is imported where it is used

    return GpuKernels()


def fits(cfg: DeepseekV4Config, tp: int) -> bool:
    """Whether the sizes of a model, released or made up, are among those that the GPU's kernels take."""
    ffn, inputs = cfg.expert_ffn // tp, (cfg.hidden, cfg.q_lora)
    nope = cfg.head_dim - cfg.rope_dim
    return (
        cfg.streams == 4
        and all(size % _BLOCK == 0 for size in (ffn, *inputs))
        and (cfg.head_dim <= _BLOCK or 3 * _BLOCK < cfg.head_dim <= 4 * _BLOCK)
        and (nope <= 64 or 384 < nope <= 448)
        and all(_power_of_two(size) for size in (cfg.head_dim, cfg.index_dim))
    )


def _power_of_two(size: int) -> bool:
    return size & (size - 1) == 0
