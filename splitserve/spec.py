"""Memory, described once: what a model keeps for each token or request, and where it lies inside a unit.

A model declares `StateSpec`s; everything else (allocation, sizing, prefix reuse, copying, digests, cost) follows from
them. This module is arithmetic on frozen data: no tensor, no allocation.

A *unit* is a page (the PAGED rows of all layers for `page_tokens` tokens) or a slot (all RING and SLOT rows of one
request). Specs with the same number of pieces form a group. Inside a group of a page, pieces are outermost, so that
what one TP rank owes another is one contiguous run, and every piece looks alike, so that one stride leads from a
spec's piece to its next:

    page:  for each group: piece 0 [ layer 0: row 0 .. row R-1 | layer 1: ... ]  piece 1 [ ... ]  ...
    slot:  for each group of one name: row 0 [ piece 0: layer 0, layer 1 ... | piece 1 ... ]  row 1 ...

In a slot rows are outermost instead, so that the live rows of all layers are one run. The index of a RING or TAIL row
is the token's position modulo `rows`, on every rank of both sides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from math import gcd

import msgspec

from splitserve.errors import ConfigError

PAGE_TOKENS = 64
"""Tokens in a page where neither the deployment nor the model says more."""

ALIGN = 64
"""The most that anything in a unit is aligned to, in bytes: a cache line, enough for any vector load.

Fields keep the alignment that their rows have anyway, gcd(row_bytes, ALIGN), and units, groups and pieces that of the
most aligned field in them. No more: padding between fields would cut a handoff's one run into one per layer, and
padding after them one for many pages into one for each.
"""

ELEMENT_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
"""Bytes of one element of an encoding; packed encodings ("fp8_ds_mla") are rows of single bytes."""


class Growth(StrEnum):
    PAGED = "paged"  # a row for every `tokens_per_row` tokens; prefix-cacheable
    RING = "ring"  # the last `rows` tokens
    SLOT = "slot"  # `rows` rows for each request, whatever its length
    TAIL = "tail"  # the tokens after the last multiple of `rows`: what waits to be compressed


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
    rows: int = 0  # RING, SLOT and TAIL only
    pieces: int = 1  # KV heads, or 1 where every rank holds all of it
    encoding: str = "bf16"  # must be equal on both sides of a handoff

    @property
    def kind(self) -> Kind:
        return Kind.PAGE if self.growth is Growth.PAGED else Kind.SLOT

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES.get(self.encoding, 1)

    def live_rows(self, start: int, stop: int, last: bool) -> range:
        """The rows that a handoff of tokens [start, stop) moves, by their index in the request.

        PAGED: rows whose last token lies in [start, stop); a row that is not complete yet belongs to a later chunk.
        RING, SLOT and TAIL rows change until the prompt ends, so they move once, with the chunk that ends it (`last`).
        """
        if self.growth is Growth.PAGED:
            return range(start // self.tokens_per_row, stop // self.tokens_per_row)
        if not last:
            return range(0)
        if self.growth is Growth.TAIL:
            return range(stop % self.rows)
        return range(min(stop, self.rows) if self.growth is Growth.RING else self.rows)


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

    Raises ConfigError when `page_tokens` is not a multiple of a spec's `tokens_per_row`, when two specs share a name
    and a layer, when a spec describes no bytes, and where `local_pieces` does.
    """
    _check_specs(specs, page_tokens)
    page_fields, page_bytes = _lay_out_page(
        [s for s in specs if s.kind is Kind.PAGE], page_tokens, rank, size
    )
    slot_fields, slot_bytes = _lay_out_slot([s for s in specs if s.kind is Kind.SLOT], rank, size)
    return Layout(page_tokens, tuple(page_fields), page_bytes, tuple(slot_fields), slot_bytes)


def _lay_out_page(
    specs: Sequence[StateSpec], page_tokens: int, rank: int, size: int
) -> tuple[list[Field], int]:
    fields, offset = [], 0
    align = _alignment(specs)
    for group in _groups(specs, lambda s: (s.pieces,)):
        for piece in owned_pieces(group[0], rank, size):
            for spec in group:
                rows = page_tokens // spec.tokens_per_row
                offset = _aligned(offset, gcd(spec.row_bytes, ALIGN))
                fields.append(Field(spec, piece, offset, spec.row_bytes, rows))
                offset += rows * spec.row_bytes
            offset = _aligned(offset, align)
    return fields, offset


