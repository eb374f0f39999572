"""Attention of few tokens, and the indexer's ratings: twins of ops/ref/v4/sparse.py and indexer.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from splitserve.ops.cpu.llvm import LANES
from splitserve.ops.ref.v4 import indexer as ref_indexer
from splitserve.ops.ref.v4 import sparse as ref
from splitserve.ops.ref.v4.sparse import Rows

from . import gathered
from .quant import few

_NOTHING = (0, 0, 0, 1, 0, 0)


def attend(
    q: torch.Tensor,  # [T, heads, head_dim] float32
    near: Rows,
    far: Rows | None,
    sink: torch.Tensor,  # [heads] float32
    *,
    scale: float,
    rope_dim: int,
) -> torch.Tensor:  # [T, heads, head_dim]
    if not few(q, q.shape[-1]) or not all(_plain(s.view) for s in (near, far or near)):
        return ref.attend(q, near, far, sink, scale=scale, rope_dim=rope_dim)
    q = q.contiguous()
    out = torch.empty_like(q)
    near_lists, far_lists = near.index.contiguous(), (far or near).index.contiguous()
    sources = (
        _source(near.view, near_lists),
        _NOTHING if far is None else _source(far.view, far_lists),
    )
    gathered.attend(q.data_ptr(), *q.shape, *sources, sink.data_ptr(), scale, out.data_ptr())
    return out


def index_scores(
    q: torch.Tensor,  # [T, heads, index_dim] float32
    weights: torch.Tensor,  # [T, heads] float32, scaled
    view: torch.Tensor,  # [num_pages, rows_per_page, width]: index keys, any strides
    pages: torch.Tensor,  # [num_seqs, max_pages] int64
    num_visible: torch.Tensor,  # [T] int64
    *,
    q_lens: Sequence[int],  # tokens of each sequence in q, in order
) -> torch.Tensor:  # [T, max entries] float32, -inf where not visible
    if len(q_lens) != len(q) or q.shape[-1] % LANES or not _plain(view):
        return ref_indexer.index_scores(q, weights, view, pages, num_visible, q_lens=q_lens)
    longest = int(num_visible.max())
    out = torch.full((len(q), longest), -torch.inf)
    q, weights, pages, seen = (t.contiguous() for t in (q, weights, pages, num_visible))
    gathered.rate(
        q.data_ptr(),
        *q.shape,
        weights.data_ptr(),
        view.data_ptr(),
        *view.stride()[:2],
        view.shape[1],
        pages.data_ptr(),
        pages.stride(0),
        seen.data_ptr(),
        out.data_ptr(),
        longest,
    )
    return out


def _plain(view: torch.Tensor) -> bool:
    """Whether rows are numbers that loops read as they lie."""
    return view.dtype == torch.float32 and view.stride(-1) == 1


def _source(view: torch.Tensor, lists: torch.Tensor) -> tuple[int, ...]:
    """See gathered.attend."""
    return view.data_ptr(), *view.stride()[:2], view.shape[1], lists.data_ptr(), lists.shape[1]
