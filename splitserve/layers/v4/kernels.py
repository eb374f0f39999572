"""The kernels that layers of DeepSeek-V4 run on: ops/ref/v4, and what is compiled for float32 on a CPU in its place.

Layers ask this module at every call, so that a test can replace one of them for all.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from splitserve.ops.ref import v4 as ref
from splitserve.ops.ref.v4 import (
    CSA,
    Rows,
    Saves,
    Table,
    Weight,
    Windows,
    attend,
    choose_entries,
    encode_keys,
    encode_latents,
    grouped_linear,
    hc_head,
    hc_post,
    index_scores,
    linear_f32,
    plan_saves,
    plan_windows,
    pool_windows,
    rope_table,
    route,
    route_by_token,
    write_rows,
)

__all__ = [
    "CSA",
    "Rows",
    "Saves",
    "Table",
    "Weight",
    "Windows",
    "attend",
    "choose_entries",
    "dequantise",
    "encode_keys",
    "encode_latents",
    "expert_ffn",
    "grouped_linear",
    "hc_head",
    "hc_post",
    "hc_pre",
    "index_scores",
    "linear",
    "linear_f32",
    "mix_experts",
    "plan_saves",
    "plan_windows",
    "pool_windows",
    "rms_norm",
    "rope_table",
    "rotate_tail",
    "route",
    "route_by_token",
    "write_rows",
]


def _compiled(x: torch.Tensor) -> Any:
    """The kernels for `x`."""
    return _cpu() if x.device.type == "cpu" and x.dtype == torch.float32 else ref


@cache
def _cpu() -> Any:
    from splitserve.ops.cpu import v4  # numba takes a second to import

    return v4


def hc_pre(streams: torch.Tensor, *args: Any, **kw: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As in ops/ref/v4/hyper.py."""
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _compiled(streams).hc_pre(streams, *args, **kw)
    return found


def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """As in ops/ref/v4/quant.py."""
    out: torch.Tensor = _compiled(x).linear(x, weight)
    return out


def expert_ffn(x: torch.Tensor, *args: Any, **kw: Any) -> torch.Tensor:
    """As in ops/ref/v4/experts.py."""
    out: torch.Tensor = _compiled(x).expert_ffn(x, *args, **kw)
    return out


def mix_experts(x: torch.Tensor, *args: Any, **kw: Any) -> torch.Tensor:
    """As in ops/ref/v4/experts.py."""
    out: torch.Tensor = _compiled(x).mix_experts(x, *args, **kw)
    return out


def dequantise(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """As in ops/ref/v4/quant.py."""
    like = weight if isinstance(weight, torch.Tensor) else weight.scales
    out: torch.Tensor = _compiled(torch.empty(0, dtype=dtype, device=like.device)).dequantise(weight, dtype)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """As in ops/ref/v4/dense.py."""
    out: torch.Tensor = _compiled(x).rms_norm(x, weight, eps)
    return out


def rotate_tail(x: torch.Tensor, table: Table, *, inverse: bool = False) -> torch.Tensor:
    """As in ops/ref/v4/dense.py."""
    out: torch.Tensor = _compiled(x).rotate_tail(x, table, inverse=inverse)
    return out
