"""The indexer of a ratio-4 layer: which compressed rows each token reads, where there are more than it may."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from splitserve.layers.forward import Forward

from . import kernels as ops
from .compressor import Compressor
from .plan import Compression


@dataclass(frozen=True)
class Indexer:
    """Whole on every rank: all must choose alike."""

    q_b: ops.Weight  # [heads * index_dim, q_lora]
    weights: torch.Tensor  # [heads, hidden]
    compressor: Compressor
    heads: int
    topk: int

    def __call__(
        self,
        x: torch.Tensor,  # [T, hidden]
        q_latent: torch.Tensor,  # [T, q_lora]
        table: ops.Table,
        fwd: Forward,
        plan: Compression,
    ) -> torch.Tensor:  # [T, K] int64: flat positions in "c4", -1 for none
        """Keys of completed entries are kept in any case; rating them is skipped where a token may read all."""
        view = fwd.states.view("index", self.compressor.layer)[:, 0]
        keys = self.compressor(x, fwd, plan)
        if len(keys):
            ops.write_rows(view, ops.encode_keys(keys, view), plan.windows.page, plan.windows.row)
        if plan.visible is not None:
            return plan.visible
        q = ops.rotate_tail(ops.linear(q_latent, self.q_b).unflatten(-1, (self.heads, -1)), table)
        weights = ops.linear_f32(x, self.weights) * (q.shape[-1] * self.heads) ** -0.5
        scores = ops.index_scores(q, weights, view, fwd.pages, plan.num_visible, q_lens=fwd.q_lens)
        return plan.locate(ops.choose_entries(scores, self.topk), fwd)
