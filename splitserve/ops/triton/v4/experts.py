"""Mixture of experts: routing, grouped products and their sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splitserve.ops.kernels.launch import arch_of, launch
from splitserve.ops.kernels.tuned import tuned
from splitserve.ops.triton.grouping import group_pairs
from splitserve.ops.triton.multiply import Codes, Words, multiply, quantise_rows


@triton.jit
def choose(
    logits,  # [T, num_experts] float32
    bias,  # [num_experts] float32; unless BY_TOKEN
    table,  # [vocab, count] int32; BY_TOKEN
    tokens,  # [T] int64; BY_TOKEN
    weights,  # [T, count] float32
    experts,  # [T, count] int64
    num_experts, count, scale,
    BY_TOKEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    # grid: [T]
    token = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, EXPERTS), tl.arange(0, COUNT)
    x = tl.load(logits + token * num_experts + expert, mask=expert < num_experts, other=0.0)
    scores = tl.sqrt(tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0)))))
    chosen = tl.full((COUNT,), 0, tl.int32)
    if BY_TOKEN:
        name = tl.load(tokens + token)
        chosen = tl.load(table + name * count + slot, mask=slot < count, other=0).to(tl.int32)
    else:
        rest = scores + tl.load(bias + expert, mask=expert < num_experts, other=0.0)
        rest = tl.where(expert < num_experts, rest, float("-inf"))
        for i in range(count):
            best = tl.argmax(rest, 0, tie_break_left=True)
            chosen = tl.where(slot == i, best, chosen)
            rest = tl.where(expert == best, float("-inf"), rest)
    weight = tl.sum(tl.where(chosen[:, None] == expert[None, :], scores[None, :], 0.0), 1)
    weight = tl.where(slot < count, weight, 0.0)
    weight = weight / (tl.sum(weight, 0) + 1e-20) * scale
    tl.store(weights + token * count + slot, weight, mask=slot < count)
    tl.store(experts + token * count + slot, chosen.to(tl.int64), mask=slot < count)


@triton.jit
def add_choices(
    parts,  # [T * count, D]: rows of experts that are elsewhere hold anything
    experts,  # [T, count] int64
    out,  # [T, D] float32
    D, count, first, num_local,
    BD: tl.constexpr,
):  # fmt: skip
    # grid: [T, ceil(D / BD)]
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BD + tl.arange(0, BD)
    total = tl.zeros((BD,), tl.float32)
    for i in range(count):
        expert = tl.load(experts + token * count + i) - first
        size = tl.where((expert >= 0) & (expert < num_local), D, 0)
        total += tl.load(parts + (token * count + i) * D + col, mask=col < size, other=0.0).to(tl.float32)
    tl.store(out + token * D + col, total, mask=col < D)


@triton.jit
def gated(
    gate_up,  # [rows, 2 * size]
    out,  # [rows, size] float32
    size, limit,
    BD: tl.constexpr,
):  # fmt: skip
    # grid: [rows, ceil(size / BD)]
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BD + tl.arange(0, BD)
    gate = tl.load(gate_up + row * 2 * size + col, mask=col < size, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + col, mask=col < size, other=0.0).to(tl.float32)
    gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
    tl.store(out + row * size + col, gate / (1.0 + tl.exp(-gate)) * up, mask=col < size)


def route(
    logits: torch.Tensor,  # [T, experts] float32
    bias: torch.Tensor,  # [experts] float32: counts for the selection only
    *,
    count: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # weights [T, count] float32, experts [T, count] int64
    """Twin of ref.v4.route; best first."""
    return _choose(logits, bias, bias, bias, count, scale, by_token=False)


def route_by_token(
    logits: torch.Tensor,  # [T, experts] float32
    table: torch.Tensor,  # [vocab, count] int: experts of each token id
    tokens: torch.Tensor,  # [T] int64
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # weights [T, count] float32, experts [T, count] int64
    """Twin of ref.v4.route_by_token."""
    return _choose(logits, logits, table, tokens, table.shape[1], scale, by_token=True)


def _choose(
    logits: torch.Tensor, bias: torch.Tensor, table: torch.Tensor, tokens: torch.Tensor,
    count: int, scale: float, *, by_token: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    logits, table = logits.contiguous(), table.contiguous()
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, count, dtype=torch.float32, device=logits.device)
    experts = torch.empty(num_tokens, count, dtype=torch.int64, device=logits.device)
    launch(
        choose, (num_tokens,), logits, bias, table, tokens, weights, experts, num_experts, count, scale,
        BY_TOKEN=by_token, EXPERTS=triton.next_power_of_2(num_experts), COUNT=triton.next_power_of_2(count),
        num_warps=1,
    )  # fmt: skip
    return weights, experts


def clamped_swiglu(
    gate_up: torch.Tensor,  # [..., 2 * ffn]: gate, then up
    limit: float,
) -> torch.Tensor:  # [..., ffn] float32: silu(min(gate, limit)) * clamp(up, -limit, limit)
    """Twin of ref.v4.clamped_swiglu."""
    size = gate_up.shape[-1] // 2
    flat = gate_up.contiguous().view(-1, 2 * size)
    out = torch.empty(len(flat), size, dtype=torch.float32, device=flat.device)
    launch(gated, (len(flat), triton.cdiv(size, 1024)), flat, out, size, limit, BD=1024, num_warps=4)
    return out.view(*gate_up.shape[:-1], size)


def expert_ffn(
    x: torch.Tensor,  # [n, hidden] bf16
    gate_up: Codes | Words,  # [2 * ffn, hidden]: gate, then up
    down: Codes | Words,  # [hidden, ffn]
    limit: float,
    weights: torch.Tensor | None = None,  # [n, 1] float32: multiplies what goes into `down`
    *,
    rounded: bool = False,  # rows in e4m3, as in linear_rounded
) -> torch.Tensor:  # [n, hidden]
    """Twin of ref.v4.expert_ffn; gate, up and their product are one kernel, sums unrounded in between."""
    inner = multiply(quantise_rows(x) if rounded else x, gate_up, limit=limit, factors=weights)
    return multiply(quantise_rows(inner) if rounded else inner, down)


def mix_experts(
    x: torch.Tensor,  # [T, hidden] bf16
    gate_up: Codes | Words,  # [experts of this rank, 2 * ffn, hidden]
    down: Codes | Words,  # [experts of this rank, hidden, ffn]
    weights: torch.Tensor,  # [T, count] float32
    experts: torch.Tensor,  # [T, count] int64, global numbers
    *,
    local: range,  # the experts that this rank holds
    limit: float,
    rounded: bool = False,  # rows in e4m3, as in linear_rounded
) -> torch.Tensor:  # [T, hidden] float32: the sum over this rank's experts
    """Twin of ref.v4.mix_experts."""
    experts, weights = experts.contiguous(), weights.contiguous()
    tokens, count = experts.shape
    block = tuned("group_pairs", arch_of(x), triton.cdiv(tokens * count, len(local)))["BM"]
    groups = group_pairs(experts, local=local, block=block)
    rows = quantise_rows(x) if rounded else x
    inner = multiply(rows, gate_up, groups=groups, share=count, factors=weights, limit=limit)
    parts = multiply(quantise_rows(inner) if rounded else inner, down, groups=groups)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    size = x.shape[1]
    launch(
        add_choices, (tokens, triton.cdiv(size, 1024)),
        parts, experts, out, size, count, local.start, len(local), BD=1024, num_warps=4,
    )  # fmt: skip
    return out
