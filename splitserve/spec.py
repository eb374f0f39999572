"""Memory, described once: what a model keeps for each token or request, and where it lies inside a unit.

A model declares `StateSpec`s; everything else (allocation, sizing, prefix reuse, copying, digests, cost) follows from
them. This module is arithmetic on frozen data: no tensor, no allocation.

A *unit* is a page (the PAGED rows of all layers for `page_tokens` tokens) or a slot (all RING and SLOT rows of one
request). Inside a page, pieces are outermost, so that what one TP rank owes another is one contiguous run:

    page:  piece 0 [ layer 0: row 0 .. row R-1 | layer 1: ... ]  piece 1 [ ... ]  ...
    slot:  for each (name): row 0 [ piece 0: layer 0, layer 1 ... | piece 1 ... ]  row 1 ...
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from splitserve.errors import ConfigError

ALIGN = 64
"""Every field starts at a multiple of this many bytes: a cache line, and enough for any vector load."""


class Growth(StrEnum):
    PAGED = "paged"  # a row for every `tokens_per_row` tokens; prefix-cacheable
    RING = "ring"  # the last `rows` tokens
    SLOT = "slot"  # `rows` rows for each request, whatever its length


class Kind(StrEnum):
    """What a slab's units are."""

    PAGE = "page"
    SLOT = "slot"


class StateSpec(msgspec.Struct, frozen=True):
    """What one layer keeps. `row_bytes` is one row of one piece; `pieces` is global, the same for every TP size."""

    name: str  # "kv", "window", "c4", "c128", "index", "pending"
    layer: int
    growth: Growth
    row_bytes: int
    tokens_per_row: int = 1
    rows: int = 0  # RING and SLOT only
    pieces: int = 1  # KV heads, or 1 where every rank holds all of it
    encoding: str = "bf16"  # must be equal on both sides of a handoff

    @property
    def kind(self) -> Kind:
        return Kind.PAGE if self.growth is Growth.PAGED else Kind.SLOT


class Field(msgspec.Struct, frozen=True):
    """Where one global piece of one spec lies inside a unit: row r is `row_bytes` at `offset + r * row_stride`."""

    spec: StateSpec
    piece: int
    offset: int
    row_stride: int
    rows_per_unit: int


class Slab(msgspec.Struct, frozen=True):
    """One allocation of equal units on one rank: unit i is at `addr + i * unit_bytes`."""

    kind: Kind
    addr: int
    unit_bytes: int
    count: int
    device: int = -1  # -1 is host memory, else the CUDA device


class Units(msgspec.Struct, frozen=True):
    """Units a request owns, in order, and which of its rows are meant.

    `start` and `stop` count tokens. For pages, token t lives in unit `ids[t // page_tokens - first]` where `first` is
    the page index of `ids[0]` in the request; a RING or SLOT unit has one id and is meant whole.
    """

    kind: Kind
    ids: tuple[int, ...]
    first: int
    start: int
    stop: int


class Layout(msgspec.Struct, frozen=True):
    """The fields of one rank's page and slot units, and their sizes."""

    page_tokens: int
    page_fields: tuple[Field, ...]
    page_bytes: int
    slot_fields: tuple[Field, ...]
    slot_bytes: int


def local_pieces(pieces: int, rank: int, size: int) -> range:
    """The global pieces that a TP rank holds. With more ranks than pieces, `size / pieces` ranks hold a replica each.

    Raises ConfigError where neither divides the other.
    """
    if size <= pieces and pieces % size == 0:
        per_rank = pieces // size
        return range(rank * per_rank, (rank + 1) * per_rank)
    if size > pieces and size % pieces == 0:
        piece = rank * pieces // size
        return range(piece, piece + 1)
    raise ConfigError(
        f"tp={size} and {pieces} state pieces (KV heads): one must divide the other",
        field="tp",
        fix=f"choose a tp that divides {pieces} or is a multiple of it",
    )


def owned_pieces(spec: StateSpec, rank: int, size: int) -> range:
    """`local_pieces` of a spec; a spec with one piece is replicated on every rank."""
    return range(1) if spec.pieces == 1 else local_pieces(spec.pieces, rank, size)


def lay_out(specs: Sequence[StateSpec], *, page_tokens: int, rank: int = 0, size: int = 1) -> Layout:
    """Place every local piece of every spec inside a page or a slot. Pure; both sides of a handoff can repeat it.

    Raises ConfigError when `page_tokens` is not a multiple of a spec's `tokens_per_row`.
    """
    page_fields, page_bytes = _lay_out_page(specs, page_tokens, rank, size)
    slot_fields, slot_bytes = _lay_out_slot(specs, rank, size)
    return Layout(page_tokens, tuple(page_fields), page_bytes, tuple(slot_fields), slot_bytes)


def _lay_out_page(
    specs: Sequence[StateSpec], page_tokens: int, rank: int, size: int
) -> tuple[list[Field], int]:
    paged = [s for s in specs if s.kind is Kind.PAGE]
    for spec in paged:
        if page_tokens % spec.tokens_per_row:
            raise ConfigError(
                f"page_tokens={page_tokens} is not a multiple of {spec.tokens_per_row} "
                f"(tokens per row of {spec.name!r})",
                field="page_tokens",
            )
    pieces = sorted({p for s in paged for p in owned_pieces(s, rank, size)})
    fields, offset = [], 0
    for piece in pieces:
        for spec in paged:
            if piece not in owned_pieces(spec, rank, size):
                continue
            rows = page_tokens // spec.tokens_per_row
            fields.append(Field(spec, piece, offset, spec.row_bytes, rows))
            offset += _aligned(rows * spec.row_bytes)
    return fields, offset


def _lay_out_slot(specs: Sequence[StateSpec], rank: int, size: int) -> tuple[list[Field], int]:
    fields, offset = [], 0
    slotted = [s for s in specs if s.kind is Kind.SLOT]
    for name in dict.fromkeys(s.name for s in slotted):
        group = [s for s in slotted if s.name == name]
        cells = [(s, p) for p in sorted({p for s in group for p in owned_pieces(s, rank, size)}) for s in group]
        cells = [(s, p) for s, p in cells if p in owned_pieces(s, rank, size)]
        stride = sum(s.row_bytes for s, _ in cells)
        within = 0
        for spec, piece in cells:
            fields.append(Field(spec, piece, offset + within, stride, spec.rows))
            within += spec.row_bytes
        offset = _aligned(offset + stride * max(s.rows for s in group))
    return fields, offset


def bytes_per_token(specs: Sequence[StateSpec], *, rank: int = 0, size: int = 1) -> float:
    """PAGED bytes that one more token costs a rank."""
    return sum(
        s.row_bytes * len(owned_pieces(s, rank, size)) / s.tokens_per_row for s in specs if s.kind is Kind.PAGE
    )


def live_bytes(specs: Sequence[StateSpec], start: int, stop: int, pieces_of: dict[str, int] | None = None) -> int:
    """Bytes that a handoff of tokens [start, stop) must move, all global pieces counted once.

    PAGED rows whose last token lies in [start, stop), and every RING and SLOT row that is live at `stop`.
    `pieces_of` overrides the number of pieces of a spec by name (what one rank owes another).
    """
    total = 0
    for s in specs:
        pieces = (pieces_of or {}).get(s.name, s.pieces)
        match s.growth:
            case Growth.PAGED:
                rows = stop // s.tokens_per_row - start // s.tokens_per_row
            case Growth.RING:
                rows = min(stop, s.rows)
            case Growth.SLOT:
                rows = s.rows
        total += rows * s.row_bytes * pieces
    return total


def _aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN
