"""The dense parts of a Llama layer: the twins of ops/ref/dense.py. Products of bf16 are cuBLAS's, but for few rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splitserve.ops.kernels.counts import cdiv
from splitserve.ops.kernels.launch import arch_of, launch
from splitserve.ops.kernels.tuned import tuned
from splitserve.ops.ref import Weight
from splitserve.ops.ref.dense import embed
from splitserve.ops.ref.dense import linear as plain_linear
from splitserve.ops.triton.multiply import multiply
from splitserve.ops.triton.norms import add_rms_norm, norm_and_turn
from splitserve.ops.triton.overlap import follow

__all__ = ["add_rms_norm", "embed", "linear", "rms_norm", "swiglu"]


@triton.jit
def silu_mul(
    gate_up,  # [rows, 2 * size]
    out,  # [rows, size]
    size,
    BD: tl.constexpr,
):  # fmt: skip
    # grid: [rows, ceil(size / BD)]
    follow()
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BD + tl.arange(0, BD)
    gate = tl.load(gate_up + row * 2 * size + col, mask=col < size, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + col, mask=col < size, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * size + col, silu * up, mask=col < size)


def linear(
    x: torch.Tensor,  # [rows, in]
    weight: Weight,  # [out, in]
    bias: torch.Tensor | None = None,  # [out]
) -> torch.Tensor:  # [rows, out]
    """Twin of ref.linear. cuBLAS's kernels wait until the one before has ended; of few rows that is a tenth of their time."""
    if not isinstance(weight, torch.Tensor) or not 0 < len(x) <= tuned("linear_few", arch_of(x))["ROWS"]:
        return plain_linear(x, weight, bias)
    out = multiply(x, weight, dtype=x.dtype)
    return out if bias is None else out + bias


def rms_norm(
    x: torch.Tensor,  # [..., size]
    weight: torch.Tensor,  # [size]
    eps: float,
) -> torch.Tensor:  # [..., size]
    """Twin of ref.rms_norm."""
    rows = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
    return norm_and_turn(rows, weight=weight, eps=eps, narrow=True).view(x.shape)


def swiglu(
    gate_up: torch.Tensor,  # [..., 2 * ffn]: gate, then up
) -> torch.Tensor:  # [..., ffn]: silu(gate) * up
    """Twin of ref.swiglu."""
    size = gate_up.shape[-1] // 2
    flat = gate_up.reshape(-1, 2 * size)
    out = torch.empty(len(flat), size, dtype=flat.dtype, device=flat.device)
    launch(silu_mul, (len(flat), cdiv(size, 1024)), flat, out, size, BD=1024, num_warps=4)
    return out.view(*gate_up.shape[:-1], size)
