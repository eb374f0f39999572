"""Starts the matrix kernels: which one, with which tiles, split how far.

numbers   rows of bf16, exact products (matrix.py)
codes     rows rounded to e4m3 first, as the models' own recipe has it (matrix8.py); needs sm_89. On sm_90 cuBLAS
          multiplies many rows (scaled.py)
          of e2m1 in experts' groups there are other forms: for codes that lie in the order of lanes (matrix_lanes.py),
          and for many rows, with the same bits (matrix_many.py)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from splitserve.ops.kernels.archs import FIRST_FP8
from splitserve.ops.kernels.counts import cdiv
from splitserve.ops.kernels.launch import arch_of, interpreted, launch, num_processors
from splitserve.ops.kernels.tuned import tuned

from . import scaled
from .grouping import Groups
from .matrix import weigh
from .matrix8 import add_parts, expand_tiles, weigh8
from .matrix_lanes import weigh_lanes
from .matrix_many import weigh_many
from .rounding import BLOCK, Placed, Rounded, quantise_rows, round_rows

MANY = 64  # rows of a block from which results lie by place between two products


@dataclass(frozen=True)
class Codes:
    """E4M3 weights as the kernels read them; leading dimensions are experts."""

    codes: torch.Tensor  # [..., out, in] float8_e4m3fn
    scales: torch.Tensor  # [..., ceil(out / rows), ceil(in / columns)] float32
    tile: tuple[int, int]
    powers: bool  # the scales are powers of two

    def __getitem__(self, expert: int) -> Codes:
        return Codes(self.codes[expert], self.scales[expert], self.tile, self.powers)


@dataclass(frozen=True)
class Words:
    """E2M1 weights as the kernels read them (see `repack`); leading dimensions are experts."""

    codes: torch.Tensor  # [..., out, in / 4] int16: in memory [..., out / height, in / 128, height, 32]
    scales: torch.Tensor  # [..., in / 128, out] int32
    eight: bool  # for products of eight bits, with rows that are rounded; else for rows as they are

    @staticmethod
    def height(num_out: int) -> int:
        """Rows that lie side by side: then a program reads kilobytes in a row from memory, and not 64 bytes."""
        return min(32, num_out & -num_out)

    def __getitem__(self, expert: int) -> Words:
        return Words(self.codes[expert], self.scales[expert], self.eight)


@dataclass(frozen=True)
class Lanes:
    """E2M1 weights of experts in the order of lanes, for rows that are rounded into that order too (see `repack`)."""

    codes: torch.Tensor  # [experts, out, in / 4] int16, in memory as that of Words
    scales: torch.Tensor  # [experts, in / 256, out, 2, 4] uint8: of each group over its row's base
    bases: torch.Tensor  # [experts, out] float32

    @staticmethod
    def fits(num_out: int, size: int) -> bool:
        """Whether such a matrix comes in whole tiles of all architectures."""
        return num_out % BLOCK == 0 and size % (2 * BLOCK) == 0


@dataclass(frozen=True)
class Strided:
    """Rows whose group is their number modulo `count`: [tokens, groups, size] taken as rows."""

    count: int


Matrix = torch.Tensor | Codes | Words | Lanes
"""[out, in], or a stack of them where there are groups."""


def expand(
    weight: Codes,  # [out, in]
) -> torch.Tensor:  # [out, in] bf16
    """The numbers of a matrix, for many rows at once: then cuBLAS is worth the detour."""
    num_out, size = weight.codes.shape
    out = torch.empty(num_out, size, dtype=torch.bfloat16, device=weight.codes.device)
    launch(
        expand_tiles, (cdiv(num_out, 32), cdiv(size, 256)),
        weight.codes.view(torch.uint8), weight.scales, out, num_out, size,
        TR=weight.tile[0], TC=weight.tile[1], NATIVE=not interpreted(), BN=32, BK=256, num_warps=4,
    )  # fmt: skip
    return out


def multiply(
    x: torch.Tensor | Rounded,  # [rows / share, in]; numbers are bf16
    weight: Matrix,  # [out, in]; with groups [experts, out, in]
    *,
    groups: Groups | Strided | None = None,
    share: int = 1,  # rows of the result that one row of x gives: row r reads x[r // share]
    factors: torch.Tensor | None = None,  # [rows] float32: what each row of the result is multiplied by
    limit: float | None = None,  # the result is silu(gate) * up, clamped so, of halves of `out`
    dtype: torch.dtype = torch.bfloat16,
    placed: bool = False,  # the result lies by place; only where `many_rows`
) -> torch.Tensor:  # [rows, out], or [rows, out / 2] with limit; as many places as rows where placed
    """Rows of the result that no group has hold anything. Raises TypeError for weights as they lie in a file."""
    plain = groups is None and share == 1 and factors is None and limit is None and dtype == torch.bfloat16
    if plain and isinstance(x, Rounded) and isinstance(weight, Codes) and by_library(weight, len(x)):
        return scaled.product(x.codes, x.scales, weight.codes, weight.scales)
    sums, splits = _start(x, weight, groups, share, factors, limit, dtype, placed)
    return sums if splits == 1 else add_up_parts(sums, dtype, factors, limit)


def add_up_parts(
    sums: torch.Tensor,  # [splits, rows, out] float32
    dtype: torch.dtype,
    factors: torch.Tensor | None = None,  # as for `multiply`
    limit: float | None = None,
) -> torch.Tensor:  # [rows, out], or [rows, out / 2] with limit
    splits, rows, num_out = sums.shape
    width = num_out if limit is None else num_out // 2
    out = torch.empty(rows, width, dtype=dtype, device=sums.device)
    launch(
        add_parts, (rows, cdiv(width, 512)),
        sums.contiguous(), out, out if factors is None else factors, rows, num_out, 0.0 if limit is None else limit,
        GLU=limit is not None, WEIGHTED=factors is not None, SPLITS=splits, BD=512, num_warps=4,
    )  # fmt: skip
    return out


def multiply_parts(
    x: torch.Tensor | Rounded,
    weight: Matrix,
    *,
    groups: Groups | Strided | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:  # [splits, rows, out]
    """As `multiply`, for somebody who adds the splits up himself; one split is of `dtype`, several are float32."""
    sums, splits = _start(x, weight, groups, 1, None, None, dtype, False)
    return sums if splits > 1 else sums[None]


def _start(
    x: torch.Tensor | Rounded,
    weight: Matrix,
    groups: Groups | Strided | None,
    share: int,
    factors: torch.Tensor | None,
    limit: float | None,
    dtype: torch.dtype,
    placed: bool,
) -> tuple[torch.Tensor, int]:
    """The finished result and 1, or sums [splits, rows, out] float32 and how many splits."""
    eight = isinstance(x, Rounded)
    if isinstance(x, Rounded) and isinstance(groups, Groups):
        if isinstance(weight, Lanes) and x.lanes:
            return _start_lanes(x, weight, groups, share, factors, limit, dtype, placed)
        if isinstance(weight, Words) and not x.lanes and many_rows(weight, groups):
            return _start_many(x, weight, groups, share, factors, limit, dtype, placed), 1
    if isinstance(x, Placed) or placed:
        raise TypeError("no kernel for rows by place and these weights")
    if isinstance(x, Rounded) and x.lanes:
        raise TypeError("no kernel for rows in the order of lanes and these weights")
    codes, scales, format_ = _format(weight, eight)
    rows, size, num_out = (
        len(x) * share,
        codes.shape[-1] * (4 if format_["FORMAT"] == "e2m1" else 1),
        codes.shape[-2],
    )
    lead = x.codes if isinstance(x, Rounded) else x.contiguous()
    config = _config(format_, eight, lead, rows, groups)
    tiles, blocks = cdiv(num_out, config["BN"]), _blocks(groups, rows, config["BM"])
    splits = _splits(config.pop("FILL"), tiles * blocks, size, lead)
    width = num_out if limit is None else num_out // 2
    shape, kind = ((splits, rows, num_out), torch.float32) if splits > 1 else ((rows, width), dtype)
    sums = torch.empty(shape, dtype=kind, device=lead.device)
    lists = groups if isinstance(groups, Groups) else Groups(sums, sums, 0)
    launch(
        weigh8 if eight else weigh,
        (tiles, blocks, splits),
        *((x.codes, x.scales) if isinstance(x, Rounded) else (lead,)), codes, scales, sums,
        lists.rows_of, lists.expert_of, sums if factors is None else factors,
        rows, num_out, size, share, 0.0 if limit is None else limit,
        **format_, **config,
        GLU=limit is not None, WEIGHTED=factors is not None, SPLITS=splits,
        GROUPED={Groups: "lists", Strided: "strided"}.get(type(groups), ""),
        EXPERTS=groups.count if isinstance(groups, Strided) else 0,
        EVEN=num_out % config["BN"] == 0 and size % config.get("BK", BLOCK) == 0, NATIVE=not interpreted(),
    )  # fmt: skip
    return sums, splits


def by_library(weight: Matrix, rows: int, *, groups: int = 1) -> bool:
    """Whether that many rounded rows are multiplied by cuBLAS; with `groups`, each with its part of the outputs."""
    return isinstance(weight, Codes) and scaled.serves(weight.codes, weight.tile, rows, groups=groups)


def many_rows(weight: Matrix, groups: Groups | Strided | None) -> bool:
    """Whether rounded rows in these groups are multiplied by a kernel that also takes and gives them by place."""
    if isinstance(weight, Lanes) and isinstance(groups, Groups):
        return groups.block >= MANY
    if not (isinstance(weight, Words) and weight.eight and isinstance(groups, Groups)):
        return False
    tile = tuned("weigh_many", arch_of(weight.codes), groups.block)["BN"]
    return bool(tile) and weight.codes.shape[-2] % tile == 0


def _start_many(
    x: Rounded,
    weight: Words,
    groups: Groups,
    share: int,
    factors: torch.Tensor | None,
    limit: float | None,
    dtype: torch.dtype,
    placed: bool,
) -> torch.Tensor:
    """The finished result: `many_rows` has said yes."""
    num_out, size = weight.codes.shape[-2], weight.codes.shape[-1] * 4
    config = tuned("weigh_many", arch_of(x.codes), groups.block)
    places = groups.num_blocks * groups.block
    width = num_out if limit is None else num_out // 2
    out = torch.empty(places if placed else len(x) * share, width, dtype=dtype, device=x.codes.device)
    launch(
        weigh_many, (num_out // config["BN"], groups.num_blocks),
        x.codes, x.scales, weight.codes, weight.scales, out, groups.rows_of, groups.expert_of,
        x.scales if factors is None else factors, x.scales.shape[1], 0.0 if limit is None else limit,
        N=num_out, K=size, SHARE=share, PLACED=isinstance(x, Placed), TO_PLACES=placed,
        GLU=limit is not None, WEIGHTED=factors is not None, TR=Words.height(num_out),
        WIDE=groups.block < 32 * config["num_warps"], NATIVE=not interpreted(),
        BN=config["BN"], BM=groups.block, STAGES=config["num_stages"], num_warps=config["num_warps"],
    )  # fmt: skip
    return out


def _start_lanes(
    x: Rounded,
    weight: Lanes,
    groups: Groups,
    share: int,
    factors: torch.Tensor | None,
    limit: float | None,
    dtype: torch.dtype,
    placed: bool,
) -> tuple[torch.Tensor, int]:
    """As `_start`."""
    num_out, size, rows = weight.codes.shape[-2], weight.codes.shape[-1] * 4, len(x) * share
    few = (
        1 if groups.num_blocks <= 16 else groups.block
    )  # a token or two, whose loops are over before many reads are
    config = tuned("weigh_lanes", arch_of(x.codes), few)
    tiles = num_out // config["BN"]
    splits = 1 if placed else _splits(config["FILL"], tiles * groups.num_blocks, size, x.codes)
    width = num_out if limit is None else num_out // 2
    lines = groups.num_blocks * groups.block if placed else rows
    shape, kind = ((splits, rows, num_out), torch.float32) if splits > 1 else ((lines, width), dtype)
    sums = torch.empty(shape, dtype=kind, device=x.codes.device)
    launch(
        weigh_lanes, (tiles, groups.num_blocks, splits),
        x.codes, x.scales, weight.codes, weight.scales, weight.bases, sums, groups.rows_of, groups.expert_of,
        x.scales if factors is None else factors, x.scales.shape[1], rows, 0.0 if limit is None else limit,
        N=num_out, K=size, SHARE=share, PLACED=isinstance(x, Placed), TO_PLACES=placed,
        GLU=limit is not None and splits == 1, WEIGHTED=factors is not None and splits == 1,
        TR=Words.height(num_out), SPLITS=splits, NATIVE=not interpreted(),
        BN=config["BN"], BM=groups.block, STAGES=config["num_stages"], num_warps=config["num_warps"],
    )  # fmt: skip
    return sums, splits


def rounded(
    x: torch.Tensor,  # [rows, size]
    weight: Codes | Words | Lanes,
    *,
    rows: int | None = None,  # that share a matrix, where that is not all of them
) -> torch.Tensor | Rounded:
    """x rounded to e4m3: as codes where products of eight bits are there and pay, else as the numbers they stand for."""
    if isinstance(weight, Lanes):
        return quantise_rows(x, lanes=True)
    if isinstance(weight, Words):
        return quantise_rows(x) if weight.eight else round_rows(x)
    if rows is None and by_library(weight, len(x)):
        return quantise_rows(x)
    eight = (
        arch_of(x) >= FIRST_FP8
        and tuned("rounded_e4m3", arch_of(x), len(x) if rows is None else rows)["EIGHT"]
    )
    return quantise_rows(x) if eight else round_rows(x)


def _format(weight: Matrix, eight: bool) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Codes and scales as the kernel takes them, and its constants."""
    match weight:
        case Words() if weight.eight == eight:
            constants = {"FORMAT": "e2m1", "TR": Words.height(weight.codes.shape[-2])}
            constants |= {} if eight else {"POWERS": True, "TC": BLOCK}
            return weight.codes, weight.scales, constants
        case Codes():
            constants = {"FORMAT": "e4m3", "TR": weight.tile[0]}
            if eight:
                return weight.codes, weight.scales, constants
            constants |= {"POWERS": weight.powers, "TC": weight.tile[1]}
            return weight.codes.view(torch.uint8), weight.scales, constants
        case torch.Tensor() if not eight:
            return weight, weight, {"FORMAT": "bf16", "POWERS": True, "TR": 1, "TC": BLOCK}
        case _:
            raise TypeError(
                f"no kernel for weights of type {type(weight).__name__} and {'rounded ' if eight else ''}rows: "
                "`prepare` them for these after loading"
            )


