"""A compressor: turns the tokens of each completed window into one normed and rotated entry, and keeps what is open.

Layers of ratio 4 have two, for latents and for index keys; they differ in width and in the states they use. The product
that gives a token's row is the attention's, which makes all rows of a layer in one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from splitserve.layers.forward import Forward

from . import kernels
from .plan import Compression, Kept


@dataclass(frozen=True)
class Compressor:
    gate: kernels.Gate
    state: str  # "c4", "index" or "c128": its entries; names NAME_pending and NAME_carry too
    layer: int
    dtype: torch.dtype  # of activations
    ops: Any = kernels

    @property
    def width(self) -> int:
        """Numbers of a token's row, see ops/ref/v4/compress.py."""
        return self.gate.bias.shape[1]

    def __call__(self, rows: torch.Tensor, fwd: Forward, plan: Compression) -> None:
        """[T, width] float32, without the bias: the entries that this step completes are in their pages afterwards."""
        store = self._store(fwd)
        if plan.kept is None:
            step = kernels.Singles(fwd.positions, fwd.slots, fwd.pages, fwd.page_tokens)
            self.ops.absorb(rows, self.gate, store, step, table=plan.entry_table, dtype=self.dtype)
            return
        rows = rows + self.gate.bias.index_select(0, plan.kept.phase)
        windows = plan.kept.windows
        pooled = self.ops.pool_windows(rows, store.pending, store.carry, windows) if len(windows) else None
        self._save(rows, store, plan.kept)
        if pooled is not None:
            self._write(pooled.to(self.dtype), store, plan.entry_table, windows)

    def _store(self, fwd: Forward) -> kernels.Store:
        def view(name: str) -> torch.Tensor:
            return fwd.states.view(name, self.layer).select(1, 0)

        carry = view(f"{self.state}_carry") if self.gate.ratio == kernels.CSA else None
        return kernels.Store(view(f"{self.state}_pending"), carry, view(self.state), self.state == "index")

    def _save(self, rows: torch.Tensor, store: kernels.Store, kept: Kept) -> None:
        wide = store.pending.shape[-1]
        save = kept.pending
        self.ops.write_rows(store.pending, save.of(rows[:, -wide:]), save.slot, save.row)
        if store.carry is not None and kept.carry is not None:
            save = kept.carry
            self.ops.write_rows(store.carry, save.of(rows[:, :wide]), save.slot, save.row)

    def _write(
        self, pooled: torch.Tensor, store: kernels.Store, table: kernels.Table, windows: kernels.Windows
    ) -> None:
        entries = self.ops.rms_norm_rotate(pooled.unsqueeze(1), self.gate.norm, self.gate.eps, table).squeeze(
            1
        )
        page, row = windows.page, windows.row
        if store.keys:
            self.ops.write_keys(store.entries, entries, page, row)
        else:
            rope_dim = 2 * table[0].shape[-1]
            self.ops.write_latents(store.entries, entries, page, row, rope_dim=rope_dim)


def bias_rows(
    ape: torch.Tensor,  # [ratio, halves * w] float32, as in the file
    halves: int,
) -> torch.Tensor:  # [ratio, halves * 2 * w]: for each half, zeros under kv and the bias under score
    parts = ape.unflatten(1, (halves, -1))
    return torch.cat((torch.zeros_like(parts), parts), dim=-1).flatten(1)
