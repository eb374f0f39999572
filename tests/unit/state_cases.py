"""Ranks with real memory for tests of layouts, copies and digests, and hypothesis strategies that draw them.

Rows are placed and read here by the plain arithmetic of `Field` (offset + row * row_stride), one row at a time, so
that the vectorised code under test has an independent definition to be compared with.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import lcm

import numpy as np
from hypothesis import strategies as st

from splitserve.spec import Field, Growth, Kind, Layout, Slab, StateSpec, Units, lay_out
from splitserve.transfer.layout import Copies
from splitserve.wire import Card

SIZES = (1, 2, 3, 4, 6, 8)
PIECES = (1, 2, 3, 4, 8)
LEGAL_TP = [
    (pieces, src, dst)
    for pieces in PIECES
    for src in SIZES
    for dst in SIZES
    if all(pieces % size == 0 or size % pieces == 0 for size in (src, dst))
]
"""(pieces, source TP, destination TP): all pairs of sizes that this number of pieces allows."""


class Rank:
    """One TP rank: a layout, slabs in numpy arrays, and one request's units in them."""

    def __init__(
        self, specs: Sequence[StateSpec], *, page_tokens: int, rank: int, size: int, units: Sequence[Units]
    ) -> None:
        self.specs = specs
        self.units = tuple(units)
        self.layout: Layout = lay_out(specs, page_tokens=page_tokens, rank=rank, size=size)
        counts = {
            kind: 2 + max((i for u in units if u.kind is kind for i in u.ids), default=0) for kind in Kind
        }
        rng = np.random.default_rng((rank, size, page_tokens))
        self.memory = {
            kind: rng.integers(0, 256, (counts[kind], unit_bytes), np.uint8)
            for kind, unit_bytes in ((Kind.PAGE, self.layout.page_bytes), (Kind.SLOT, self.layout.slot_bytes))
            if unit_bytes
        }
        slabs = tuple(
            Slab(kind, memory.ctypes.data, memory.shape[1], memory.shape[0])
            for kind, memory in self.memory.items()
        )
        fields = self.layout.page_fields + self.layout.slot_fields
        self.card = Card(
            "local", b"", f"rank{rank}of{size}", rank, size, page_tokens, slabs, fields, "host", 1, 1
        )

    def row(self, f: Field, index: int) -> np.ndarray:
        """View of one row of the request: [row_bytes] uint8."""
        unit, within = divmod(index, f.rows_per_unit)
        (u,) = (u for u in self.units if u.kind is f.spec.kind)
        at = f.offset + within * f.row_stride
        return self.memory[f.spec.kind][u.ids[unit - u.first], at : at + f.spec.row_bytes]

    def live(self, start: int, stop: int, last: bool = True) -> Iterator[tuple[Field, int]]:
        for f in self.card.fields:
            for index in f.spec.live_rows(start, stop, last):
                yield f, index

    def snapshot(self) -> dict[Kind, np.ndarray]:
        return {kind: memory.copy() for kind, memory in self.memory.items()}


@dataclass
class Truth:
    """What each row of the prompt's state really is, whoever holds it."""

    seed: int
    rows: dict[tuple[str, int, int, int], np.ndarray] = field(default_factory=dict)

    def row(self, f: Field, index: int) -> np.ndarray:
        key = (f.spec.name, f.spec.layer, f.piece, index)
        if key not in self.rows:
            rng = np.random.default_rng((self.seed, len(f.spec.name), f.spec.layer, f.piece, index))
            self.rows[key] = rng.integers(0, 256, f.spec.row_bytes, np.uint8)
        return self.rows[key]


@dataclass
class Case:
    """A prompt of `total` tokens whose state [start, total) goes from `src` ranks to `dst` ranks in `chunks`."""

    specs: list[StateSpec]
    page_tokens: int
    src: list[Rank]
    dst: list[Rank]
    start: int
    total: int
    cuts: list[int]
    truth: Truth

    @property
    def chunks(self) -> list[tuple[int, int, bool]]:
        """(start, stop, last)"""
        ends = [*self.cuts, self.total]
        begins = [self.start, *self.cuts]
        return [
            (a, b, b == self.total and i == len(self.cuts))
            for i, (a, b) in enumerate(zip(begins, ends, strict=True))
        ]


