"""Which bytes go where: the copies that one source rank owes one destination rank for tokens [start, stop).

It is arithmetic on two cards and two lists of units. It moves nothing and touches no memory that a card describes.

    source rank 0 of 1, page 7                    destination ranks of 2
    ┌─────────┬─────────┬─────────┬─────────┐     ┌─────────┬─────────┐
    │ piece 0 │ piece 1 │ piece 2 │ piece 3 │     │ piece 0 │ piece 1 │ rank 0, page 40
    └─────────┴─────────┴─────────┴─────────┘     ├─────────┼─────────┤
     └── one run to rank 0 ┘└── one to rank 1 ┘   │ piece 2 │ piece 3 │ rank 1, page 40
                                                  └─────────┴─────────┘

Three properties hold, and a test with real bytes checks them for every pair of TP sizes: over all source ranks and
all chunks of a prompt, every live byte of every destination rank is written exactly once; no other byte is touched;
and the bytes add up to `spec.live_bytes`.

Who sends a piece that several source ranks hold (replicated heads and latents): the holder nearest to the destination
rank, when both groups are drawn on the same ruler, so that senders share the work:

    source 0 1 2 3        destination 0 ◀ 0, 1 ◀ 2        source 0 1        destination 0, 1 ◀ 0, 2, 3 ◀ 1
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from splitserve.errors import ConfigError, ProtocolError
from splitserve.spec import Field, Growth, Kind, Slab, StateSpec, Units, owned_pieces
from splitserve.wire import Card

Ints = npt.NDArray[np.int64]
Runs = npt.NDArray[np.int64]
"""[n, 3]: offset or address at the source, at the destination, bytes."""


@dataclass(frozen=True)
class Copies:
    """Write `src[i]` to `dst[i]`. Both [n, 3] uint64: address, bytes, device. Device is 0 for host memory."""

    src: npt.NDArray[np.uint64]
    dst: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.src)

    @property
    def num_bytes(self) -> int:
        return int(self.src[:, 1].sum())


def check_compatible(mine: Card, theirs: Card) -> None:
    """Raise ConfigError, with both sides' values, unless rows of `mine` mean the same at `theirs`.

    Compared: the weights, tokens in a page, the set of states, and of each state growth, row_bytes, tokens_per_row,
    rows, pieces and encoding. TP sizes may differ.
    """
    here, there = _name(mine), _name(theirs)
    if mine.page_tokens != theirs.page_tokens:
        raise ConfigError(
            f"page_tokens differ: {here} has {mine.page_tokens}, {there} has {theirs.page_tokens}",
            field="page_tokens",
            fix="give prefill and decode engines the same page_tokens",
        )
    if mine.weights != theirs.weights:
        raise ConfigError(
            f"weights differ: {here} has the checkpoint {mine.weights}, {there} has {theirs.weights}",
            field="model",
            fix="serve the same checkpoint on both sides",
        )
    ours, others = _specs(mine), _specs(theirs)
    for key in sorted(ours.keys() ^ others.keys()):
        has, lacks = (here, there) if key in ours else (there, here)
        raise ConfigError(
            f"state {key[0]!r} of layer {key[1]} exists on {has} and not on {lacks}",
            field="model",
            fix="serve the same model, with the same drafting, on both sides",
        )
    for key, spec in sorted(ours.items()):
        for name in StateSpec.__struct_fields__:
            a, b = getattr(spec, name), getattr(others[key], name)
            if a != b:
                raise ConfigError(
                    f"state {key[0]!r} of layer {key[1]}: {name} is {a} on {here} and {b} on {there}",
                    field="dtype" if name == "encoding" else "model",
                    fix="serve the same model with the same state encoding on both sides",
                )


def source_rank(spec: StateSpec, piece: int, *, src_size: int, dst_rank: int, dst_size: int) -> int:
    """The one source rank that sends `piece` to `dst_rank`: its holder nearest to dst_rank / dst_size * src_size."""
    holders = [rank for rank in range(src_size) if piece in owned_pieces(spec, rank, src_size)]
    return min(max(dst_rank * src_size // dst_size, holders[0]), holders[-1])


class Link:
    """All that one source rank owes one destination rank, worked out once per pair of cards and used for every chunk.

    `src_fields[i]` and `dst_fields[i]` are the same spec and piece, laid out on either side; digest.py sums over them.
    `src_index[i]` is that field's position in `mine.fields`.
    """

    def __init__(self, mine: Card, theirs: Card) -> None:
        check_compatible(mine, theirs)
        self.mine = mine
        self.theirs = theirs
        self.src_index, self.src_fields, self.dst_fields = _owed_fields(mine, theirs)
        self._paged = _Fields(self.src_fields, self.dst_fields, Kind.PAGE)
        self._slotted = _Fields(self.src_fields, self.dst_fields, Kind.SLOT)
        self._whole_page = self._paged.runs(self._paged.none, self._paged.rows_per_unit)
        self._bytes_a_row = _bytes_a_row(self.src_fields)

    def __repr__(self) -> str:
        return f"Link({_name(self.mine)} to {_name(self.theirs)}, {len(self.src_fields)} fields)"

    def num_bytes(self, *, start: int, stop: int, last: bool) -> int:
        """Bytes of `copies` for the same tokens, without the copies. 0: this rank owes that rank nothing of them."""
        return sum(len(spec.live_rows(start, stop, last)) * size for spec, size in self._bytes_a_row)

    def copies(
        self, src: Sequence[Units], dst: Sequence[Units], *, start: int, stop: int, last: bool
    ) -> Copies:
        """The runs to write for tokens [start, stop), pages in order of source address, neighbours merged.

        `last` says that `stop` ends the prompt: RING and SLOT rows go with it. Raises ProtocolError where the units
        of a side do not mean all of those tokens or name a unit that its slab does not have: the destination's come
        from another process, and nothing outside what it offered may ever be written.
        """
        parts = []
        if self._paged:
            parts += self._page_parts(src, dst, start, stop)
        if self._slotted and last:
            parts.append(self._slot_part(src, dst, stop))
        return self._finish(parts)

    def _page_parts(self, src: Sequence[Units], dst: Sequence[Units], start: int, stop: int) -> list[_Part]:
        """Whole pages share one list of runs; the page that `start` or `stop` cuts gets its own."""
        size = self.mine.page_tokens
        first, end = start // size, -(-stop // size)
        if start >= stop:
            return []
        mine = _page_addresses(self.mine, src, start, stop)
        theirs = _page_addresses(self.theirs, dst, start, stop)
        whole, whole_end = -(-start // size), stop // size
        parts = []
        if whole < whole_end:
            pages = slice(whole - first, whole_end - first)
            parts.append(_Part(mine[pages], theirs[pages], self._whole_page, Kind.PAGE))
        for page in sorted({first, end - 1} - set(range(whole, whole_end))):
            runs = self._paged.runs(*self._paged.rows_in_page(page, start, stop))
            at = slice(page - first, page - first + 1)
            parts.append(_Part(mine[at], theirs[at], runs, Kind.PAGE))
        return parts

    def _slot_part(self, src: Sequence[Units], dst: Sequence[Units], stop: int) -> _Part:
        live = [len(spec.live_rows(0, stop, True)) for spec in self._slotted.specs]
        runs = self._slotted.runs(self._slotted.none, np.array(live, np.int64))
        return _Part(_slot_address(self.mine, src), _slot_address(self.theirs, dst), runs, Kind.SLOT)

    def _finish(self, parts: Sequence[_Part]) -> Copies:
        """Addresses of all parts, merged and in the transports' form. Pages and slots do not merge: other slabs."""
        src, dst = [np.empty((0, 3), np.uint64)], [np.empty((0, 3), np.uint64)]
        for kind in Kind:
            chosen = [part.addresses() for part in parts if part.kind is kind]
            if chosen:
                # A slot is one unit, whose runs are merged.
                runs = chosen[0] if kind is Kind.SLOT else _merge(np.concatenate(chosen))
                src.append(_with_device(runs[:, 0], runs[:, 2], _slab(self.mine, kind)))
                dst.append(_with_device(runs[:, 1], runs[:, 2], _slab(self.theirs, kind)))
        return Copies(np.concatenate(src), np.concatenate(dst))


