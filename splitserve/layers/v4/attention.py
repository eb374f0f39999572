"""Attention of one layer: a window of latents, and compressed latents where the layer has them, under one softmax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from splitserve.layers.forward import Forward

from . import kernels
from .compressor import Compressor
from .indexer import Indexer
from .plan import Near, StepPlan


@dataclass(frozen=True)
class Attention:
    """This rank's heads and output groups. The latent, one for all heads, is the same on every rank."""

    qkv_a: kernels.Weight  # [q_lora + head_dim, hidden]
    q_norm: torch.Tensor
    q_b: kernels.Weight  # [heads * head_dim, q_lora]
    kv_norm: torch.Tensor
    sink: torch.Tensor  # [heads] float32
    out_a: kernels.Weight  # [groups * out_lora, heads / groups * head_dim]
    out_b: kernels.Weight  # [hidden, groups * out_lora]
    groups: int
    rows: (
        torch.Tensor | None
    )  # [compressor's row + index compressor's + index heads, hidden], as far as they are there
    compressor: Compressor | None
    indexer: Indexer | None  # ratio 4
    ratio: int
    rope_dim: int
    eps: float
    layer: int
    ops: Any = kernels

    def __call__(self, x: torch.Tensor, fwd: Forward, plan: Callable[[], StepPlan]) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]: this rank's part of the sum."""
        ops, tokens, lora = self.ops, x.shape[0], self.q_norm.shape[0]
        heads, d = self.sink.shape[0], self.kv_norm.shape[0]
        rows = ops.beside(tokens, lambda: self._compress(x, fwd, plan))
        both = ops.linear(x, self.qkv_a)
        q_latent, kv = ops.rms_norm(both[:, :lora], self.q_norm, self.eps), both[:, lora:]

        rating = ops.beside(tokens, lambda: self._rating(q_latent, plan), lane=1)
        far = ops.beside(tokens, lambda: self._chosen(rows(), rating(), fwd, plan))
        q = ops.linear(q_latent, self.q_b).view(tokens, heads, d)
        table = plan().tables[self.ratio]
        q = ops.rms_norm_rotate(q, None, self.eps, table)
        kv = ops.rms_norm_rotate(kv.unsqueeze(1), self.kv_norm, self.eps, table).squeeze(1)
        near = self._window(kv, fwd, plan().near)
        out = ops.attend(q, near, far(), self.sink, scale=d**-0.5, rope_dim=self.rope_dim, turn_back=table)
        mixed = ops.grouped_linear(out.reshape(tokens, self.groups, -1), self.out_a)
        part: torch.Tensor = ops.linear(mixed, self.out_b)
        return part

    def _rating(self, q_latent: torch.Tensor, plan: Callable[[], StepPlan]) -> torch.Tensor | None:
        """What entries are rated with, where they are."""
        if self.indexer is None:
            return None
        step = plan()
        return self.indexer.query(q_latent, step.tables[self.ratio], step.compression()[self.ratio])

    def _window(self, kv: torch.Tensor, fwd: Forward, near: Near) -> kernels.Rows:
        """Keep the new latents; what the tokens read of the window."""
        ops, save = self.ops, near.save
        ring = fwd.states.view("window", self.layer).select(1, 0)
        if near.from_ring:
            kept = kv[save.token] if fwd.marks else kv
            ops.write_latents(ring, kept, save.slot, save.row, rope_dim=self.rope_dim)
            return kernels.Rows(ring, near.index)
        rows = ops.encode_latents(kv, self.rope_dim, ring)
        old = ring.index_select(0, fwd.slots).flatten(0, 1)  # a copy: saving overwrites what is read
        both = torch.cat((old, rows))
        ops.write_rows(ring, rows.index_select(0, save.token), save.slot, save.row)
        return kernels.Rows(both.unsqueeze(0), near.index)

    def _compress(self, x: torch.Tensor, fwd: Forward, plan: Callable[[], StepPlan]) -> torch.Tensor | None:
        """Complete and keep this step's entries. The rest of the rows is the indexer's: how much each head counts."""
        if self.compressor is None or self.rows is None:
            return None
        compression = plan().compression()[self.ratio]
        rows = self.ops.linear_f32(x, self.rows)
        mine = self.compressor.width
        self.compressor(rows[:, :mine], fwd, compression)
        if self.indexer is None:
            return rows[:, mine:]
        keys = self.indexer.compressor
        keys(rows[:, mine : mine + keys.width], fwd, compression)
        return rows[:, mine + keys.width :]

    def _chosen(
        self,
        head_weights: torch.Tensor | None,
        rating: torch.Tensor | None,
        fwd: Forward,
        plan: Callable[[], StepPlan],
    ) -> kernels.Rows | None:
        """Which entries the tokens read."""
        if self.compressor is None or head_weights is None:
            return None
        compression = plan().compression()[self.ratio]
        chosen = compression.visible
        if self.indexer is not None:
            chosen = self.indexer(rating, head_weights, fwd, compression)
        if chosen is None or not chosen.shape[1]:
            return None
        return kernels.Rows(fwd.states.view(self.compressor.state, self.layer).select(1, 0), chosen)
