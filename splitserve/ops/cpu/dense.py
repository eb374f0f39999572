"""The dense parts of a layer on a CPU, in float32: twins of ops/ref/dense.py."""

from __future__ import annotations

import torch

from splitserve.ops.ref.coded import GROUP, Coded, Weight, widen
from splitserve.ops.ref.dense import embed

from . import elementwise, formats, shared
from .llvm import LANES

_FORMS = {
    torch.float32: formats.F32_ROWS,
    torch.float16: formats.F16_ROWS,
    torch.bfloat16: formats.BF16_ROWS,
    torch.uint8: formats.CODED,
}

__all__ = ["add_rms_norm", "embed", "linear", "rms_norm", "swiglu"]


def linear(
    x: torch.Tensor,  # [num_tokens, in]
    weight: Weight,  # [out, in], without gaps in its rows
    bias: torch.Tensor | None = None,  # [out]
) -> torch.Tensor:  # [num_tokens, out]
    """A row of the result has the same bits whatever other rows x has, and however exactly the same weights are kept.

    Weights whose rows are not 8 n numbers (coded: 32 n) go to torch.
    """
    k = x.shape[-1]
    if k % (GROUP if isinstance(weight, Coded) else LANES):
        return torch.nn.functional.linear(x, widen(weight, x.dtype), bias)
    if x.stride(-1) != 1:
        x = x.contiguous()
    m, n = x.shape[0], weight.shape[0]
    out = torch.empty(m, n)
    form, numbers, row_bytes, scales, scale_bytes = matrix(weight)
    shared.product(
        form, x.data_ptr(), x.stride(0), m, numbers, row_bytes, n, k, out.data_ptr(), n, scales, scale_bytes
    )  # fmt: skip
    if bias is not None:
        elementwise.add_rows(out.data_ptr(), m, n, bias.data_ptr())
    return out


def matrix(weight: Weight) -> tuple[int, int, int, int, int]:
    """(format, address, bytes of a row, address of scales, bytes of a row of scales) of a matrix."""
    numbers, scales, scale_bytes = weight, 0, 0
    if isinstance(weight, Coded):
        numbers, scales, scale_bytes = weight.codes, weight.scales.data_ptr(), 4 * weight.scales.stride(0)
    assert isinstance(numbers, torch.Tensor)
    row_bytes = numbers.stride(0) * numbers.element_size()
    return _FORMS[numbers.dtype], numbers.data_ptr(), row_bytes, scales, scale_bytes


def rms_norm(
    x: torch.Tensor,  # [..., size]
    weight: torch.Tensor,  # [size]
    eps: float,
) -> torch.Tensor:  # [..., size]
    x = x.contiguous()
    out = torch.empty_like(x)
    size = x.shape[-1]
    elementwise.rms_norm(x.data_ptr(), size, x.numel() // size, size, weight.data_ptr(), eps, out.data_ptr())
    return out


def add_rms_norm(
    x: torch.Tensor,  # [num_tokens, size]
    y: torch.Tensor,  # [num_tokens, size]
    weight: torch.Tensor,  # [size]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # x + y, and its norm
    x, y = x.contiguous(), y.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    m, n = x.shape
    elementwise.add_rms_norm(
        x.data_ptr(),
        y.data_ptr(),
        m,
        n,
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
    shared.swiglu(gate_up.data_ptr(), m, n, out.data_ptr())
    return out
