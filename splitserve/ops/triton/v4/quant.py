"""Linear maps whose weights are codes, and the form in which codes are kept on the device.

    e2m1 on disk   byte j of a row: numbers 2 j (low) and 2 j + 1
    e2m1 here      per 128 numbers 32 words of 16 bits; bits 4 i .. 4 i + 3 of word j: number 32 i + j

so that one word gives a number to each of the four groups that share a scale, and the four scales are one int32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from splitserve.ops.kernels.launch import arch_of
from splitserve.ops.kernels.tuned import tuned
from splitserve.ops.ref.v4.quant import Mxfp4, Tiles, Weight, ue8m0_to_float
from splitserve.ops.triton.multiply import BLOCK, Codes, Matrix, Rounded, Words, expand, multiply, rounded

LARGEST_SCALE = 128  # ue8m0 of 2: what a bf16 product can take in together with the codes' missing 2 ** 126


def prepare(weight: Weight) -> Matrix:
    """The form that kernels read; once, after loading. Raises ValueError where `repack` does."""
    match weight:
        case Mxfp4():
            return repack(weight)
        case Tiles():
            powers = weight.scales.dtype == torch.uint8
            scales = ue8m0_to_float(weight.scales) if powers else weight.scales
            return Codes(weight.codes, scales.contiguous(), weight.tile, powers)
        case _:
            return weight


def repack(weight: Mxfp4) -> Words:
    """Raises ValueError for widths that are no multiple of 128 and for scales above 2."""
    size = weight.codes.shape[-1] * 2
    if size % BLOCK:
        raise ValueError(f"{size} numbers in a row: not a multiple of {BLOCK}")
    if weight.scales.numel() and int(weight.scales.max()) > LARGEST_SCALE:
        raise ValueError(f"an MXFP4 scale of 2 ** {int(weight.scales.max()) - 127}; up to 2 is served")
    stack = weight.codes.reshape(-1, *weight.codes.shape[-2:])
    codes = torch.empty(*stack.shape[:2], size // 4, dtype=torch.int16, device=stack.device)
    for into, matrix in zip(
        codes, stack, strict=True
    ):  # one expert at a time: numbers take eight times their codes
        numbers = torch.stack((matrix & 15, matrix >> 4), dim=-1).flatten(1).unflatten(1, (-1, 4, 32)).int()
        words = numbers[:, :, 0] | numbers[:, :, 1] << 4 | numbers[:, :, 2] << 8 | numbers[:, :, 3] << 12
        into.copy_(words.to(torch.int16).flatten(1))
    scales = weight.scales.contiguous().view(torch.int32).transpose(-1, -2).contiguous()
    return Words(codes.view(*weight.codes.shape[:-1], size // 4), scales)


def linear(
    x: torch.Tensor,  # [T, in] bf16
    weight: Matrix,  # [out, in]
) -> torch.Tensor:  # [T, out]
    """Twin of ref.v4.linear: products with x as it is. Weights of numbers go to cuBLAS, and for many rows codes too."""
    if isinstance(weight, torch.Tensor):
        return F.linear(x, weight)
    if isinstance(weight, Codes) and len(x) >= tuned("expand", arch_of(x))["ROWS"]:
        return F.linear(x, expand(weight))
    return multiply(x, weight)


def linear_rounded(
    x: torch.Tensor,  # [T, in] bf16
    weight: Codes | Words,  # [out, in]
) -> torch.Tensor:  # [T, out]
    """As `linear`, with each 128 neighbours of x rounded to e4m3 first, as DeepSeek's own recipe has it.

    The result is the same however many rows there are; products of eight bits are used where they are faster.
    """
    rows = rounded(x, weight)
    return multiply(rows, weight) if isinstance(rows, Rounded) else linear(rows, weight)
