"""The dense parts of a layer on a CPU, in float32: twins of ops/ref/dense.py."""

from __future__ import annotations

import torch

from splitserve.ops.ref.dense import embed

from . import loops
from .vector import LANES

__all__ = ["add_rms_norm", "embed", "linear", "rms_norm", "swiglu"]


def linear(
    x: torch.Tensor,  # [num_tokens, in]
    weight: torch.Tensor,  # [out, in], without gaps in its rows
    bias: torch.Tensor | None = None,  # [out]
) -> torch.Tensor:  # [num_tokens, out]
    """A row of the result has the same bits whatever other rows x has. Rows of other than 8 n numbers go to torch."""
    if weight.shape[1] % LANES:
        return torch.nn.functional.linear(x, weight, bias)
    if x.stride(-1) != 1:
        x = x.contiguous()
    m, k = x.shape
    n = weight.shape[0]
    out = torch.empty(m, n)
    loops.product(x.data_ptr(), x.stride(0), m, weight.data_ptr(), weight.stride(0), n, k, out.data_ptr(), n)
    if bias is not None:
        loops.add_rows(out.data_ptr(), m, n, bias.data_ptr())
    return out


def rms_norm(
    x: torch.Tensor,  # [..., size]
    weight: torch.Tensor,  # [size]
    eps: float,
) -> torch.Tensor:  # [..., size]
    x = x.contiguous()
    out = torch.empty_like(x)
    size = x.shape[-1]
    loops.rms_norm(x.data_ptr(), size, x.numel() // size, size, weight.data_ptr(), eps, out.data_ptr())
    return out


def add_rms_norm(
    x: torch.Tensor,  # [num_tokens, size]
    y: torch.Tensor,  # [num_tokens, size]
    weight: torch.Tensor,  # [size]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # x + y, and its norm
    x, y = x.contiguous(), y.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    loops.add_rms_norm(
        x.data_ptr(),
        y.data_ptr(),
        *x.shape,
        weight.data_ptr(),
        eps,
        total.data_ptr(),
        out.data_ptr(),
    )
    return total, out


def swiglu(
    gate_up: torch.Tensor,  # [num_tokens, 2 * ffn]: gate, then up
) -> torch.Tensor:  # [num_tokens, ffn]: silu(gate) * up
    gate_up = gate_up.contiguous()
    m, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(m, n)
    loops.swiglu(gate_up.data_ptr(), m, n, out.data_ptr())
    return out
