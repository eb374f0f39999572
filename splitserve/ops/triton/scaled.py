"""Products of eight bits by cuBLAS, which takes rows and weights in e4m3 with their scales as they are.

    rows      e4m3, a scale for 128 neighbours      scales [in / 128, rows]
    weights   e4m3, a scale for 128 x 128           scales [out / 128, in / 128], in / 128 a multiple of 4

Only on sm_90, with a torch that knows such scales (CUDA 12.9). There it takes 0.6 of the time of products of 16 bits at
thousands of rows, and half of weigh8's at 256; elsewhere, and for few rows, our own kernels serve (multiply.py).
"""

from __future__ import annotations

import logging
from functools import cache

import torch

from splitserve.errors import first_line
from splitserve.ops.kernels.launch import arch_of
from splitserve.ops.kernels.tuned import tuned

_log = logging.getLogger(__name__)

BLOCK = 128
_ROWS = 4  # what rows, and blocks of a row of weights, have to be a multiple of
_ARCH = (9, 0)


def serves(codes: torch.Tensor, tile: tuple[int, int], rows: int, *, groups: int = 1) -> bool:
    """Whether weights [out, in] with a scale for each `tile` are multiplied here with so many rows, `groups` times."""
    num_out, size = codes.shape
    if tile != (BLOCK, BLOCK) or num_out % (groups * BLOCK) or size % (_ROWS * BLOCK) or rows % _ROWS:
        return False
    kind = "scaled" if groups == 1 else "scaled_groups"
    return works(codes.device) and bool(tuned(kind, arch_of(codes), rows)["SCALED"])


def product(
    x: torch.Tensor,  # [rows, in] e4m3
    x_scales: torch.Tensor,  # [in / 128, rows] float32, without gaps
    codes: torch.Tensor,  # [out, in] e4m3
    scales: torch.Tensor,  # [out / 128, in / 128] float32
    out: torch.Tensor | None = None,  # [rows, out] bf16; its rows may have gaps between them
) -> torch.Tensor:  # [rows, out] bf16
    """`serves` has said yes."""
    if out is None:
        out = torch.empty(len(x), len(codes), dtype=torch.bfloat16, device=x.device)
    torch._scaled_mm(x, codes.t(), x_scales.t(), scales.t(), out_dtype=torch.bfloat16, out=out)
    return out


@cache
def works(device: torch.device) -> bool:
    """Whether a small product comes out right there; the first call synchronises. Where it does not that is logged."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != _ARCH:
        return False
    draw = torch.Generator("cpu").manual_seed(3)
    rows, num_out, size = 132, 256, 512
    x, codes = (
        torch.randn(n, size, generator=draw, device="cpu").to(torch.float8_e4m3fn).to(device)
        for n in (rows, num_out)
    )
    x_scales, scales = (
        torch.rand(shape, generator=draw, device="cpu").to(device)
        for shape in ((size // BLOCK, rows), (num_out // BLOCK, size // BLOCK))
    )
    wide = torch.full((rows, 2 * num_out), torch.nan, dtype=torch.bfloat16, device=device)
    try:
        product(x, x_scales, codes, scales, wide[:, num_out:])
    except (AttributeError, RuntimeError, TypeError, ValueError) as e:
        _log.info(
            "cuBLAS takes no scales of blocks here (%s): long prompts use products of 16 bits",
            first_line(e)[:200],
        )
        return False
    numbers = x.float() * x_scales.t().repeat_interleave(BLOCK, 1)
    weights = codes.float() * scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    want = (numbers.double() @ weights.double().t()).float()
    if not (wide[:, num_out:].float() - want).abs().max() <= want.abs().max() / 128:  # NaN is wrong too
        _log.error(
            "cuBLAS multiplies e4m3 with scales of blocks wrongly on %s; products of 16 bits are used, which take 1.6 "
            "times as long for prompts: please report it with `splitserve doctor`", torch.cuda.get_device_name(device),
        )  # fmt: skip
        return False
    return True
