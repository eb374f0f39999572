"""Which experts a token goes to, and the sum of what they gave."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splitserve.ops.kernels.counts import cdiv, next_power_of_2
from splitserve.ops.kernels.launch import launch
from splitserve.ops.triton.overlap import follow, follow_briefly
from splitserve.ops.triton.parts import Parts


@triton.jit
def choose_few(
    logits,  # [SPLITS, T, num_experts]
    bias,  # [num_experts] float32; "bias" only
    table,  # [vocab, count] int; "token" only
    tokens,  # [T] int64; "token" only
    weights,  # [T, count] float32
    experts,  # [T, count] int32
    num_experts, count, scale,
    SPLITS: tl.constexpr,
    MODE: tl.constexpr,  # what chooses: "bias", "token", "softmax"
    NORMALIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    # grid: [T]
    follow()
    token = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, EXPERTS), tl.arange(0, COUNT)
    here = expert < num_experts
    row = logits + token * num_experts + expert
    x = tl.load(row, mask=here, other=float("-inf")).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(row + split * tl.num_programs(0) * num_experts, mask=here, other=0.0)
    if MODE == "softmax":
        scores = tl.exp(x - tl.max(x, 0))
        scores /= tl.sum(scores, 0)
    else:
        small = tl.exp(tl.minimum(x, 20.0))
        grown = 1.0 + small
        log1p = tl.where(
            grown == 1.0, small, tl.log(grown) * (small / (grown - 1.0))
        )  # exact for small numbers
        scores = tl.sqrt(tl.where(x > 20.0, x, log1p))
    if MODE == "token":
        name = tl.load(tokens + token)
        chosen = tl.load(table + name * count + slot, mask=slot < count, other=0).to(tl.int32)
    else:
        rest = scores
        if MODE == "bias":
            rest += tl.load(bias + expert, mask=here, other=0.0)
        rest = tl.where(here, rest, float("-inf"))
        chosen = tl.zeros((COUNT,), tl.int32)
        for i in range(count):
            best = tl.argmax(rest, 0, tie_break_left=True)
            chosen = tl.where(slot == i, best, chosen)
            rest = tl.where(expert == best, float("-inf"), rest)
    weight = tl.sum(tl.where(chosen[:, None] == expert[None, :], scores[None, :], 0.0), 1)
    weight = tl.where(slot < count, weight, 0.0)
    if NORMALIZE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    tl.store(weights + token * count + slot, weight * scale, mask=slot < count)
    tl.store(experts + token * count + slot, chosen, mask=slot < count)


@triton.jit(do_not_specialize=["num_pairs", "first", "num_local"])
def add_choices(
    parts,  # [SPLITS, T * count, D]: rows of experts that are elsewhere hold anything
    experts,  # [T, count] int
    plus,  # [PLUS, T, D]
    out,  # [T, D]
    num_pairs, D, count, first, num_local,
    SPLITS: tl.constexpr,
    PLUS: tl.constexpr,  # parts
    BD: tl.constexpr,
):  # fmt: skip
    # grid: [T, ceil(D / BD)]
    follow_briefly()
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BD + tl.arange(0, BD)
    total = tl.zeros((BD,), tl.float32)
    for i in range(count):
        expert = tl.load(experts + token * count + i) - first
        size = tl.where((expert >= 0) & (expert < num_local), D, 0)
        for split in tl.static_range(SPLITS):
            at = parts + (split * num_pairs + token * count + i) * D + col
            total += tl.load(at, mask=col < size, other=0.0).to(tl.float32)
    for split in tl.static_range(PLUS):
        at = plus + (split * tl.num_programs(0) + token) * D + col
        total += tl.load(at, mask=col < D, other=0.0).to(tl.float32)
    tl.store(out + token * D + col, total, mask=col < D)


def add_up(
    parts: torch.Tensor,  # [splits, T * count, D], of multiply_parts
    experts: torch.Tensor,  # [T, count] int, contiguous
    *,
    local: range,
    dtype: torch.dtype,
    plus: torch.Tensor | Parts | None = None,  # [T, D]
) -> torch.Tensor:  # [T, D]
    """The sum of each token's choices among the experts that are here, and of `plus`."""
    splits, pairs, size = parts.shape
    tokens, count = experts.shape
    out = torch.empty(tokens, size, dtype=dtype, device=parts.device)
    more = plus.sums if isinstance(plus, Parts) else plus if plus is None else plus[None]
    launch(
        add_choices, (tokens, cdiv(size, 1024)),
        parts, experts, out if more is None else more, out, pairs, size, count, local.start, len(local),
        SPLITS=splits, PLUS=0 if more is None else len(more), BD=1024, num_warps=4,
    )  # fmt: skip
    return out


def choose(
    logits: torch.Tensor | Parts,  # [T, experts]
    count: int,
    *,
    mode: str,  # "softmax", "bias" (sqrt of softplus, chosen with a bias) or "token" (the same, chosen by a table)
    bias: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    scale: float = 1.0,
    normalize: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights float32, experts int32), each [T, count]; best first where scores choose."""
    num_tokens, num_experts = logits.shape
    parts = logits.sums if isinstance(logits, Parts) else logits.contiguous()[None]
    weights = torch.empty(num_tokens, count, dtype=torch.float32, device=parts.device)
    experts = torch.empty(num_tokens, count, dtype=torch.int32, device=parts.device)
    none = experts
    launch(
        choose_few, (num_tokens,),
        parts, weights if bias is None else bias, none if table is None else table.contiguous(),
        none if tokens is None else tokens, weights, experts, num_experts, count, scale,
        SPLITS=len(parts), MODE=mode, NORMALIZE=normalize, EXPERTS=next_power_of_2(num_experts),
        COUNT=next_power_of_2(count), num_warps=1,
    )  # fmt: skip
    return weights, experts