def make_case(
    specs: list[StateSpec],
    *,
    page_tokens: int,
    tp: tuple[int, int],
    start: int,
    total: int,
    cuts: Sequence[int],
    seed: int = 0,
) -> Case:
    """Random unit ids on both sides; the source holds the whole prompt, the destination's units begin at `start`."""
    rng = np.random.default_rng(seed)
    num_pages = -(-total // page_tokens)
    slotted = any(s.kind is Kind.SLOT for s in specs)

    def units(first: int) -> tuple[Units, ...]:
        ids = rng.permutation(num_pages + 3)[: num_pages - first]
        if rng.integers(2):  # as the allocator prefers it
            ids = np.arange(num_pages - first) + rng.integers(3)
        pages = Units(Kind.PAGE, tuple(int(i) for i in ids), first, first * page_tokens, total)
        slot = Units(Kind.SLOT, (int(rng.integers(3)),), 0, start, total)
        return (pages, slot) if slotted else (pages,)

    src_units, dst_units = units(0), units(start // page_tokens)
    src = [Rank(specs, page_tokens=page_tokens, rank=r, size=tp[0], units=src_units) for r in range(tp[0])]
    dst = [Rank(specs, page_tokens=page_tokens, rank=r, size=tp[1], units=dst_units) for r in range(tp[1])]
    truth = Truth(seed)
    for rank in src:
        for f, index in rank.live(0, total):
            rank.row(f, index)[:] = truth.row(f, index)
    return Case(specs, page_tokens, src, dst, start, total, list(cuts), truth)


def rich_specs(pieces: int) -> list[StateSpec]:
    """Every growth, sharded and replicated, with rows that are and are not whole words."""
    return [
        StateSpec("kv", 0, Growth.PAGED, 64, pieces=pieces, encoding="f32"),
        StateSpec("c4", 0, Growth.PAGED, 36, tokens_per_row=4, encoding="packed"),
        StateSpec("kv", 1, Growth.PAGED, 64, pieces=pieces, encoding="f32"),
        StateSpec("c4", 1, Growth.PAGED, 36, tokens_per_row=4, encoding="packed"),
        StateSpec("window", 0, Growth.RING, 16, rows=5, pieces=pieces, encoding="bf16"),
        StateSpec("window", 1, Growth.RING, 16, rows=5, pieces=pieces, encoding="bf16"),
        StateSpec("pending", 0, Growth.SLOT, 7, rows=3, encoding="packed"),
    ]


@st.composite
def spec_lists(draw: st.DrawFn, pieces: int) -> list[StateSpec]:
    """One to four states with one or two layers each; `pieces` or 1 pieces."""
    specs = []
    for name in draw(st.sampled_from(["a", "ab", "abc", "abcd"])):
        growth = draw(st.sampled_from(list(Growth))) if specs else Growth.PAGED
        tokens_per_row = draw(st.sampled_from([1, 1, 2, 4])) if growth is Growth.PAGED else 1
        rows = draw(st.integers(1, 6)) if growth is not Growth.PAGED else 0
        count = draw(st.sampled_from([pieces, pieces, 1]))
        row_bytes = draw(st.sampled_from([1, 7, 8, 12, 24, 64]))
        for layer in range(draw(st.integers(1, 2))):
            specs.append(StateSpec(name, layer, growth, row_bytes, tokens_per_row, rows, count, "packed"))
    return specs


@st.composite
def cases(draw: st.DrawFn) -> Case:
    pieces, src, dst = draw(st.sampled_from(LEGAL_TP))
    specs = draw(spec_lists(pieces))
    page_tokens = draw(st.integers(1, 3)) * lcm(*(s.tokens_per_row for s in specs))
    total = draw(st.integers(1, 6 * page_tokens))
    start = draw(st.integers(0, (total - 1) // page_tokens)) * page_tokens
    cuts = sorted(draw(st.sets(st.integers(start, total), max_size=4)))
    seed = draw(st.integers(0, 999))
    return make_case(
        specs, page_tokens=page_tokens, tp=(src, dst), start=start, total=total, cuts=cuts, seed=seed
    )


def perform(copies: Copies, src: Rank, dst: Rank, writes: dict[Kind, np.ndarray] | None = None) -> None:
    """Move the bytes, after checking that they lie in the slabs; count each destination byte in `writes`."""
    for (src_addr, src_len, _), (dst_addr, dst_len, _) in zip(
        copies.src.tolist(), copies.dst.tolist(), strict=True
    ):
        assert src_len == dst_len > 0
        assert any(
            s.addr <= src_addr and src_addr + src_len <= s.addr + s.count * s.unit_bytes
            for s in src.card.slabs
        )
        (slab,) = (s for s in dst.card.slabs if s.addr <= dst_addr < s.addr + s.count * s.unit_bytes)
        at = dst_addr - slab.addr
        assert at + dst_len <= slab.count * slab.unit_bytes
        ctypes.memmove(dst_addr, src_addr, dst_len)
        if writes is not None:
            writes[slab.kind].reshape(-1)[at : at + dst_len] += 1