def copies(
    mine: Card,
    theirs: Card,
    src: Sequence[Units],
    dst: Sequence[Units],
    *,
    start: int,
    stop: int,
    last: bool,
) -> Copies:
    """`Link.copies` for one use; who sends many chunks keeps the Link."""
    return Link(mine, theirs).copies(src, dst, start=start, stop=stop, last=last)


def link_bytes(mine: Card, theirs: Card, *, start: int, stop: int, last: bool) -> int:
    """Bytes that this rank owes that rank for tokens [start, stop); 0 when it owes nothing."""
    return Link(mine, theirs).num_bytes(start=start, stop=stop, last=last)


@dataclass(frozen=True)
class _Part:
    """Units at these addresses [u] all have these runs [n, 3] of offsets."""

    src: Ints
    dst: Ints
    runs: Runs
    kind: Kind

    def addresses(self) -> Runs:
        """[u * n, 3]"""
        out = np.empty((len(self.src), len(self.runs), 3), np.int64)
        out[..., 0] = self.src[:, None] + self.runs[:, 0]
        out[..., 1] = self.dst[:, None] + self.runs[:, 1]
        out[..., 2] = self.runs[:, 2]
        return out.reshape(-1, 3)


class _Fields:
    """The owed fields of one kind as columns.

    Fields whose rows lie side by side at either end are one column, in a slot all layers of one name: six for
    DeepSeek-V4's 121 fields, whose rows one by one would take longer to write down than to write.
    """

    def __init__(self, src: Sequence[Field], dst: Sequence[Field], kind: Kind) -> None:
        pairs = [(a, b) for a, b in zip(src, dst, strict=True) if a.spec.kind is kind]
        joined: list[list[tuple[Field, Field]]] = []
        for pair in sorted(pairs, key=lambda pair: pair[0].offset):
            if joined and _goes_on(joined[-1][-1], pair):
                joined[-1].append(pair)
            else:
                joined.append([pair])
        heads = [some[0] for some in joined]
        self.specs = [a.spec for a, _ in heads]  # whose rows count as those of the whole column
        self.src_offset = _column(a.offset for a, _ in heads)
        self.dst_offset = _column(b.offset for _, b in heads)
        self.src_stride = _column(a.row_stride for a, _ in heads)
        self.dst_stride = _column(b.row_stride for _, b in heads)
        self.row_bytes = _column(sum(a.spec.row_bytes for a, _ in some) for some in joined)
        self.tokens_per_row = _column(a.spec.tokens_per_row for a, _ in heads)
        self.rows_per_unit = _column(a.rows_per_unit for a, _ in heads)
        self.none = np.zeros(len(heads), np.int64)
        self._dense = (self.src_stride == self.row_bytes) & (self.dst_stride == self.row_bytes)

    def __len__(self) -> int:
        return len(self.specs)

    def rows_in_page(self, page: int, start: int, stop: int) -> tuple[Ints, Ints]:
        """For each column the rows [low, high) of page `page` of the request that tokens [start, stop) complete."""
        before = page * self.rows_per_unit
        low = np.clip(start // self.tokens_per_row - before, 0, self.rows_per_unit)
        high = np.clip(stop // self.tokens_per_row - before, 0, self.rows_per_unit)
        return low, high

    def runs(self, low: Ints, high: Ints) -> Runs:
        """Rows [low, high) of each column as merged runs of offsets inside a unit."""
        some = high > low
        of = np.flatnonzero(self._dense & some)  # column of each run
        row, rows = low[of], (high - low)[of]
        strided = np.flatnonzero(~self._dense & some)
        if len(strided):  # of these every row is a run
            each = np.concatenate([np.arange(low[i], high[i]) for i in strided])
            of = np.concatenate([of, np.repeat(strided, (high - low)[strided])])
            row, rows = np.concatenate([row, each]), np.concatenate([rows, np.ones_like(each)])
        out = np.empty((len(of), 3), np.int64)
        out[:, 0] = self.src_offset[of] + row * self.src_stride[of]
        out[:, 1] = self.dst_offset[of] + row * self.dst_stride[of]
        out[:, 2] = self.row_bytes[of] * rows
        return _merge(out)


def _goes_on(before: tuple[Field, Field], pair: tuple[Field, Field]) -> bool:
    """Whether each row of a pair's fields begins where that row of the pair before ends, at both ends."""
    return _counted_as(before[0]) == _counted_as(pair[0]) and all(
        old.row_stride == new.row_stride and old.offset + old.spec.row_bytes == new.offset
        for old, new in zip(before, pair, strict=True)
    )


def _counted_as(field: Field) -> tuple[Growth, int, int, int]:
    """Fields that are equal in this have the same live rows of any tokens, and the same of them in each unit."""
    spec = field.spec
    return spec.growth, spec.rows, spec.tokens_per_row, field.rows_per_unit


def _bytes_a_row(fields: Sequence[Field]) -> list[tuple[StateSpec, int]]:
    """For each way of counting rows one spec that has it, and the bytes of a row of all fields together."""
    found: dict[tuple[Growth, int, int, int], tuple[StateSpec, int]] = {}
    for field in fields:
        spec, size = found.get(_counted_as(field), (field.spec, 0))
        found[_counted_as(field)] = spec, size + field.spec.row_bytes
    return list(found.values())


def _merge(runs: Runs) -> Runs:
    """Sort by source and join runs that are neighbours on both sides. No two runs overlap."""
    if len(runs) < 2:
        return runs
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    ends = runs[:-1, :2] + runs[:-1, 2:]
    begins = np.ones(len(runs), bool)
    (runs[1:, :2] != ends).any(axis=1, out=begins[1:])
    starts = np.flatnonzero(begins)
    merged = runs[starts]
    merged[:, 2] = np.add.reduceat(runs[:, 2], starts)
    return merged


def _owed_fields(mine: Card, theirs: Card) -> tuple[list[int], tuple[Field, ...], tuple[Field, ...]]:
    """The fields that `mine` sends to `theirs`: positions in mine.fields, and as either side lays them out."""
    at = {(f.spec, f.piece): i for i, f in enumerate(mine.fields)}
    owed = [(at[f.spec, f.piece], f) for f in theirs.fields if _sends(mine, theirs, f)]
    return [i for i, _ in owed], tuple(mine.fields[i] for i, _ in owed), tuple(f for _, f in owed)


def _sends(mine: Card, theirs: Card, field: Field) -> bool:
    sizes = {"src_size": mine.tp_size, "dst_rank": theirs.tp_rank, "dst_size": theirs.tp_size}
    return source_rank(field.spec, field.piece, **sizes) == mine.tp_rank


def _page_addresses(card: Card, units: Sequence[Units], start: int, stop: int) -> Ints:
    """Addresses of the pages that hold tokens [start, stop), each of which the units must mean."""
    slab = _slab(card, Kind.PAGE)
    first, end = start // card.page_tokens, -(-stop // card.page_tokens)
    ids = np.full(end - first, -1, np.int64)
    pages = [u for u in units if u.kind is Kind.PAGE and u.start < stop and u.stop > start]
    for u in pages:
        low, high = max(u.first, first), min(u.first + len(u.ids), end)
        if low < high:
            ids[low - first : high - first] = u.ids[low - u.first : high - u.first]
    meant = sum(min(u.stop, stop) - max(u.start, start) for u in pages)
    if meant != stop - start or ids.min() < 0 or ids.max() >= slab.count:
        raise ProtocolError(
            f"tokens [{start}, {stop}) lie in pages {first} to {end - 1} of the request; the units of {_name(card)} "
            f"mean {[(u.start, u.stop) for u in pages]} and name page ids from {ids.min()} to {ids.max()} "
            f"(-1: none given) of its {slab.count}"
        )
    return slab.addr + ids * slab.unit_bytes


def _slot_address(card: Card, units: Sequence[Units]) -> Ints:
    slab = _slab(card, Kind.SLOT)
    ids = [i for u in units if u.kind is Kind.SLOT for i in u.ids]
    if len(ids) != 1 or not 0 <= ids[0] < slab.count:
        raise ProtocolError(f"one slot of {slab.count} on {_name(card)} is needed, the units name {ids}")
    return np.array([slab.addr + ids[0] * slab.unit_bytes], np.int64)


def _slab(card: Card, kind: Kind) -> Slab:
    for slab in card.slabs:
        if slab.kind is kind:
            return slab
    raise ProtocolError(f"{_name(card)} has {kind} fields but no {kind} slab")


def _with_device(address: Ints, length: Ints, slab: Slab) -> npt.NDArray[np.uint64]:
    out = np.empty((len(address), 3), np.uint64)
    out[:, 0], out[:, 1], out[:, 2] = address, length, max(slab.device, 0)
    return out


def _specs(card: Card) -> dict[tuple[str, int], StateSpec]:
    return {(f.spec.name, f.spec.layer): f.spec for f in card.fields}


def _name(card: Card) -> str:
    return f"{card.agent_name} (rank {card.tp_rank} of {card.tp_size})"


def _column(numbers: Iterable[int]) -> Ints:
    return np.fromiter(numbers, np.int64)
