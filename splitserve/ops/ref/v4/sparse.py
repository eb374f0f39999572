"""Attention of DeepSeek-V4: each token reads a list of rows near it and a list of compressed rows, under one softmax.

    near   the window: rows of the ring, or of the ring and this step, one list for each token
    far    compressed rows in pages: all that are complete, or those that the indexer chose

All heads read the same latents, each as key and as value. Lists hold flat positions in a view (see rows.py), -1 for
none; order is without meaning. A sink is a logit for each head that takes its share of the softmax and gives nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .rows import decode_latents, take_rows

_STRETCH = 1 << 22  # numbers of gathered latents at once: 16 MB


class Reach:
    """Units of a view that the lists of a pass may point into, for all its layers."""

    def __init__(self, ids: torch.Tensor) -> None:
        """`ids` are int64, of any shape, and may repeat."""
        self.ids = ids.reshape(-1)
        self._places: torch.Tensor | None = None

    def places(self, count: int) -> torch.Tensor:
        """[count] int32: of each unit that is among `ids` a place where it is. Views of a pass have one `count`."""
        if self._places is None:
            self._places = torch.empty(count, dtype=torch.int32, device=self.ids.device)
            at = torch.arange(len(self.ids), dtype=torch.int32, device=self.ids.device)
            self._places.scatter_(0, self.ids, at)
        return self._places


@dataclass(frozen=True)
class Rows:
    view: torch.Tensor  # [units, rows_per_unit, width], any strides; bytes where packed
    index: torch.Tensor  # [T, K] int64, flat; -1: none
    reach: Reach | None = None  # the units that lists may point into; None: any


def attend(
    q: torch.Tensor,  # [T, heads, head_dim]
    near: Rows,
    far: Rows | None,
    sink: torch.Tensor,  # [heads] float32: a logit as it enters the softmax, not scaled
    *,
    scale: float,
    rope_dim: int,
    out: torch.Tensor | None = None,  # like q: where the result is to be
) -> torch.Tensor:  # [T, heads, head_dim] in q's dtype; sums in float32
    sources = (near,) if far is None else (near, far)
    num_keys = sum(s.index.shape[1] for s in sources)
    step = max(1, _STRETCH // (num_keys * q.shape[-1]))
    parts = [
        _attend(
            q[i : i + step], [Rows(s.view, s.index[i : i + step]) for s in sources], sink, scale, rope_dim
        )
        for i in range(0, len(q), step)
    ]
    found = parts[0] if len(parts) == 1 else torch.cat(parts)
    return found if out is None else out.copy_(found)


def _attend(
    q: torch.Tensor, sources: list[Rows], sink: torch.Tensor, scale: float, rope_dim: int
) -> torch.Tensor:
    rows = [decode_latents(take_rows(s.view, s.index), rope_dim, q.shape[-1]) for s in sources]
    latents = torch.cat(rows, dim=1)  # [T, K, head_dim]
    nothing = torch.cat([s.index for s in sources], dim=1)[:, None] < 0
    logits = torch.bmm(q.float() * scale, latents.transpose(1, 2)).masked_fill_(nothing, -torch.inf)
    top = torch.maximum(logits.amax(-1), sink)[..., None]
    weights = (logits - top).exp_()
    total = weights.sum(-1, keepdim=True) + (sink[:, None] - top).exp()
    return (torch.bmm(weights, latents) / total).to(q.dtype)
