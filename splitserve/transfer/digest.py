"""Digests of rows: one 64-bit number per set of rows that both sides of a handoff work out from their own layout.

    row of one piece, as 64-bit words, the last one filled up with zeros:      w0 w1 w2 ... wn
    row sum     s = sum of fold(wc) * weight(c)                                fold(w) = w ^ (w >> 32)
    row digest  d = mix(s + key(spec name, layer, global piece) + GOLDEN * row index in the request)
    digest of a set of rows = sum of their d, modulo 2^64

Digests of disjoint sets add up: over pieces, chunks and ranks, in any order. So the sum of what the source ranks say
about the rows that they sent equals what the destination ranks say about the rows that they have, at unequal TP too,
and because a row's place is part of its digest, that proves where each row went, not only that its bytes survived.

What is certain to be noticed: any single flipped bit (weights are odd, fold and mix are bijections). What is noticed
with a chance of 2^-32 or better against it: everything else that is wrong by accident, such as swapped heads, rows,
pages or layers, a shifted, stale or missing row. Weights and keys are fixed, so this is no protection against an
opponent. Words are folded because a product modulo 2^64 sees only the lowest bit of its weight where a word's highest
bit flips: without it two flipped signs in a row would cancel.

The twins for state on a GPU are ops/ref/digest.py and ops/triton/digest.py: same names, same results.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from splitserve.errors import InvariantError
from splitserve.spec import Field, Kind, Slab, Units, field_key

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

GOLDEN = np.uint64(
    0x9E3779B97F4A7C15
)  # 2^64 / golden ratio: spreads consecutive row numbers over all 64 bits
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)  # the two multipliers of splitmix64's finaliser
MIX_2 = np.uint64(0x94D049BB133111EB)
SCRATCH_BYTES = 256 * 1024
"""Rows are worked on this much at a time: fits a core's second-level cache twice over."""


class Digests(Protocol):
    """Digests of one rank's slabs, wherever they lie: what a Port asks."""

    def of_fields(
        self, fields: Sequence[Field], units: Sequence[Units], *, start: int, stop: int, last: bool
    ) -> Words:
        """[len(fields)] uint64: `field_digests` of this rank's memory."""
        ...

    def of_all(
        self, fields: Sequence[Field], units: Sequence[Units], *, start: int, stop: int, last: bool
    ) -> int:
        """`digest` of this rank's memory."""
        ...


class HostDigests:
    """Of slabs in host memory, by the code below."""

    def __init__(self, slabs: Sequence[Slab]) -> None:
        self._memory = host_memory(slabs)

    def of_fields(
        self, fields: Sequence[Field], units: Sequence[Units], *, start: int, stop: int, last: bool
    ) -> Words:
        return field_digests(fields, self._memory, units, start=start, stop=stop, last=last)

    def of_all(
        self, fields: Sequence[Field], units: Sequence[Units], *, start: int, stop: int, last: bool
    ) -> int:
        return digest(fields, self._memory, units, start=start, stop=stop, last=last)


def digest(
    fields: Sequence[Field],
    memory: Mapping[Kind, Bytes],
    units: Sequence[Units],
    *,
    start: int,
    stop: int,
    last: bool,
) -> int:
    """Digest of the rows of `fields` that a handoff of tokens [start, stop) moves (`StateSpec.live_rows`).

    `memory[kind]` is [units, unit_bytes] uint8 (see `host_memory`); `units` are the request's own. For what one rank
    owes another pass the fields of their `Link`: `src_fields` on one side, `dst_fields` on the other.
    """
    each = field_digests(fields, memory, units, start=start, stop=stop, last=last)
    return int(each.sum(dtype=np.uint64))


def field_digests(
    fields: Sequence[Field],
    memory: Mapping[Kind, Bytes],
    units: Sequence[Units],
    *,
    start: int,
    stop: int,
    last: bool,
) -> Words:
    """[len(fields)] uint64: `digest` of each field alone, for who does not know yet which rank will get which."""
    out = np.zeros(len(fields), np.uint64)
    for first, end in _stacks(fields):
        rows = fields[first].spec.live_rows(start, stop, last)
        if rows:
            stack = fields[first:end]
            kind = stack[0].spec.kind
            out[first:end] = _stack_digests(
                stack, memory[kind], _ids(units, stack[0], rows, len(memory[kind])), rows
            )
    return out


def host_memory(slabs: Sequence[Slab]) -> dict[Kind, Bytes]:
    """Views of slabs in this process's memory, [units, unit_bytes] uint8. The slabs must outlive them."""
    views = {}
    for slab in slabs:
        shape = (slab.count, slab.unit_bytes)
        raw = (ctypes.c_ubyte * (slab.count * slab.unit_bytes)).from_address(slab.addr)
        views[slab.kind] = np.ctypeslib.as_array(raw).reshape(shape)
    return views