def _lay_out_slot(specs: Sequence[StateSpec], rank: int, size: int) -> tuple[list[Field], int]:
    fields, offset = [], 0
    for group in _groups(specs, lambda s: (s.name, s.pieces, s.growth, s.rows, s.encoding)):
        cells = [(piece, spec) for piece in owned_pieces(group[0], rank, size) for spec in group]
        stride, within = sum(spec.row_bytes for _, spec in cells), 0
        for piece, spec in cells:
            fields.append(Field(spec, piece, offset + within, stride, spec.rows))
            within += spec.row_bytes
        offset = _aligned(offset + stride * group[0].rows)
    return fields, offset


def _groups(
    specs: Sequence[StateSpec], key: Callable[[StateSpec], tuple[object, ...]]
) -> Iterable[list[StateSpec]]:
    """Specs of equal key, in the order of each key's first spec."""
    groups: dict[tuple[object, ...], list[StateSpec]] = {}
    for spec in specs:
        groups.setdefault(key(spec), []).append(spec)
    return groups.values()


def _check_specs(specs: Sequence[StateSpec], page_tokens: int) -> None:
    seen: set[tuple[str, int]] = set()
    for spec in specs:
        where = f"state {spec.name!r} of layer {spec.layer}"
        if (spec.name, spec.layer) in seen:
            raise ConfigError(f"{where} is declared twice")
        seen.add((spec.name, spec.layer))
        if spec.row_bytes < 1 or spec.tokens_per_row < 1 or spec.pieces < 1:
            raise ConfigError(
                f"{where}: row_bytes={spec.row_bytes}, tokens_per_row={spec.tokens_per_row} and "
                f"pieces={spec.pieces} must be at least 1"
            )
        if spec.row_bytes % spec.element_bytes:
            raise ConfigError(
                f"{where}: {spec.row_bytes} bytes are no whole number of {spec.encoding} elements"
            )
        if spec.kind is Kind.SLOT and spec.rows < 1:
            raise ConfigError(f"{where}: {spec.growth} needs rows >= 1, not {spec.rows}")
        if spec.kind is Kind.PAGE and (page_tokens < 1 or page_tokens % spec.tokens_per_row):
            raise ConfigError(
                f"page_tokens={page_tokens} is not a multiple of {spec.tokens_per_row} "
                f"(tokens per row of {spec.name!r})",
                field="page_tokens",
                fix=f"choose a multiple of {spec.tokens_per_row}",
            )


def field_key(field: Field) -> int:
    """64 bits that name a field's rows wherever they lie: the same on both sides of a handoff, at any TP size."""
    spec = field.spec
    name = f"{spec.name}\0{spec.layer}\0{field.piece}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def bytes_per_token(specs: Sequence[StateSpec], *, rank: int = 0, size: int = 1) -> float:
    """PAGED bytes that one more token costs a rank."""
    return sum(
        s.row_bytes * len(owned_pieces(s, rank, size)) / s.tokens_per_row
        for s in specs
        if s.kind is Kind.PAGE
    )


def live_bytes(
    specs: Sequence[StateSpec],
    start: int,
    stop: int,
    pieces_of: dict[str, int] | None = None,
    *,
    last: bool = True,
) -> int:
    """Bytes that a handoff of tokens [start, stop) must move, all global pieces counted once.

    PAGED rows whose last token lies in [start, stop) and, unless more of the prompt follows (`last=False`), every
    RING and SLOT row that is live at `stop`. `pieces_of` overrides the number of pieces of a spec by name (what one
    rank owes another, or how often a whole destination group holds it).
    """
    return sum(
        len(s.live_rows(start, stop, last)) * s.row_bytes * (pieces_of or {}).get(s.name, s.pieces)
        for s in specs
    )


def page_tokens(specs: Sequence[StateSpec], wanted: int = 0) -> int:
    """Tokens in a page: what is wanted, else `PAGE_TOKENS`, or two of the model's coarsest rows where those are longer.

    DeepSeek-V4 has rows of 128 tokens, so its pages have 256 (docs/decisions/0002-slab-pages.md).
    """
    coarsest = max((s.tokens_per_row for s in specs if s.kind is Kind.PAGE), default=1)
    return wanted or max(PAGE_TOKENS, 2 * coarsest)


def group_bytes(specs: Sequence[StateSpec], start: int, stop: int, *, size: int) -> int:
    """Bytes that a handoff of a whole prompt's tokens [start, stop) to a group of `size` ranks must move.

    What several ranks hold counts for each of them: a latent once a rank, a KV head as often as it is replicated.
    """
    copies = {s.name: sum(len(owned_pieces(s, rank, size)) for rank in range(size)) for s in specs}
    return live_bytes(specs, start, stop, copies)


def _alignment(specs: Iterable[StateSpec]) -> int:
    """Bytes: that of the most aligned rows."""
    return max((gcd(spec.row_bytes, ALIGN) for spec in specs), default=ALIGN)


def _aligned(n: int, to: int = ALIGN) -> int:
    return -(-n // to) * to
