"""The kernels that layers of DeepSeek-V4 run on: ops/ref/v4, and what is compiled for float32 on a CPU in its place.

Layers ask this module at every call, so that a test can replace one of them for all. Some of its functions are two or
more kernels in a row; gpu.py has the same names for bf16 on a GPU, where each of these is one kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

from splitserve.layers.forward import Group
from splitserve.ops.ref import v4 as ref
from splitserve.ops.ref.v4 import (
    CSA,
    Gate,
    Places,
    Reach,
    Rows,
    Saves,
    Singles,
    Store,
    Table,
    Weight,
    Windows,
    absorb,
    choose_entries,
    encode_keys,
    encode_latents,
    entry_positions,
    hc_head,
    linear_f32,
    locate_entries,
    plan_saves,
    plan_windows,
    pool_windows,
    rope_table,
    route,
    route_by_token,
)

T = TypeVar("T")

__all__ = [
    "CSA",
    "Gate",
    "Places",
    "Reach",
    "Rows",
    "Saves",
    "Singles",
    "Store",
    "Table",
    "Weight",
    "Windows",
    "absorb",
    "attend",
    "beside",
    "choose_entries",
    "choose_located",
    "compile_loops",
    "dequantise",
    "encode_keys",
    "encode_latents",
    "entry_positions",
    "expert_ffn",
    "grouped_linear",
    "hc_enter",
    "hc_head",
    "hc_post",
    "hc_pre",
    "index_scores",
    "linear",
    "linear_f32",
    "linear_f32_parts",
    "linear_parts",
    "locate_entries",
    "mix_experts",
    "mix_onto",
    "plan_saves",
    "plan_windows",
    "pool_windows",
    "prepare",
    "rms_norm",
    "rms_norm_rotate",
    "rope_table",
    "rotate_tail",
    "route",
    "route_by_token",
    "write_keys",
    "write_latents",
    "write_rows",
]


def _compiled(x: torch.Tensor) -> Any:
    """The kernels for `x`."""
    return _cpu() if x.device.type == "cpu" and x.dtype == torch.float32 else ref


@cache
def _cpu() -> Any:
    from splitserve.ops.cpu import v4  # numba takes a second to import

    return v4


def compile_loops(device: torch.device, dtype: torch.dtype) -> None:
    """What activations of this type will run on is compiled afterwards."""
    kernels = _compiled(torch.empty(0, dtype=dtype, device=device))
    if kernels is not ref:
        kernels.prepare()


def hc_pre(streams: torch.Tensor, *args: Any, **kw: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As in ops/ref/v4/hyper.py."""
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _compiled(streams).hc_pre(streams, *args, **kw)
    return found


def hc_post(y: torch.Tensor, *args: Any) -> torch.Tensor:
    """As in ops/ref/v4/hyper.py."""
    out: torch.Tensor = _compiled(y).hc_post(y, *args)
    return out


def hc_enter(
    streams: torch.Tensor, *args: Any, norm: torch.Tensor, norm_eps: float, **kw: Any
) -> tuple[torch.Tensor, Callable[[torch.Tensor, Group], torch.Tensor]]:
    """rms_norm of hc_pre's x, and hc_post of what becomes of it, summed over a group's ranks."""
    x, post, comb = hc_pre(streams, *args, norm_eps=norm_eps, **kw)
    return rms_norm(x, norm, norm_eps), lambda y, group: hc_post(group.all_reduce(y), streams, post, comb)


def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """As in ops/ref/v4/quant.py."""
    out: torch.Tensor = _compiled(x).linear(x, weight)
    return out


def linear_parts(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """As `linear`; elsewhere it may come in parts: for rms_norm, rms_norm_rotate and what hc_enter gives."""
    return linear(x, weight)


def linear_f32_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As `linear_f32`; elsewhere it may come in parts: for route and route_by_token."""
    return linear_f32(x, weight)


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


def rms_norm_rotate(x: torch.Tensor, weight: torch.Tensor | None, eps: float, table: Table) -> torch.Tensor:
    """rotate_tail of rms_norm: [T, heads, head_dim] of the same."""
    return rotate_tail(rms_norm(x, weight, eps), table)


def attend(
    q: torch.Tensor,
    near: Rows,
    far: Rows | None,
    sink: torch.Tensor,
    *,
    turn_back: Table,
    out: torch.Tensor | None = None,
    **kw: Any,
) -> torch.Tensor:
    """As in ops/ref/v4/sparse.py, rotated back: values carry their key's angle, which this makes relative."""
    found = rotate_tail(_compiled(q).attend(q, near, far, sink, **kw), turn_back, inverse=True)
    return found if out is None else out.copy_(found)


def grouped_linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """As in ops/ref/v4/dense.py, for weights of any form."""
    compiled = _compiled(x)
    if compiled is ref:
        return ref.grouped_linear(x, dequantise(weight, x.dtype))
    out: torch.Tensor = compiled.grouped_linear(x, weight)
    return out


def index_scores(q: torch.Tensor, weights: torch.Tensor, *args: Any, scale: float, **kw: Any) -> torch.Tensor:
    """As in ops/ref/v4/indexer.py, for weights that are yet to be scaled."""
    out: torch.Tensor = _compiled(q).index_scores(q, weights * scale, *args, **kw)
    return out


def write_rows(view: torch.Tensor, rows: torch.Tensor, unit: torch.Tensor, row: torch.Tensor) -> None:
    """As in ops/ref/v4/rows.py."""
    _compiled(rows).write_rows(view, rows, unit, row)


def write_latents(
    view: torch.Tensor, x: torch.Tensor, unit: torch.Tensor, row: torch.Tensor, *, rope_dim: int
) -> None:
    """write_rows of encode_latents."""
    write_rows(view, encode_latents(x, rope_dim, view), unit, row)


def write_keys(view: torch.Tensor, x: torch.Tensor, unit: torch.Tensor, row: torch.Tensor) -> None:
    """write_rows of encode_keys."""
    write_rows(view, encode_keys(x, view), unit, row)


def choose_located(
    scores: torch.Tensor,
    count: int,
    places: Places,
    num_visible: torch.Tensor,  # noqa: ARG001 - gpu.py looks at no more; here the others' scores say so
) -> torch.Tensor:
    """locate_entries of choose_entries: [T, count] flat positions, -1 for none."""
    return locate_entries(choose_entries(scores, count), places)


def beside(tokens: int, work: Callable[[], T], *, lane: int = 0) -> Callable[[], T]:  # noqa: ARG001 - gpu.py asks
    """Work that need not come before what follows; here nothing runs beside anything."""
    value = work()
    return lambda: value


def mix_onto(
    x: torch.Tensor,
    routed: tuple[Weight, Weight],
    chosen: tuple[torch.Tensor, torch.Tensor],
    onto: Callable[[], torch.Tensor],
    *,
    local: range,
    whole: bool,  # noqa: ARG001 - gpu.py asks for it
    limit: float,
) -> torch.Tensor:
    """mix_experts, added to what `onto` gives in the end: [T, hidden] in x's type. The pairs are gate-up and down,
    and weights and experts.
    """
    y = mix_experts(x, *routed, *chosen, local=local, limit=limit)
    y += onto()
    return y.to(x.dtype)


def prepare(weight: Weight) -> Weight:
    """The form that these kernels read is the file's."""
    return weight
