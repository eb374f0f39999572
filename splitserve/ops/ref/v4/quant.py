"""The number formats of DeepSeek-V4's weights and packed rows.

    e4m3    float8_e4m3fn, largest 448
    ue8m0   one byte b, value 2 ** (b - 127)
    e2m1    four bits: sign, and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6; the even element of a pair in the low nibble

Weights in tiles: e4m3 with one scale for each tile (128 x 128 in the file). MXFP4: e2m1 with one ue8m0 scale for 32
neighbours of a row. Values are exact in float32, and in bf16 where the scales are powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F

E4M3_MAX = 448.0
E2M1_MAX = 6.0
MXFP4_GROUP = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Tiles:
    """E4M3 weights with one scale for each tile; leading dimensions are experts."""

    codes: torch.Tensor  # [..., out, in] float8_e4m3fn
    scales: torch.Tensor  # [..., ceil(out / rows), ceil(in / columns)] uint8 (ue8m0) or float32
    tile: tuple[int, int]  # rows and columns; 128 x 128, or a divisor where a rank's share cuts a tile

    def __getitem__(self, expert: int) -> Tiles:
        return Tiles(self.codes[expert], self.scales[expert], self.tile)


@dataclass(frozen=True)
class Mxfp4:
    """E2M1 weights with one ue8m0 scale for 32 neighbours of a row; leading dimensions are experts."""

    codes: torch.Tensor  # [..., out, in / 2] uint8
    scales: torch.Tensor  # [..., out, in / 32] uint8

    def __getitem__(self, expert: int) -> Mxfp4:
        return Mxfp4(self.codes[expert], self.scales[expert])


Weight = torch.Tensor | Tiles | Mxfp4
"""A matrix [out, in] in any of the formats, or a stack of them."""


def dequantise(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The whole matrix as numbers of `dtype`."""
    match weight:
        case Tiles():
            return dequantise_tiles(weight.codes, weight.scales, weight.tile, dtype)
        case Mxfp4():
            return dequantise_mxfp4(weight.codes, weight.scales, dtype)
        case _:
            return weight.to(dtype)


def linear(
    x: torch.Tensor,  # [T, in]
    weight: Weight,  # [out, in]
) -> torch.Tensor:  # [T, out] in x's dtype
    """The reference dequantises on use and keeps nothing."""
    return F.linear(x, dequantise(weight, x.dtype))


def ue8m0_to_float(
    bits: torch.Tensor,  # uint8
) -> torch.Tensor:  # float32
    return bits.view(torch.float8_e8m0fnu).float()


def power_of_two_scale(
    amax: torch.Tensor,  # [...] float32: largest magnitude of a group, positive
    largest: float,  # of the format
) -> torch.Tensor:  # [...] uint8: the ue8m0 bits of 2 ** ceil(log2(amax / largest))
    """By exponent and mantissa bits, so that a power of two is never bumped by a rounded logarithm."""
    bits = (amax / largest).view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return exponent.clamp(0, 254).to(torch.uint8)


def e4m3_to_float(
    codes: torch.Tensor,  # [...] float8_e4m3fn, no NaN
    scales: torch.Tensor,  # [...] float32
) -> tuple[torch.Tensor, torch.Tensor]:  # [...] float32, and scales to multiply it with
    """On a CPU by moving bits into a half, which is exact and counts 2 ** 8 less; torch's own cast is far slower."""
    if codes.device.type != "cpu":
        return codes.float(), scales
    bits = (codes.view(torch.int8).to(torch.int16) << 7) & -0x4080  # 0xBF80: sign, and the other seven bits
    return bits.view(torch.float16).float(), scales * 256


def dequantise_tiles(
    codes: torch.Tensor,  # [..., out, in] float8_e4m3fn
    scales: torch.Tensor,  # [..., ceil(out / rows), ceil(in / columns)] uint8 (ue8m0) or float32
    tile: tuple[int, int],  # rows and columns of a tile
    dtype: torch.dtype,
) -> torch.Tensor:  # [..., out, in] in dtype
    rows, columns = tile
    out, size = codes.shape[-2:]
    wide = ue8m0_to_float(scales) if scales.dtype == torch.uint8 else scales
    values, wide = e4m3_to_float(codes, wide)
    if out % rows == 0 and size % columns == 0:
        grid = values.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
        return grid.mul_(wide[..., :, None, :, None]).flatten(-4, -3).flatten(-2).to(dtype)
    wide = wide.repeat_interleave(rows, -2)[..., :out, :].repeat_interleave(columns, -1)[..., :size]
    return values.mul_(wide).to(dtype)


def dequantise_mxfp4(
    codes: torch.Tensor,  # [..., out, in / 2] uint8: two e2m1 in a byte
    scales: torch.Tensor,  # [..., out, in / 32] uint8 (ue8m0)
    dtype: torch.dtype,
) -> torch.Tensor:  # [..., out, in] in dtype
    pairs = torch.index_select(_pairs(codes.device), 0, codes.flatten().int())
    values = pairs.view(torch.float32).view(*codes.shape[:-1], -1)
    grouped = values.unflatten(-1, (-1, MXFP4_GROUP)).mul_(ue8m0_to_float(scales)[..., None])
    return grouped.flatten(-2).to(dtype)


@cache
def _pairs(device: torch.device) -> torch.Tensor:
    """[256] float64, the two float32 numbers of each byte as one: a table of scalars is read ten times faster."""
    magnitudes = torch.tensor(_MAGNITUDES, device=device)
    values = torch.cat((magnitudes, -magnitudes))
    return torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1).view(torch.float64)[:, 0]


def quantise_tiles(
    weight: torch.Tensor,  # [out, in] float32
    tile: int = 128,
) -> tuple[torch.Tensor, torch.Tensor]:  # codes [out, in] float8_e4m3fn, scales uint8
    out, size = weight.shape
    padded = F.pad(weight, (0, -size % tile, 0, -out % tile))
    grid = padded.unflatten(1, (-1, tile)).unflatten(0, (-1, tile)).transpose(1, 2)
    bits = power_of_two_scale(grid.abs().amax((-1, -2)).clamp_min(1e-4), E4M3_MAX)
    scaled = grid / ue8m0_to_float(bits)[..., None, None]
    codes = scaled.clamp(-E4M3_MAX, E4M3_MAX).transpose(1, 2).flatten(2).flatten(0, 1)[:out, :size]
    return codes.to(torch.float8_e4m3fn).contiguous(), bits


def quantise_mxfp4(
    weight: torch.Tensor,  # [out, in] float32
) -> tuple[torch.Tensor, torch.Tensor]:  # codes [out, in / 2] uint8, scales [out, in / 32] uint8
    """Nearest value, ties to the even code."""
    grouped = weight.unflatten(-1, (-1, MXFP4_GROUP))
    bits = power_of_two_scale(grouped.abs().amax(-1).clamp_min(E2M1_MAX * 2.0**-126), E2M1_MAX)
    scaled = (grouped / ue8m0_to_float(bits)[..., None]).clamp(-E2M1_MAX, E2M1_MAX).flatten(-2)
    magnitude = scaled.abs()
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for i, (low, high) in enumerate(pairwise(_MAGNITUDES)):
        middle = (low + high) / 2
        code += magnitude > middle if i % 2 == 0 else magnitude >= middle
    code |= (scaled < 0).to(torch.uint8) << 3
    return code[..., 0::2] | (code[..., 1::2] << 4), bits
