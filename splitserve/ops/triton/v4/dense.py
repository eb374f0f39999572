"""Norms, float32 products and the rotary embedding of DeepSeek-V4."""

from __future__ import annotations

import torch

from splitserve.ops.kernels.launch import arch_of
from splitserve.ops.kernels.tuned import tuned
from splitserve.ops.ref.v4.dense import Table, rope_table
from splitserve.ops.triton import scaled
from splitserve.ops.triton.multiply import Codes, Strided, by_library, expand, multiply, rounded
from splitserve.ops.triton.norms import norm_and_turn
from splitserve.ops.triton.parts import Parts
from splitserve.ops.triton.rounding import Rounded, quantise_groups

__all__ = [
    "Table",
    "grouped_linear",
    "linear_f32",
    "rms_norm",
    "rms_norm_rotate",
    "rope_table",
    "rotate_tail",
]

FEW_ROWS = 64  # up to here our split product beats cuBLAS on weights of bf16


def rms_norm(
    x: torch.Tensor | Parts,  # [..., size]
    weight: torch.Tensor | None,  # [size] float32, or None for no weight
    eps: float,
) -> torch.Tensor:  # [..., size]
    """Twin of ref.v4.rms_norm."""
    if isinstance(x, Parts):
        return norm_and_turn(x.unsqueeze(1), weight=weight, eps=eps).squeeze(1)
    rows = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
    return norm_and_turn(rows, weight=weight, eps=eps).view(x.shape)


def rotate_tail(
    x: torch.Tensor,  # [T, heads, head_dim]
    table: Table,
    *,
    inverse: bool = False,
) -> torch.Tensor:  # [T, heads, head_dim]
    """Twin of ref.v4.rotate_tail."""
    return norm_and_turn(x, table=table, back=inverse)


def rms_norm_rotate(
    x: torch.Tensor | Parts,  # [T, heads, head_dim]
    weight: torch.Tensor | None,
    eps: float,
    table: Table,
) -> torch.Tensor:  # [T, heads, head_dim]
    """rotate_tail of rms_norm, in one kernel."""
    return norm_and_turn(x, weight=weight, eps=eps, table=table)


def linear_f32(
    x: torch.Tensor,  # [T, in] bf16
    weight: torch.Tensor,  # [out, in] bf16
) -> torch.Tensor:  # [T, out] float32
    """Twin of ref.v4.linear_f32: products of bf16 are exact in float32, and sums are float32."""
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return x.float() @ weight.float().T
    if x.shape[0] <= FEW_ROWS:
        return multiply(x, weight, dtype=torch.float32)
    return torch.mm(x, weight.T, out_dtype=torch.float32)


def grouped_linear(
    x: torch.Tensor,  # [T, groups, in]
    weight: torch.Tensor | Codes,  # [groups * out, in]
    *,
    exact: bool = True,  # else rows are rounded to e4m3, as in linear_rounded
) -> torch.Tensor:  # [T, groups * out]: each group of inputs through its own matrix
    """Twin of ref.v4.grouped_linear, which takes numbers; codes are taken as they are."""
    rows = x if exact or not isinstance(weight, Codes) else round_groups(x, weight)
    return multiply_groups(rows, weight, groups=x.shape[1])


def round_groups(
    x: torch.Tensor,  # [T, groups, in]
    weight: Codes,  # [groups * out, in]
) -> torch.Tensor | Rounded:
    """x rounded to e4m3, for `multiply_groups`: numbers as they lie, or codes."""
    tokens, groups, size = x.shape
    if by_library(weight, tokens, groups=groups):
        return quantise_groups(x)
    rows = rounded(x.reshape(tokens * groups, size), weight, rows=tokens)
    return rows.view(x.shape) if isinstance(rows, torch.Tensor) else rows


def multiply_groups(
    x: torch.Tensor | Rounded,  # [T, groups, in], or what round_groups made of it
    weight: torch.Tensor | Codes,  # [groups * out, in]
    *,
    groups: int,
) -> torch.Tensor:  # [T, groups * out]
    """Each group of inputs through its own matrix."""
    if isinstance(x, Rounded) and x.codes.dim() == 3 and isinstance(weight, Codes):
        return _by_library(x, weight)
    if isinstance(x, torch.Tensor) and isinstance(weight, Codes):
        if len(x) >= tuned("expand", arch_of(x))["ROWS"]:
            weight = expand(weight)
        else:
            x = x.flatten(0, 1)
    if isinstance(weight, torch.Tensor):
        assert isinstance(x, torch.Tensor)
        stacked = weight.unflatten(0, (groups, -1)).transpose(1, 2)
        out = torch.empty(len(x), groups, stacked.shape[2], dtype=x.dtype, device=x.device)
        torch.bmm(x.transpose(0, 1), stacked, out=out.transpose(0, 1))  # strides and all: nothing is copied
        return out.flatten(1)
    height, width = weight.tile
    if weight.codes.shape[0] // groups % height:
        raise ValueError(
            f"{weight.codes.shape[0]} outputs in {groups} groups cut tiles of {height} x {width}"
        )
    stack = Codes(
        weight.codes.view(groups, -1, weight.codes.shape[1]),
        weight.scales.view(groups, -1, weight.scales.shape[1]),
        weight.tile,
        weight.powers,
    )
    return multiply(x, stack, groups=Strided(groups)).view(len(x) // groups, -1)


def _by_library(x: Rounded, weight: Codes) -> torch.Tensor:
    """Of rows that quantise_groups has put side by side."""
    groups, tokens, _ = x.codes.shape
    each, blocks = len(weight.codes) // groups, len(weight.scales) // groups
    out = torch.empty(tokens, groups * each, dtype=torch.bfloat16, device=x.codes.device)
    for g in range(groups):
        rows, its = slice(g * each, (g + 1) * each), slice(g * blocks, (g + 1) * blocks)
        scaled.product(x.codes[g], x.scales[g], weight.codes[rows], weight.scales[its], out[:, rows])
    return out
