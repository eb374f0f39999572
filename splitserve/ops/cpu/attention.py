"""Paged attention on a CPU, in float32, over the pages where they lie: twin of ops/ref/attention.py.

A chunk and a token by itself go through the same loop, and a query sees its own keys only in their own order: so the
numbers of a token are the same bits whether its text came whole, in chunks or token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import elementwise, shared


@dataclass(frozen=True)
class DecodePlan:
    """One-token sequences, or the only sequence of a chunk."""

    num_seqs: int
    pages: torch.Tensor  # [num_seqs, max_pages] int64
    starts: torch.Tensor  # [num_seqs] int64: position of the sequence's first query
    counts: torch.Tensor  # [num_seqs] int64: its queries
    page_tokens: int
    window: int


@dataclass(frozen=True)
class PrefillPlan:
    rows: slice  # of the step's tokens
    chunk: DecodePlan


def write_rows(
    view: torch.Tensor,  # [num_pages, kv_heads, page_tokens, 2 * head_dim]
    k: torch.Tensor,  # [num_tokens, kv_heads, head_dim]
    v: torch.Tensor,  # [num_tokens, kv_heads, head_dim]
    page: torch.Tensor,  # [num_tokens] int64
    row: torch.Tensor,  # [num_tokens] int64
) -> None:
    page_stride, head_stride, row_stride, _ = view.stride()
    elementwise.write_rows(
        view.data_ptr(),
        page_stride,
        head_stride,
        row_stride,
        k.data_ptr(),
        k.stride(0),
        k.stride(1),
        v.data_ptr(),
        v.stride(0),
        v.stride(1),
        page.data_ptr(),
        row.data_ptr(),
        tuple(k.shape),
    )


def plan_decode(
    pages: torch.Tensor,  # [num_seqs, max_pages] int64, rows padded with anything
    kv_lens: Sequence[int],  # of each sequence, this step's token included
    page_tokens: int,
    window: int = 0,
) -> DecodePlan:
    lens = torch.tensor(kv_lens, dtype=torch.int64)
    return DecodePlan(len(kv_lens), pages, lens - 1, torch.ones_like(lens), page_tokens, window)


def attend_decode(
    q: torch.Tensor,  # [num_seqs, num_heads, head_dim]
    view: torch.Tensor,  # [num_pages, kv_heads, page_tokens, 2 * head_dim]
    plan: DecodePlan,
    scale: float,
) -> torch.Tensor:  # [num_seqs, num_heads, head_dim]
    tokens, heads, size = q.shape
    kv_heads = view.shape[1]
    out = torch.empty(tokens, heads, size)
    shared.attend(
        q.data_ptr(),
        q.stride(0),
        q.stride(1),
        view.data_ptr(),
        view.stride()[:3],
        plan.pages.data_ptr(),
        plan.pages.stride(0),
        plan.starts.data_ptr(),
        plan.counts.data_ptr(),
        (plan.num_seqs, kv_heads, heads // kv_heads, size, plan.page_tokens),
        plan.window,
        scale,
        out.data_ptr(),
        queries=tokens,
    )
    return out


def plan_prefill(
    pages: torch.Tensor,  # [max_pages] int64: of this sequence
    kv_len: int,
    rows: slice,
    page_tokens: int,
    window: int = 0,
) -> PrefillPlan:
    """For a chunk that ends at token kv_len of its sequence."""
    count = rows.stop - rows.start
    starts, counts = torch.tensor([[kv_len - count], [count]])
    return PrefillPlan(rows, DecodePlan(1, pages[None], starts, counts, page_tokens, window))


def attend_prefill(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim]: of this chunk
    view: torch.Tensor,  # [num_pages, kv_heads, page_tokens, 2 * head_dim]
    plan: PrefillPlan,
    scale: float,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    return attend_decode(q, view, plan.chunk, scale)
