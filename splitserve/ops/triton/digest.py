"""Digests of rows on the device: the twin of ops/ref/digest.py, same numbers.

A program takes a row of a field: 64-bit words, folded, weighted by column, summed, mixed with the row's index. Fields of
one shape, as a state's are in all layers, are one launch: an engine has a hundred and more, and the host starts each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

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
        "row_stride",
        "row_bytes",
    ],
    do_not_specialize_on_alignment=["keys"],
)
def digest_rows(
    slab,  # bytes
    units,  # [n] int64: unit of each run of rows_per_unit rows
    offsets, keys,  # [fields] int64
    sums,  # [fields, num_rows] int64
    first, num_rows, rows_per_unit, unit_bytes, row_stride, row_bytes,
    BYTES: tl.constexpr,  # of a load: divides all offsets
    WORDS: tl.constexpr,
):  # fmt: skip
    # grid: [num_rows, fields]
    follow()
    row, field = first + tl.program_id(0).to(tl.int64), tl.program_id(1)
    offset = tl.load(offsets + field)
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
    into = sums + field.to(tl.int64) * num_rows + tl.program_id(0)
    tl.store(into, _mixed(total + tl.load(keys + field) + row * GOLDEN))


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
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, f in enumerate(fields):
        shape = (
            f.spec.kind,
            f.rows_per_unit,
            f.row_stride,
            f.spec.row_bytes,
            f.spec.live_rows(start, stop, last),
        )
        alike.setdefault(shape, []).append(i)
    totals = [
        _digests([fields[i] for i in some], memory, units, shape[-1], device) for shape, some in alike.items()
    ]
    places = torch.tensor([i for some in alike.values() for i in some]).argsort()
    return torch.cat(totals)[places.to(device)]


def _digests(
    fields: Sequence[Field],  # that differ in where they begin only
    memory: Mapping[Kind, torch.Tensor],
    units: Sequence[Units],
    live: range,
    device: torch.device,
) -> torch.Tensor:
    if not live:
        return torch.zeros(len(fields), dtype=torch.int64, device=device)
    one = fields[0]
    slab, per_unit = memory[one.spec.kind], one.rows_per_unit
    table = torch.zeros(-(-live.stop // per_unit), dtype=torch.int64)
    for u in units:
        if u.kind is one.spec.kind:
            ids = u.ids[: max(0, len(table) - u.first)]
            table[u.first : u.first + len(ids)] = torch.tensor(ids)
    begin = torch.tensor([[f.offset for f in fields], [_signed(field_key(f)) for f in fields]]).to(
        slab.device
    )
    sums = torch.empty(len(fields), len(live), dtype=torch.int64, device=slab.device)
    step = gcd(
        8,
        *(f.offset for f in fields),
        one.row_stride,
        one.spec.row_bytes,
        slab.stride(0),
        0 if slab.is_meta else slab.data_ptr(),
    )
    launch(
        digest_rows, (len(live), len(fields)), slab, table.to(slab.device), begin[0], begin[1], sums,
        live.start, len(live), per_unit, slab.stride(0), one.row_stride, one.spec.row_bytes,
        BYTES=step, WORDS=128, num_warps=1,
    )  # fmt: skip
    return sums.sum(1)
