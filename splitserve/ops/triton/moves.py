"""Units of a slab moved as bytes: pages and slots gathered into one buffer, or put back from it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splitserve.ops.kernels.counts import cdiv
from splitserve.ops.kernels.launch import launch
from splitserve.ops.triton.overlap import follow


@triton.jit
def move_units(
    source, source_ids,  # words of WORD bytes; [n] int64, unless not FROM
    target, target_ids,
    source_stride, target_stride, size,  # in words
    FROM: tl.constexpr,  # the source's units are named; else they are 0, 1, ...
    TO: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    # grid: [n, ceil(size / BD)]
    follow()
    i = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BD + tl.arange(0, BD)
    a = tl.load(source_ids + i) if FROM else i
    b = tl.load(target_ids + i) if TO else i
    value = tl.load(source + a * source_stride + col, mask=col < size)
    tl.store(target + b * target_stride + col, value, mask=col < size)


def gather_units(
    slab: torch.Tensor,  # [units, unit_bytes] uint8
    ids: torch.Tensor,  # [n] int64
) -> torch.Tensor:  # [n, unit_bytes] uint8
    """slab[ids]."""
    out = torch.empty(len(ids), slab.shape[1], dtype=torch.uint8, device=slab.device)
    _move(slab, ids, out, ids, named="source")
    return out


def scatter_units(
    slab: torch.Tensor,  # [units, unit_bytes] uint8
    ids: torch.Tensor,  # [n] int64, all different
    units: torch.Tensor,  # [n, unit_bytes] uint8
) -> None:
    """slab[ids] = units."""
    _move(units.contiguous(), ids, slab, ids, named="target")


def _move(
    source: torch.Tensor,
    source_ids: torch.Tensor,
    target: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    named: str,
) -> None:
    size = source.shape[1]
    word = (
        torch.int64
        if size % 8 == 0 and source.stride(0) % 8 == 0 and target.stride(0) % 8 == 0
        else torch.uint8
    )
    a, b = source.view(word), target.view(word)
    launch(
        move_units, (len(source_ids), cdiv(a.shape[1], 1024)),
        a, source_ids, b, target_ids, a.stride(0), b.stride(0), a.shape[1],
        FROM=named == "source", TO=named == "target", BD=1024, num_warps=4,
    )  # fmt: skip
