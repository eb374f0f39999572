"""Experts of few tokens as one loop, from codes to their sum: twins of ops/ref/v4/experts.py."""

from __future__ import annotations

from typing import TypeGuard

import torch

from splitserve.ops.cpu.llvm import LANES
from splitserve.ops.ref.v4 import experts as ref
from splitserve.ops.ref.v4.quant import Mxfp4, Tiles, Weight

from . import products
from .quant import address, few, linear, shape


def expert_ffn(
    x: torch.Tensor,  # [n, hidden] float32
    gate_up: Weight,  # [2 * ffn, hidden]: gate, then up
    down: Weight,  # [hidden, ffn]
    limit: float,
    weights: torch.Tensor | None = None,  # [n, 1] float32: multiplies what goes into `down`
) -> torch.Tensor:  # [n, hidden]
    if not (_reads(gate_up) and _reads(down) and _few(x, gate_up, down)):
        return ref.expert_ffn(x, gate_up, down, limit, weights, product=linear)
    by = torch.ones(len(x), 1) if weights is None else weights
    only = torch.zeros(len(x), 1, dtype=torch.int64)
    return _mix(x, gate_up, down, by, only, local=range(1), limit=limit)


def mix_experts(
    x: torch.Tensor,  # [T, hidden] float32
    gate_up: Weight,  # [experts of this rank, 2 * ffn, hidden]
    down: Weight,  # [experts of this rank, hidden, ffn]
    weights: torch.Tensor,  # [T, count] float32
    experts: torch.Tensor,  # [T, count] int64, global numbers
    *,
    local: range,  # the experts that this rank holds
    limit: float,
) -> torch.Tensor:  # [T, hidden] float32: the sum over this rank's experts
    if not (_reads(gate_up) and _reads(down) and _few(x, gate_up, down)):
        return ref.mix_experts(x, gate_up, down, weights, experts, local=local, limit=limit, product=linear)
    return _mix(x, gate_up, down, weights, experts, local=local, limit=limit)


def _mix(
    x: torch.Tensor,
    gate_up: Tiles | Mxfp4,
    down: Tiles | Mxfp4,
    weights: torch.Tensor,
    experts: torch.Tensor,
    *,
    local: range,
    limit: float,
) -> torch.Tensor:
    x, weights, experts = x.contiguous(), weights.contiguous(), experts.contiguous()
    out = torch.empty_like(x)
    products.mix(
        x.data_ptr(),
        *x.shape,
        address(gate_up),
        _steps(gate_up),
        address(down),
        _steps(down),
        shape(down)[1],
        limit,
        weights.data_ptr(),
        experts.data_ptr(),
        experts.shape[1],
        (local.start, local.stop),
        out.data_ptr(),
    )
    return out


def _reads(weight: Weight) -> TypeGuard[Tiles | Mxfp4]:
    return (
        not isinstance(weight, torch.Tensor)
        and weight.codes.is_contiguous()
        and weight.scales.is_contiguous()
    )


def _few(x: torch.Tensor, gate_up: Tiles | Mxfp4, down: Tiles | Mxfp4) -> bool:
    return few(x, shape(gate_up)[1]) and shape(down)[1] % LANES == 0


def _steps(stack: Tiles | Mxfp4) -> tuple[int, int]:
    """Bytes of codes and of scales from one matrix to the next; of a matrix by itself none."""
    if stack.codes.dim() == 2:
        return 0, 0
    return stack.codes[0].nbytes, stack.scales[0].nbytes
