"""Attention of one layer: a window of latents, and compressed latents where the layer has them, under one softmax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from splitserve.layers.forward import Cut, Forward

from . import kernels
from .compressor import Compressor
from .indexer import Indexer
from .plan import Near, StepPlan

Made = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Queries [T, heads, head_dim], latents [T, head_dim], the queries' latents [T, q_lora], rows for the compressors."""


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
        ops, tokens = self.ops, x.shape[0]
        head_weights = ops.beside(tokens, lambda: self._compress(self._rows(x), fwd, plan))
        q_latent, kv = self._down(x)
        rating = ops.beside(tokens, lambda: self._rating(q_latent, plan), lane=1)
        far = ops.beside(tokens, lambda: self._chosen(head_weights(), rating(), fwd, plan))
        q, kv = self._up(q_latent, kv, lambda: plan().tables[self.ratio])
        near = self._window(kv, fwd, plan().near)
        return self._leave(self._attend(q, near, far(), plan))

    def trunk(self, x: torch.Tensor, table: kernels.Table, cut: Cut) -> torch.Tensor:
        """As a call; state, and what depends on more than the number of tokens, is left to `cut`."""
        return self._leave(cut(self._made(x, table), self._over))

    def _made(self, x: torch.Tensor, table: kernels.Table) -> Made:
        q_latent, kv = self._down(x)
        return (*self._up(q_latent, kv, lambda: table), q_latent, self._rows(x))

    def _over(
        self, made: Made, fwd: Forward, plan: Callable[[], StepPlan], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Keep what `_made` gave and attend: [T, heads, head_dim], in `out` where it is given."""
        q, kv, q_latent, rows = made
        far = self._chosen(self._compress(rows, fwd, plan), self._rating(q_latent, plan), fwd, plan)
        return self._attend(q, self._window(kv, fwd, plan().near), far, plan, out)

    def _rows(self, x: torch.Tensor) -> torch.Tensor | None:
        """What the compressors read, and how much each head of the indexer counts: [T, ...] float32."""
        return None if self.rows is None else self.ops.linear_f32(x, self.rows)

    def _down(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, q_lora] and [T, head_dim]: the queries' latent, normed, and the keys'."""
        both, lora = self.ops.linear_parts(x, self.qkv_a), self.q_norm.shape[0]
        return self.ops.rms_norm(both[:, :lora], self.q_norm, self.eps), both[:, lora:]

    def _up(
        self, q_latent: torch.Tensor, kv: torch.Tensor, table: Callable[[], kernels.Table]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, heads, head_dim] and [T, head_dim], normed and turned; `table` is asked for behind the product."""
        ops, tokens = self.ops, len(q_latent)
        q = ops.linear(q_latent, self.q_b).view(tokens, self.sink.shape[0], self.kv_norm.shape[0])
        q = ops.rms_norm_rotate(q, None, self.eps, table())
        return q, ops.rms_norm_rotate(kv.unsqueeze(1), self.kv_norm, self.eps, table()).squeeze(1)

    def _attend(
        self,
        q: torch.Tensor,
        near: kernels.Rows,
        far: kernels.Rows | None,
        plan: Callable[[], StepPlan],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        found: torch.Tensor = self.ops.attend(
            q, near, far, self.sink,
            scale=q.shape[-1] ** -0.5, rope_dim=self.rope_dim, turn_back=plan().tables[self.ratio], out=out,
        )  # fmt: skip
        return found

    def _leave(self, out: torch.Tensor) -> torch.Tensor:
        mixed = self.ops.grouped_linear(out.reshape(len(out), self.groups, -1), self.out_a)
        part: torch.Tensor = self.ops.linear_parts(mixed, self.out_b)
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

    def _compress(
        self, rows: torch.Tensor | None, fwd: Forward, plan: Callable[[], StepPlan]
    ) -> torch.Tensor | None:
        """Complete and keep this step's entries. The rest of the rows is the indexer's: how much each head counts."""
        if self.compressor is None or rows is None:
            return None
        compression = plan().compression()[self.ratio]
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
        entries = fwd.states.view(self.compressor.state, self.layer).select(1, 0)
        return kernels.Rows(entries, chosen, compression.reach)
