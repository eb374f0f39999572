"""Which kernels a model runs on: the plain ones in torch, or twins that are faster where they apply."""

from __future__ import annotations

from types import ModuleType

import torch

from splitserve.ops import ref

LANES = 8


def kernels(device: str | torch.device, dtype: torch.dtype, *, head_dim: int) -> ModuleType:
    """ops/cpu for float32 on a CPU, else ops/ref. The modules have the same functions."""
    if torch.device(device).type != "cpu" or dtype != torch.float32 or head_dim % LANES:
        return ref
    from splitserve.ops import cpu  # numba takes a second to import

    return cpu
