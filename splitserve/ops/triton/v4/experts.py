"""Mixture of experts: routing, grouped products and their sum."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from splitserve.ops.kernels.counts import cdiv
from splitserve.ops.kernels.launch import arch_of, launch
from splitserve.ops.kernels.tuned import tuned
from splitserve.ops.triton.grouping import group_pairs
from splitserve.ops.triton.multiply import (
    Codes,
    Lanes,
    Matrix,
    Words,
    by_library,
    many_rows,
    multiply,
    multiply_parts,
    rounded,
)
from splitserve.ops.triton.overlap import follow
from splitserve.ops.triton.parts import FEW, Parts, linear_parts
from splitserve.ops.triton.rounding import Rounded, round_placed
from splitserve.ops.triton.routing import add_up, choose

from .quant import linear, linear_rounded


@triton.jit
def gated(
    gate_up,  # [rows, 2 * size]
    out,  # [rows, size] float32
    size, limit,
    BD: tl.constexpr,
):  # fmt: skip
    # grid: [rows, ceil(size / BD)]
    follow()
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BD + tl.arange(0, BD)
    gate = tl.load(gate_up + row * 2 * size + col, mask=col < size, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + col, mask=col < size, other=0.0).to(tl.float32)
    gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
    tl.store(out + row * size + col, gate / (1.0 + tl.exp(-gate)) * up, mask=col < size)


def route(
    logits: torch.Tensor | Parts,  # [T, experts] float32
    bias: torch.Tensor,  # [experts] float32: counts for the selection only
    *,
    count: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # weights [T, count] float32, experts [T, count] int32
    """Twin of ref.v4.route; best first."""
    return choose(logits, count, mode="bias", bias=bias, scale=scale)


def route_by_token(
    logits: torch.Tensor | Parts,  # [T, experts] float32
    table: torch.Tensor,  # [vocab, count] int: experts of each token id
    tokens: torch.Tensor,  # [T] int64
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # weights [T, count] float32, experts [T, count] int32
    """Twin of ref.v4.route_by_token."""
    return choose(logits, table.shape[1], mode="token", table=table, tokens=tokens, scale=scale)


def clamped_swiglu(
    gate_up: torch.Tensor,  # [..., 2 * ffn]: gate, then up
    limit: float,
) -> torch.Tensor:  # [..., ffn] float32: silu(min(gate, limit)) * clamp(up, -limit, limit)
    """Twin of ref.v4.clamped_swiglu."""
    size = gate_up.shape[-1] // 2
    flat = gate_up.contiguous().view(-1, 2 * size)
    out = torch.empty(flat.shape[0], size, dtype=torch.float32, device=flat.device)
    launch(gated, (flat.shape[0], cdiv(size, 1024)), flat, out, size, limit, BD=1024, num_warps=4)
    return out.view(*gate_up.shape[:-1], size)


def fuses(x: torch.Tensor, gate_up: Matrix, *, exact: bool) -> bool:
    """Whether gate, up and what they let through are one kernel for so many rows."""
    few = x.shape[0] < tuned("expand", arch_of(x))["ROWS"]
    return few and (exact or not by_library(gate_up, x.shape[0]))


def expert_ffn(
    x: torch.Tensor,  # [n, hidden] bf16
    gate_up: Codes | Words,  # [2 * ffn, hidden]: gate, then up
    down: Codes | Words,  # [hidden, ffn]
    limit: float,
    weights: torch.Tensor | None = None,  # [n, 1] float32: multiplies what goes into `down`
    *,
    exact: bool = True,  # else rows are rounded to e4m3, as in linear_rounded
    parts: bool = False,  # few rows may come in parts
) -> torch.Tensor | Parts:  # [n, hidden]
    """Twin of ref.v4.expert_ffn; for few rows gate, up and their product are one kernel."""
    if not fuses(x, gate_up, exact=exact):
        product = linear if exact else linear_rounded
        inner = clamped_swiglu(product(x, gate_up), limit)
        return product((inner if weights is None else inner * weights).to(x.dtype), down)
    inner = multiply(x if exact else rounded(x, gate_up), gate_up, limit=limit, factors=weights)
    last = linear_parts if parts and len(x) <= FEW else multiply
    return last(inner if exact else rounded(inner, down), down)


def mix_experts(
    x: torch.Tensor,  # [T, hidden] bf16
    gate_up: Codes | Words | Lanes,  # [experts of this rank, 2 * ffn, hidden]
    down: Codes | Words | Lanes,  # [experts of this rank, hidden, ffn]
    weights: torch.Tensor,  # [T, count] float32
    experts: torch.Tensor,  # [T, count] int, global numbers
    *,
    local: range,  # the experts that this rank holds
    limit: float,
    exact: bool = True,  # else rows are rounded to e4m3, as in linear_rounded
) -> torch.Tensor:  # [T, hidden] float32: the sum over this rank's experts
    """Twin of ref.v4.mix_experts."""
    parts = _parts(x, (gate_up, down), (weights, experts), local=local, limit=limit, exact=exact)
    return add_up(parts, experts.contiguous(), local=local, dtype=torch.float32)


def _parts(
    x: torch.Tensor,
    matrices: tuple[Codes | Words | Lanes, Codes | Words | Lanes],
    chosen: tuple[torch.Tensor, torch.Tensor],  # weights, experts
    *,
    local: range,
    limit: float,
    exact: bool,
    whole: bool = False,
) -> torch.Tensor:  # [splits, T * count, hidden]
    """What each chosen expert gives, times its weight."""
    (gate_up, down), (weights, experts) = matrices, chosen
    experts, weights = experts.contiguous(), weights.contiguous()
    tokens, count = experts.shape
    load = cdiv(tokens * count, len(local))  # rows of an expert, on average
    block = tuned("group_pairs", arch_of(x), load)["BM"]
    groups = group_pairs(experts, local=local, block=block, whole=whole)
    rows = x if exact else rounded(x, gate_up, rows=load)
    placed = isinstance(rows, Rounded) and many_rows(gate_up, groups) and many_rows(down, groups)
    inner = multiply(rows, gate_up, groups=groups, share=count, factors=weights, limit=limit, placed=placed)
    if placed:
        placed_rows = round_placed(inner, groups, experts.numel(), lanes=isinstance(down, Lanes))
        return multiply_parts(placed_rows, down, groups=groups)
    return multiply_parts(inner if exact else rounded(inner, down, rows=load), down, groups=groups)


def mix_onto(
    x: torch.Tensor,  # [T, hidden] bf16
    routed: tuple[Codes | Words | Lanes, Codes | Words | Lanes],  # gate-up and down of the routed experts
    chosen: tuple[
        torch.Tensor, torch.Tensor
    ],  # weights [T, count] float32, experts [T, count] int, global numbers
    onto: Callable[[], torch.Tensor | Parts],  # [T, hidden] bf16: asked for when all else is under way
    *,
    local: range,
    whole: bool,  # all experts are here
    limit: float,
    exact: bool = True,
) -> torch.Tensor:  # [T, hidden] bf16
    """mix_experts, added to something else in float32 and rounded once."""
    parts = _parts(x, routed, chosen, local=local, limit=limit, exact=exact, whole=whole)
    return add_up(parts, chosen[1].contiguous(), local=local, dtype=x.dtype, plus=onto())
