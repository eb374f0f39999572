"""What of DeepSeek-V4's attention depends on the step only: worked out once, used by every layer.

near    which window rows each token reads: the ring alone where every sequence has one token, else the ring's rows
        of before this step followed by the step's own
far     which compressed rows each token may see: entry i of ratio r from the token that completes it on
windows which entries this step completes, and from which tokens
saves   which of the step's rows stay in the slots, and in the snapshots that are taken inside the step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    windows: ops.Windows
    entry_table: ops.Table  # rope of the entries that are completed
    save_pending: ops.Saves
    save_carry: ops.Saves | None  # ratio 4
    num_visible: torch.Tensor  # [T] int64: entries complete at each token
    longest: int  # its maximum, on the host
    visible: (
        torch.Tensor | None
    )  # [T, longest] int64 flat positions of them all; None where the indexer chooses

    def locate(self, entries: torch.Tensor, fwd: Forward) -> torch.Tensor:
        """[T, K] entries of each token's sequence (-1: none) -> flat positions in a view of pages."""
        return _flat(entries, fwd, self.windows.ratio, _sequences(fwd.q_lens, fwd.tokens.device))


@dataclass(frozen=True)
class StepPlan:
    tables: dict[int, ops.Table]  # by ratio: rope of the step's tokens
    near: Near
    compression: dict[int, Compression]  # by ratio


def plan_step(
    fwd: Forward, ratios: Sequence[int], *, window: int, index_topk: int, rope: RopeFrequencies
) -> StepPlan:
    """`ratios` are those that the model's layers have; `window` counts the token itself."""
    tables = {bool(r): ops.rope_table(fwd.positions, rope.of(r)) for r in ratios}
    return StepPlan(
        tables={r: tables[bool(r)] for r in ratios},
        near=_plan_near(fwd, window),
        compression={r: _plan_compression(fwd, r, index_topk, rope) for r in ratios if r},
    )


def _plan_near(fwd: Forward, window: int) -> Near:
    device = fwd.tokens.device
    save = ops.plan_saves(fwd.q_lens, fwd.kv_lens, rows=window, slots=fwd.slots, marks=fwd.marks)
    if fwd.num_decode == len(fwd.q_lens):  # the token's own row replaces the one that leaves its window
        row = torch.arange(window, device=device)
        index = (fwd.slots[:, None] * window + row).masked_fill(row > fwd.positions[:, None], -1)
        return Near(index, True, save)
    lens, stops = np.asarray(fwd.q_lens), np.asarray(fwd.kv_lens)
    seq = np.repeat(np.arange(len(lens)), lens)
    starts = stops - lens
    position = np.arange(lens.sum()) - (np.cumsum(lens) - lens - starts)[seq]
    key = position[:, None] - np.arange(window)
    new = key - starts[seq, None] + (np.cumsum(lens) - lens)[seq, None] + len(lens) * window
    old = seq[:, None] * window + key % window
    either = np.where(key < 0, -1, np.where(key >= starts[seq, None], new, old))
    return Near(torch.from_numpy(either).to(device), False, save)


def _plan_compression(fwd: Forward, ratio: int, topk: int, rope: RopeFrequencies) -> Compression:
    windows = ops.plan_windows(
        fwd.q_lens,
        fwd.kv_lens,
        ratio=ratio,
        slots=fwd.slots,
        pages=fwd.pages,
        page_tokens=fwd.page_tokens,
    )
    longest = max(fwd.kv_lens) // ratio
    num_visible = (fwd.positions + 1) // ratio
    sparse = ratio == ops.CSA
    visible = None
    if not sparse or longest <= topk:
        entry = torch.arange(longest, device=fwd.tokens.device)
        entries = entry.masked_fill(entry >= num_visible[:, None], -1)
        visible = _flat(entries, fwd, ratio, _sequences(fwd.q_lens, fwd.tokens.device))

    def saves(rows: int) -> ops.Saves:
        return ops.plan_saves(fwd.q_lens, fwd.kv_lens, rows=rows, slots=fwd.slots, marks=fwd.marks)

    return Compression(
        windows=windows,
        entry_table=ops.rope_table(windows.position, rope.compress),
        save_pending=saves(ratio),
        save_carry=saves(2 * ratio) if sparse else None,
        num_visible=num_visible,
        longest=longest,
        visible=visible,
    )


def _sequences(q_lens: Sequence[int], device: torch.device) -> torch.Tensor:
    """[T] int64: the sequence of each token."""
    return torch.from_numpy(np.repeat(np.arange(len(q_lens)), q_lens)).to(device)


def _flat(entries: torch.Tensor, fwd: Forward, ratio: int, seq: torch.Tensor) -> torch.Tensor:
    per_page = fwd.page_tokens // ratio
    at = entries.clamp(min=0)
    flat = fwd.pages[seq[:, None], at // per_page] * per_page + at % per_page
    return flat.masked_fill_(entries < 0, -1)
