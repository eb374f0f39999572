"""Rows rounded to e4m3 with a scale for each 128 neighbours, as DeepSeek's own recipe has it, in each order that is read.

quantise_rows      as they lie, or in the order of lanes (matrix_lanes.py)
quantise_groups    those of each of some groups side by side (scaled.py)
round_placed       by places of groups (matrix_many.py, matrix_lanes.py)
round_rows         as numbers, for products of 16 bits
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from splitserve.ops.kernels.archs import FIRST_FP8
from splitserve.ops.kernels.counts import cdiv, next_power_of_2
from splitserve.ops.kernels.launch import arch_of, launch

from .grouping import Groups
from .matrix8 import quantise
from .matrix_many import round_places

BLOCK = 128
WIDE = 256  # rows from which a program rounds up to 4,096 numbers


@dataclass(frozen=True)
class Rounded:
    """Rows in e4m3, one scale for 128 neighbours."""

    codes: torch.Tensor  # [rows, size] float8_e4m3fn
    scales: torch.Tensor  # [size / 128, rows] float32; [size / 256, rows, 2] in the order of lanes
    lanes: bool  # codes of each 128 are in the order of lanes

    def __len__(self) -> int:
        return len(self.codes)


@dataclass(frozen=True)
class Placed(Rounded):
    """Rounded rows at the places of groups; places without a row hold anything.

    Scales that are not in pairs have one row more, that nobody needs: it is read ahead.
    """

    rows: int  # pairs that may have places

    def __len__(self) -> int:
        return self.rows


def quantise_rows(
    x: torch.Tensor,  # [rows, size], size a multiple of 128; of 256 with lanes
    *,
    lanes: bool = False,  # in the order of lanes
) -> Rounded:
    """Each 128 neighbours divided by the power of two that brings them to at most 448, rounded to e4m3."""
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = _scales(x, x.shape[1] // BLOCK, lanes)
    _quantise(x, codes, scales, lanes=lanes)
    return Rounded(codes.view(torch.float8_e4m3fn), scales, lanes)


def quantise_groups(
    x: torch.Tensor,  # [tokens, groups, size], size a multiple of 128
) -> Rounded:  # codes [groups, tokens, size], scales [groups, size / 128, tokens]
    """`quantise_rows`, the rows of each group side by side."""
    tokens, groups, size = x.shape
    codes = torch.empty(groups, tokens, size, dtype=torch.uint8, device=x.device)
    scales = torch.empty(groups, size // BLOCK, tokens, dtype=torch.float32, device=x.device)
    _quantise(x.reshape(tokens * groups, size), codes, scales, groups=groups)
    return Rounded(codes.view(torch.float8_e4m3fn), scales, False)


def _scales(x: torch.Tensor, count: int, lanes: bool) -> torch.Tensor:
    if lanes and count % 2:
        raise ValueError(f"rows of {x.shape[1]} numbers: not a multiple of {2 * BLOCK}")
    shape = (count // 2, len(x), 2) if lanes else (count, len(x))
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def round_placed(
    x: torch.Tensor,  # [places of groups, size], size a multiple of 128
    groups: Groups,
    rows: int,  # that the groups were made of
    *,
    lanes: bool = False,  # in the order of lanes
) -> Placed:
    """`quantise_rows`, of rows that lie at their places."""
    places, size = x.shape
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = _scales(x, size // BLOCK + (0 if lanes else 1), lanes)
    launch(
        round_places, (places // 4, cdiv(size, 1024)),
        x, codes, scales, groups.rows_of, groups.expert_of, places, size,
        LANES=lanes, FP8=arch_of(x) >= FIRST_FP8, BM=groups.block, BP=4, BD=1024, num_warps=4,
    )  # fmt: skip
    return Placed(codes.view(torch.float8_e4m3fn), scales, lanes, rows)


def round_rows(
    x: torch.Tensor,  # [rows, size], size a multiple of 128
) -> torch.Tensor:  # [rows, size]
    """The numbers that quantise_rows(x) stands for: exact in bf16."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _quantise(x, out, None)
    return out


def _quantise(
    x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor | None, *, lanes: bool = False, groups: int = 1
) -> None:
    x = x.contiguous()
    rows, size = x.shape
    if size % BLOCK:
        raise ValueError(f"rows of {size} numbers: not a multiple of {BLOCK}")
    wide = (
        1024 if rows < WIDE else min(4096, next_power_of_2(size))
    )  # where programs are many they may be long
    launch(
        quantise, (rows, cdiv(size, wide)), x, out, out if scales is None else scales, rows, size,
        NUMBERS=scales is None, LANES=lanes, GROUPS=groups, FP8=arch_of(x) >= FIRST_FP8, BD=wide,
        num_warps=4 if wide <= 1024 else 8,
    )  # fmt: skip
