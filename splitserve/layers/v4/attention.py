"""Attention of one layer: a window of latents, and compressed latents where the layer has them, under one softmax."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from splitserve.layers.forward import Forward, Group

from . import kernels as ops
from .compressor import Compressor
from .indexer import Indexer
from .plan import Near, StepPlan


@dataclass(frozen=True)
class Attention:
    """This rank's heads and output groups. The latent, one for all heads, is the same on every rank."""

    qkv_a: ops.Weight  # [q_lora + head_dim, hidden]
    q_norm: torch.Tensor
    q_b: ops.Weight  # [heads * head_dim, q_lora]
    kv_norm: torch.Tensor
    sink: torch.Tensor  # [heads] float32
    out_a: ops.Weight  # [groups * out_lora, heads / groups * head_dim]
    out_b: ops.Weight  # [hidden, groups * out_lora]
    groups: int
    compressor: Compressor | None
    indexer: Indexer | None  # ratio 4
    ratio: int
    rope_dim: int
    eps: float
    layer: int
    tp: Group

    def __call__(self, x: torch.Tensor, fwd: Forward, plan: StepPlan) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        table, heads, d = plan.tables[self.ratio], len(self.sink), len(self.kv_norm)
        q_latent, kv = ops.linear(x, self.qkv_a).split((len(self.q_norm), d), dim=-1)
        q_latent = ops.rms_norm(q_latent, self.q_norm, self.eps)
        q = ops.rms_norm(ops.linear(q_latent, self.q_b).unflatten(-1, (heads, d)), None, self.eps)
        q = ops.rotate_tail(q, table)
        kv = ops.rotate_tail(ops.rms_norm(kv, self.kv_norm, self.eps)[:, None], table)[:, 0]
        far = self._compressed(x, q_latent, table, fwd, plan)
        near = self._window(kv, fwd, plan.near)
        out = ops.attend(q, near, far, self.sink, scale=d**-0.5, rope_dim=self.rope_dim)
        out = ops.rotate_tail(out, table, inverse=True)  # values carry their key's angle: make it relative
        mixed = ops.grouped_linear(
            out.flatten(1).unflatten(1, (self.groups, -1)), ops.dequantise(self.out_a, x.dtype)
        )
        return self.tp.all_reduce(ops.linear(mixed, self.out_b))

    def _window(self, kv: torch.Tensor, fwd: Forward, near: Near) -> ops.Rows:
        """Keep the new latents; what the tokens read of the window."""
        ring = fwd.states.view("window", self.layer)[:, 0]
        rows = ops.encode_latents(kv, self.rope_dim, ring)
        if near.from_ring:
            kept = rows[near.save.token] if fwd.marks else rows
            ops.write_rows(ring, kept, near.save.slot, near.save.row)
            return ops.Rows(ring, near.index)
        both = torch.cat((ring[fwd.slots].flatten(0, 1), rows))  # a copy: saving overwrites what is read
        ops.write_rows(ring, rows[near.save.token], near.save.slot, near.save.row)
        return ops.Rows(both[None], near.index)

    def _compressed(
        self, x: torch.Tensor, q_latent: torch.Tensor, table: ops.Table, fwd: Forward, plan: StepPlan
    ) -> ops.Rows | None:
        """Complete and keep this step's entries; which entries the tokens read."""
        if self.compressor is None:
            return None
        compression = plan.compression[self.ratio]
        view = fwd.states.view(self.compressor.state, self.layer)[:, 0]
        entries = self.compressor(x, fwd, compression)
        if len(entries):
            rows = ops.encode_latents(entries, self.rope_dim, view)
            ops.write_rows(view, rows, compression.windows.page, compression.windows.row)
        chosen = compression.visible
        if self.indexer is not None:
            chosen = self.indexer(x, q_latent, table, fwd, compression)
        return ops.Rows(view, chosen) if chosen is not None and chosen.shape[1] else None
