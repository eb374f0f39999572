"""Which kernels a model runs on: the plain ones in torch, or twins that are faster where they apply."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import torch

from splitserve.ops import ref
from splitserve.ops.kernels.archs import ARCHS

LANES = 8


def kernels(device: str | torch.device, dtype: torch.dtype, *, head_dim: int) -> ModuleType:
    """ops/cpu for float32 on a CPU, ops/triton for bf16 on a GPU that it serves, else ops/ref; the same functions."""
    where = torch.device(device)
    if head_dim % LANES:
        return ref
    if where.type == "cpu" and dtype == torch.float32:
        from splitserve.ops import cpu  # numba takes a second to import

        return cpu
    if dtype == torch.bfloat16 and served(where):
        from splitserve.ops import triton

        return triton
    return ref


def served(device: torch.device) -> bool:
    """Whether ops/triton runs there: a GPU of an architecture that it is compiled for, and Triton beside it."""
    if device.type != "cuda":
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor >= min(ARCHS) and importlib.util.find_spec("triton") is not None