def _config(
    format_: dict[str, Any], eight: bool, x: torch.Tensor, rows: int, groups: Groups | Strided | None
) -> dict[str, Any]:
    """Tuned tiles; a group's blocks are as tall as they were made."""
    kind = f"weigh{'8' if eight else ''}_{format_['FORMAT']}"
    if isinstance(groups, Groups):
        config = tuned(f"{kind}_grouped", arch_of(x), groups.block)
        config["BM"] = groups.block
    else:
        config = tuned(kind, arch_of(x), rows // groups.count if groups else rows)
    if "BK" in config:
        config["BK"] = min(config["BK"], format_["TC"])
    config["STAGES"] = config.pop("num_stages")
    return config


def _blocks(groups: Groups | Strided | None, rows: int, block: int) -> int:
    match groups:
        case Groups():
            return groups.num_blocks
        case Strided():
            return groups.count * cdiv(rows // groups.count, block)
        case _:
            return cdiv(rows, block)


def _splits(fill: float, programs: int, size: int, x: torch.Tensor) -> int:
    """A power of two that brings the programs to about `fill` for each processor."""
    if not programs:
        return 1
    wanted = min(fill * num_processors(x) / programs, size / (2 * BLOCK), 16)
    return 1 << max(int(wanted).bit_length() - 1, 0) if wanted >= 2 else 1