def mix(x: Words) -> Words:
    """splitmix64's finaliser, in place: a bijection of 64 bits in which every input bit moves every output bit."""
    x ^= x >> np.uint64(30)
    x *= MIX_1
    x ^= x >> np.uint64(27)
    x *= MIX_2
    x ^= x >> np.uint64(31)
    return x


def column_weights(num_words: int) -> Words:
    """[num_words] odd weights."""
    return mix(np.arange(1, num_words + 1, dtype=np.uint64) * GOLDEN) | np.uint64(1)


def _stacks(fields: Sequence[Field]) -> Iterator[tuple[int, int]]:
    """Ranges of fields that differ in nothing but layer, piece and offset, at one distance from each to the next.

    A model's layers and pieces are such a stack, and one strided view covers it.
    """
    first = 0
    while first < len(fields):
        end = first + 1
        while (
            end < len(fields)
            and _shape(fields[end]) == _shape(fields[first])
            and fields[end].offset - fields[end - 1].offset
            == fields[first + 1].offset - fields[first].offset
            > 0
        ):
            end += 1
        yield first, end
        first = end


def _shape(field: Field) -> tuple[object, ...]:
    spec = field.spec
    return spec.growth, spec.tokens_per_row, spec.rows, spec.row_bytes, field.row_stride, field.rows_per_unit


def _ids(units: Sequence[Units], field: Field, rows: range, count: int) -> npt.NDArray[np.int64]:
    """Unit ids of the request's units 0, 1, ... as far as `rows` reach; -1 where `units` do not say."""
    ids = np.full(-(-rows.stop // field.rows_per_unit), -1, np.int64)
    for u in units:
        if u.kind is field.spec.kind:
            part = u.ids[: max(0, len(ids) - u.first)]
            ids[u.first : u.first + len(part)] = part
    used = ids[rows.start // field.rows_per_unit :]
    if used.min() < 0 or used.max() >= count:
        raise InvariantError(
            f"digest of {field.spec.name!r} rows {rows.start} to {rows.stop}: the units given leave some out or name "
            f"others than the {count} there are: {used.min()} to {used.max()}"
        )
    return ids


def _stack_digests(stack: Sequence[Field], memory: Bytes, ids: npt.NDArray[np.int64], rows: range) -> Words:
    """[len(stack)] sums of row digests. Goes through whole units together, through parts of a unit alone."""
    field = stack[0]
    per_unit, num_fields = field.rows_per_unit, len(stack)
    view = _stack_view(stack, memory)
    keys = np.array([field_key(f) for f in stack], np.uint64)
    weights = column_weights(-(-field.spec.row_bytes // 8))
    field_bytes = per_unit * field.spec.row_bytes
    units_at_once = max(1, SCRATCH_BYTES // (field_bytes * num_fields))
    fields_at_once = max(1, SCRATCH_BYTES // field_bytes)
    out = np.zeros(num_fields, np.uint64)
    row = rows.start
    while row < rows.stop:
        unit, low = divmod(row, per_unit)
        whole = min((rows.stop - row) // per_unit, units_at_once) if low == 0 else 0
        at = ids[unit : unit + whole] if whole > 1 else slice(ids[unit], ids[unit] + 1)
        high = per_unit if whole else min(per_unit, low + rows.stop - row)
        num_rows = max(whole, 1) * (high - low)
        places = np.arange(row, row + num_rows, dtype=np.uint64).reshape(-1, 1, high - low) * GOLDEN
        for f in range(0, num_fields, fields_at_once):
            some = slice(f, f + fields_at_once)
            sums = _row_sums(view[at, some, low:high], weights)
            sums += places + keys[some, None]
            out[some] += mix(sums).sum(axis=(0, 2), dtype=np.uint64)
        row += num_rows
    return out


def _stack_view(stack: Sequence[Field], memory: Bytes) -> npt.NDArray[Any]:
    """[units, fields, rows_per_unit, row]: of 64-bit words where rows are whole, aligned words, else of bytes."""
    field, (count, unit_bytes) = stack[0], memory.shape
    step = stack[1].offset - field.offset if len(stack) > 1 else 0
    rows = as_strided(
        memory[:, field.offset :],
        (count, len(stack), field.rows_per_unit, field.spec.row_bytes),
        (unit_bytes, step, field.row_stride, 1),
        writeable=False,
    )
    sizes = (memory.ctypes.data, field.offset, unit_bytes, step, field.row_stride, field.spec.row_bytes)
    return rows if any(size % 8 for size in sizes) else rows.view(np.uint64)


def _row_sums(rows: npt.NDArray[Any], weights: Words) -> Words:
    """[..., row] words, or bytes to be filled up to words with zeros -> [...] weighted sums of folded words."""
    if rows.dtype != np.uint64:
        padded = np.zeros((*rows.shape[:-1], len(weights) * 8), np.uint8)
        padded[..., : rows.shape[-1]] = rows
        rows = padded.view(np.uint64)
    folded = rows >> np.uint64(32)
    folded ^= rows
    sums: Words = folded @ weights
    return sums
