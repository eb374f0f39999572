"""What of DeepSeek-V4's attention depends on the step only: worked out once, used by every layer.

near    which window rows each token reads: the ring alone where every sequence has one token, else the ring's rows
        of before this step followed by the step's own
far     which compressed rows each token may see: entry i of ratio r from the token that completes it on
windows which entries this step completes, and from which tokens
saves   which of the step's rows stay in the slots, and in the snapshots that are taken inside the step

A step of one token for each sequence, made for any lengths (Forward.capacity), needs no windows and no saves: the
kernel `absorb` finds them by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from splitserve.layers.forward import Forward

from . import kernels as ops


@dataclass(frozen=True)
class RopeFrequencies:
    """Inverse frequencies [rope_dim / 2] float32."""

    plain: torch.Tensor  # layers without compression
    compress: torch.Tensor  # layers with: for everything in them

    def of(self, ratio: int) -> torch.Tensor:
        return self.compress if ratio else self.plain


@dataclass(frozen=True)
class Near:
    """Flat positions of window rows: in the ring's view (`from_ring`), else in [all sequences' ring rows, new rows]."""

    index: torch.Tensor  # [T, window] int64, -1: before the first token
    from_ring: bool
    save: ops.Saves


@dataclass(frozen=True)
class Compression:
    """What layers of one ratio share in this step."""

    entry_table: ops.Table  # rope of the entries that are completed; with a capacity, of each token's window
    num_visible: torch.Tensor  # [T] int64: entries complete at each token
    places: ops.Places
    reach: ops.Reach  # the pages of the step's sequences
    visible: torch.Tensor | None  # [T, most] int64 flat positions of them all; None where the indexer chooses
    kept: Kept | None  # None with a capacity


@dataclass(frozen=True)
class Kept:
    """The windows that are completed, and what stays of the step's rows."""

    phase: torch.Tensor  # [T] int64: each token's place in its window
    windows: ops.Windows
    pending: ops.Saves
    carry: ops.Saves | None  # ratio 4


@dataclass(frozen=True)
class StepPlan:
    tables: dict[int, ops.Table]  # by ratio: rope of the step's tokens
    near: Near
    compression: Callable[[], dict[int, Compression]]  # by ratio; asked for when a layer needs it


def plan_step(
    fwd: Forward,
    ratios: Sequence[int],
    *,
    window: int,
    index_topk: int,
    rope: RopeFrequencies,
    kernels: Any = ops,
) -> StepPlan:
    """`ratios` are those that the model's layers have; `window` counts the token itself."""

    def compressions() -> dict[int, Compression]:
        reach = ops.Reach(fwd.pages)
        return {r: _plan_compression(fwd, r, index_topk, rope, reach) for r in ratios if r}

    compression = kernels.beside(len(fwd.tokens), compressions) if any(ratios) else compressions
    tables = {bool(r): ops.rope_table(fwd.positions, rope.of(r)) for r in ratios}
    return StepPlan(
        tables={r: tables[bool(r)] for r in ratios},
        near=_plan_near(fwd, window),
        compression=compression,
    )


def _plan_near(fwd: Forward, window: int) -> Near:
    device = fwd.tokens.device
    if fwd.num_decode == len(fwd.q_lens):  # the token's own row replaces the one that leaves its window
        row = torch.arange(window, device=device)
        unseen = (row > fwd.positions[:, None]) | (fwd.slots < 0)[:, None]
        index = (fwd.slots[:, None] * window + row).masked_fill(unseen, -1)
        return Near(index, True, _save_rows(fwd, window))
    # On the device: a number for each token and row takes the host longer than a layer takes a GPU.
    seq, first = _sequences(fwd.q_lens, device), fwd.q_start[:-1]
    start = fwd.positions[first][seq, None]
    key = fwd.positions[:, None] - torch.arange(window, device=device)
    new = key - start + first[seq, None] + len(fwd.q_lens) * window
    old = seq[:, None] * window + key % window
    index = torch.where(key >= start, new, old).masked_fill(key < 0, -1)
    return Near(index, False, _save_rows(fwd, window))


def _plan_compression(
    fwd: Forward, ratio: int, topk: int, rope: RopeFrequencies, reach: ops.Reach
) -> Compression:
    device = fwd.tokens.device
    most = (fwd.capacity or max(fwd.kv_lens)) // ratio
    seen = (fwd.positions + 1) // ratio
    if fwd.capacity:
        seen = seen.masked_fill(fwd.slots < 0, 0)
    one_each = len(fwd.tokens) == len(fwd.q_lens)
    places = ops.Places(
        fwd.pages, None if one_each else _sequences(fwd.q_lens, device), fwd.page_tokens // ratio
    )
    sparse = ratio == ops.CSA
    visible = None
    if not sparse or most <= topk:
        entry = torch.arange(most, device=device)
        visible = ops.locate_entries(entry.masked_fill(entry >= seen[:, None], -1), places)
    kept = None if fwd.capacity else _plan_kept(fwd, ratio)
    entries = ops.entry_positions(fwd.positions, ratio) if kept is None else kept.windows.position
    return Compression(ops.rope_table(entries, rope.compress), seen, places, reach, visible, kept)


def _plan_kept(fwd: Forward, ratio: int) -> Kept:
    windows = ops.plan_windows(
        fwd.q_lens,
        fwd.kv_lens,
        ratio=ratio,
        slots=fwd.slots,
        pages=fwd.pages,
        page_tokens=fwd.page_tokens,
    )
    carry = _save_rows(fwd, 2 * ratio) if ratio == ops.CSA else None
    return Kept(fwd.positions % ratio, windows, _save_rows(fwd, ratio), carry)


def _save_rows(fwd: Forward, rows: int) -> ops.Saves:
    """The last tokens of each sequence in a ring of `rows`."""
    if fwd.capacity:
        return ops.Saves(
            torch.arange(len(fwd.tokens), device=fwd.tokens.device), fwd.slots, fwd.positions % rows
        )
    return ops.plan_saves(fwd.q_lens, fwd.kv_lens, rows=rows, slots=fwd.slots, marks=fwd.marks)


def _sequences(q_lens: Sequence[int], device: torch.device) -> torch.Tensor:
    """[T] int64: the sequence of each token."""
    return torch.from_numpy(np.repeat(np.arange(len(q_lens)), q_lens)).to(device)
