"""Digests of rows in plain torch: the definition, on any device. Same functions as transfer/digest.py, same numbers.

    row of one piece, as 64-bit words, the last one filled up with zeros:      w0 w1 w2 ... wn
    row sum     s = sum of fold(wc) * weight(c)                                fold(w) = w ^ (w >> 32)
    row digest  d = mix(s + key(spec name, layer, global piece) + GOLDEN * row index in the request)
    digest of a set of rows = sum of their d, modulo 2^64

torch has no arithmetic on uint64; int64 has the same bits and wraps the same way, only shifts need a mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from splitserve.spec import Field, Kind, Units, field_key


def _signed(x: int) -> int:
    """The int64 with the bits of the 64-bit number `x`."""
    return x - (1 << 64) if x >> 63 else x


GOLDEN = _signed(0x9E3779B97F4A7C15)  # 2^64 / golden ratio
MIX_1 = _signed(0xBF58476D1CE4E5B9)  # the two multipliers of splitmix64's finaliser
MIX_2 = _signed(0x94D049BB133111EB)


def digest(
    fields: Sequence[Field],
    memory: Mapping[Kind, Tensor],
    units: Sequence[Units],
    *,
    start: int,
    stop: int,
    last: bool,
) -> int:
    """Digest of the rows of `fields` that a handoff of tokens [start, stop) moves, as an unsigned 64-bit number.

    `memory[kind]` is [units, unit_bytes] uint8; `units` are the request's own.
    """
    each = field_digests(fields, memory, units, start=start, stop=stop, last=last)
    return int(each.sum()) % (1 << 64)


def field_digests(
    fields: Sequence[Field],
    memory: Mapping[Kind, Tensor],
    units: Sequence[Units],
    *,
    start: int,
    stop: int,
    last: bool,
) -> Tensor:
    """[len(fields)] int64 on the host, the bits of uint64: `digest` of each field alone."""
    sums = [_field_digest(f, memory, units, f.spec.live_rows(start, stop, last)) for f in fields]
    return torch.stack(sums).cpu() if sums else torch.zeros(0, dtype=torch.int64)


def mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64: a bijection of 64 bits."""
    x = (x ^ _shift(x, 30)) * MIX_1
    x = (x ^ _shift(x, 27)) * MIX_2
    return x ^ _shift(x, 31)


def column_weights(num_words: int, device: torch.device | None = None) -> Tensor:
    """[num_words] odd weights, int64."""
    return mix(torch.arange(1, num_words + 1, device=device) * GOLDEN) | 1


def _field_digest(field: Field, memory: Mapping[Kind, Tensor], units: Sequence[Units], live: range) -> Tensor:
    """[] int64: the sum of one field's row digests."""
    slab = memory[field.spec.kind] if live else None
    if slab is None:
        return torch.zeros((), dtype=torch.int64)
    row = torch.arange(live.start, live.stop, device=slab.device)
    unit = torch.zeros(-(-live.stop // field.rows_per_unit), dtype=torch.int64)
    for u in units:
        if u.kind is field.spec.kind:
            ids = u.ids[: max(0, len(unit) - u.first)]
            unit[u.first : u.first + len(ids)] = torch.tensor(ids)
    stored = slab.as_strided(
        (len(slab), field.rows_per_unit, field.spec.row_bytes),
        (slab.stride(0), field.row_stride, 1),
        slab.storage_offset() + field.offset,
    )
    rows = stored[unit.to(slab.device)[row // field.rows_per_unit], row % field.rows_per_unit]
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 8)).view(torch.int64)
    sums = ((padded ^ _shift(padded, 32)) * column_weights(padded.shape[1], slab.device)).sum(dim=1)
    return mix(sums + _signed(field_key(field)) + row * GOLDEN).sum()


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; int64's own shift copies the sign down."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
