"""The indexer of a ratio-4 layer: which compressed rows each token reads, where there are more than it may."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from splitserve.layers.forward import Forward

from . import kernels
from .compressor import Compressor
from .plan import Compression


@dataclass(frozen=True)
class Indexer:
    """Whole on every rank: all must choose alike."""

    q_b: kernels.Weight  # [heads * index_dim, q_lora]
    compressor: Compressor
    heads: int
    topk: int
    ops: Any = kernels

    def query(self, q_latent: torch.Tensor, table: kernels.Table, plan: Compression) -> torch.Tensor | None:
        """[T, q_lora] -> [T, heads, index_dim]; None where a token may read all entries, and nothing is rated."""
        if plan.visible is not None:
            return None
        q = self.ops.linear(q_latent, self.q_b).view(q_latent.shape[0], self.heads, -1)
        turned: torch.Tensor = self.ops.rotate_tail(q, table)
        return turned

    def __call__(
        self,
        q: torch.Tensor | None,  # of `query`
        weights: torch.Tensor,  # [T, heads] float32: how much each head counts
        fwd: Forward,
        plan: Compression,
    ) -> torch.Tensor:  # [T, K] int64: flat positions in "c4", -1 for none
        """Keys of this step's entries are in their pages already."""
        if q is None:
            assert plan.visible is not None
            return plan.visible
        view = fwd.states.view("index", self.compressor.layer).select(1, 0)
        scores = self.ops.index_scores(
            q, weights, view, fwd.pages, plan.num_visible,
            q_lens=fwd.q_lens, scale=(q.shape[-1] * self.heads) ** -0.5,
        )  # fmt: skip
        chosen: torch.Tensor = self.ops.choose_located(scores, self.topk, plan.places, plan.num_visible)
        return chosen
