"""Digests of rows on the device: the twin of ops/ref/digest.py, same numbers.

A program takes some rows of one field: 64-bit words, folded, weighted by column, summed, mixed with the row's index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd

import torch
import triton
import triton.language as tl

from splitserve.ops.kernels.launch import launch
from splitserve.ops.ref.digest import _signed
from splitserve.ops.triton.overlap import follow
from splitserve.spec import Field, Kind, Units, field_key

GOLDEN = tl.constexpr(_signed(0x9E3779B97F4A7C15))
MIX_1 = tl.constexpr(_signed(0xBF58476D1CE4E5B9))
MIX_2 = tl.constexpr(_signed(0x94D049BB133111EB))


@triton.jit
def _down(x, BITS: tl.constexpr):
    """Logical right shift of int64."""
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def _mixed(x):
    x = (x ^ _down(x, 30)) * MIX_1
    x = (x ^ _down(x, 27)) * MIX_2
    return x ^ _down(x, 31)


@triton.jit(
    do_not_specialize=[
        "first",
        "num_rows",
        "rows_per_unit",
        "unit_bytes",
        "offset",
        "row_stride",
        "row_bytes",
        "key",
    ]
)
def digest_rows(
    slab,  # bytes
    units,  # [n] int64: unit of each run of rows_per_unit rows
    sums,  # [num_rows] int64
    first, num_rows, rows_per_unit, unit_bytes, offset, row_stride, row_bytes, key,
    BYTES: tl.constexpr,  # of a load: divides all offsets
    WORDS: tl.constexpr,
):  # fmt: skip
    # grid: [num_rows]
    follow()
    row = first + tl.program_id(0).to(tl.int64)
    start = tl.load(units + row // rows_per_unit) * unit_bytes + offset + (row % rows_per_unit) * row_stride
    total = tl.full((), 0, tl.int64)
    piece = tl.arange(0, 8 // BYTES)
    for w0 in range(0, tl.cdiv(row_bytes, 8), WORDS):
        word = w0 + tl.arange(0, WORDS)
        byte = word[:, None] * 8 + piece[None, :] * BYTES
        if BYTES == 8:
            x = tl.load((slab + start + byte).to(tl.pointer_type(tl.int64)), mask=byte < row_bytes, other=0)
        elif BYTES == 4:
            x = tl.load((slab + start + byte).to(tl.pointer_type(tl.uint32)), mask=byte < row_bytes, other=0)
        elif BYTES == 2:
            x = tl.load((slab + start + byte).to(tl.pointer_type(tl.uint16)), mask=byte < row_bytes, other=0)
        else:
            x = tl.load(slab + start + byte, mask=byte < row_bytes, other=0)
        words = tl.sum(x.to(tl.int64) << (piece * (8 * BYTES)).to(tl.int64)[None, :], 1)
        weight = _mixed((word + 1).to(tl.int64) * GOLDEN) | 1
        total += tl.sum((words ^ _down(words, 32)) * weight, 0)
    tl.store(sums + tl.program_id(0), _mixed(total + key + row * GOLDEN))


def field_digests(
    fields: Sequence[Field],
    memory: Mapping[Kind, torch.Tensor],
    units: Sequence[Units],
    *,
    start: int,
    stop: int,
    last: bool,
) -> torch.Tensor:
    """Twin of ref.digest.field_digests: [len(fields)] int64 on the host."""
    return start_digests(fields, memory, units, start=start, stop=stop, last=last).cpu()


def start_digests(
    fields: Sequence[Field],
    memory: Mapping[Kind, torch.Tensor],
    units: Sequence[Units],
    *,
    start: int,
    stop: int,
    last: bool,
) -> torch.Tensor:
    """As `field_digests`, still on the device: nothing waits for it."""
    if not fields:
        return torch.zeros(0, dtype=torch.int64)
    device = next(iter(memory.values())).device
    totals = [_field_digest(f, memory, units, f.spec.live_rows(start, stop, last), device) for f in fields]
    return torch.stack(totals)


def _field_digest(
    field: Field,
    memory: Mapping[Kind, torch.Tensor],
    units: Sequence[Units],
    live: range,
    device: torch.device,
) -> torch.Tensor:
    if not live:
        return torch.zeros((), dtype=torch.int64, device=device)
    slab, per_unit = memory[field.spec.kind], field.rows_per_unit
    table = torch.zeros(-(-live.stop // per_unit), dtype=torch.int64)
    for u in units:
        if u.kind is field.spec.kind:
            ids = u.ids[: max(0, len(table) - u.first)]
            table[u.first : u.first + len(ids)] = torch.tensor(ids)
    sums = torch.empty(len(live), dtype=torch.int64, device=slab.device)
    step = gcd(
        8,
        field.offset,
        field.row_stride,
        field.spec.row_bytes,
        slab.stride(0),
        0 if slab.is_meta else slab.data_ptr(),
    )
    launch(
        digest_rows, (len(live),), slab, table.to(slab.device), sums,
        live.start, len(live), per_unit, slab.stride(0), field.offset, field.row_stride, field.spec.row_bytes,
        _signed(field_key(field)), BYTES=step, WORDS=128, num_warps=1,
    )  # fmt: skip
    return sums.sum()
