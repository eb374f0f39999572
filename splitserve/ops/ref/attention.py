"""Paged attention, with grouped heads and an optional sliding window.

    view [num_pages, kv_heads, page_tokens, 2 * head_dim]: this rank's rows of one layer, key then value, any strides

What depends on the step only is worked out once (`plan_*`) and used by every layer (`attend_*`). Decoding sequences
are one batch without padding: a softmax for each page, then pages of a sequence are joined by their maxima and sums. No
result depends on which other sequences are in the batch. Softmax is in float32. Rows past a sequence's end may hold
anything, NaN included, and count for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

_NEVER = -1e30  # finite, so that a page with no visible row gives weight 0 and not NaN


@dataclass(frozen=True)
class DecodePlan:
    """The visible pages of all one-token sequences, end to end."""

    num_seqs: int
    page: torch.Tensor  # [n] int64: page unit
    seq: torch.Tensor  # [n] int64: whose it is
    bias: torch.Tensor  # [n, 1, 1, page_tokens] float32: 0 where visible, _NEVER elsewhere
    beyond: tuple[torch.Tensor, torch.Tensor]  # (index into page, row) of rows that were never written


@dataclass(frozen=True)
class PrefillPlan:
    """The visible pages of one sequence's chunk."""

    rows: slice  # of the step's tokens
    page: torch.Tensor  # [n] int64
    num_keys: int  # rows of these pages that exist; keys after them are garbage
    visible: torch.Tensor | None  # [num_tokens, num_keys] bool; None: causal from the first key


def write_rows(
    view: torch.Tensor,  # [num_pages, kv_heads, page_tokens, 2 * head_dim]
    k: torch.Tensor,  # [num_tokens, kv_heads, head_dim]
    v: torch.Tensor,  # [num_tokens, kv_heads, head_dim]
    page: torch.Tensor,  # [num_tokens] int64; -1: not kept
    row: torch.Tensor,  # [num_tokens] int64
) -> None:
    """Put each token's key and value where its page says. (page, row) pairs must differ."""
    kept = page >= 0
    if not kept.all():
        k, v, page, row = k[kept], v[kept], page[kept], row[kept]
    view[page, :, row] = torch.cat((k, v), dim=-1).to(view.dtype)


def plan_decode(
    pages: torch.Tensor,  # [num_seqs, max_pages] int64, rows padded with anything
    kv_lens: Sequence[int],  # of each sequence, this step's token included
    page_tokens: int,
    window: int = 0,
) -> DecodePlan:
    lens = torch.tensor(kv_lens, dtype=torch.int64, device=pages.device)
    first = (lens - window).clamp(min=0) if window else torch.zeros_like(lens)  # oldest visible token
    index = torch.arange(pages.shape[1], device=pages.device)
    used = (index < ((lens + page_tokens - 1) // page_tokens)[:, None]) & (
        index >= (first // page_tokens)[:, None]
    )
    seq, column = used.nonzero(as_tuple=True)
    token = column[:, None] * page_tokens + torch.arange(page_tokens, device=pages.device)
    visible = (token < lens[seq, None]) & (token >= first[seq, None])
    bias = torch.zeros(visible.shape, device=pages.device).masked_fill(~visible, _NEVER)
    index_of, row = (token >= lens[seq, None]).nonzero(as_tuple=True)
    return DecodePlan(len(kv_lens), pages[seq, column], seq, bias[:, None, None], (index_of, row))


def plan_decode_any(
    pages: torch.Tensor,  # [num_seqs, max_pages] int64
    lens: torch.Tensor,  # [num_seqs] int64: of each sequence, on the device; 0 for nobody's place
    longest: int,  # noqa: ARG001 - that any of them may be: what a twin sizes its grid by
    page_tokens: int,
    window: int = 0,
) -> DecodePlan:
    """plan_decode where the host does not know the lengths. This one reads them back; a twin must not."""
    return plan_decode(pages, lens.tolist(), page_tokens, window)


def attend_decode(
    q: torch.Tensor,  # [num_seqs, num_heads, head_dim]
    view: torch.Tensor,  # [num_pages, kv_heads, page_tokens, 2 * head_dim]
    plan: DecodePlan,
    scale: float,
) -> torch.Tensor:  # [num_seqs, num_heads, head_dim]
    kv_heads, head_dim = view.shape[1], q.shape[-1]
    kv = view.index_select(0, plan.page).float()
    kv[plan.beyond[0], :, plan.beyond[1]] = 0.0  # weight 0 times NaN would be NaN
    keys, values = kv.split(head_dim, dim=-1)
    # [n, kv_heads, group, head_dim] @ [n, kv_heads, head_dim, page_tokens]
    grouped = (q.float() * scale).unflatten(1, (kv_heads, -1))
    scores = grouped.index_select(0, plan.seq) @ keys.transpose(-1, -2) + plan.bias
    shape = grouped.shape[:3]
    top = scores.amax(-1)
    best = top.new_full(shape, _NEVER).scatter_reduce_(0, _like(plan.seq, top), top, "amax")
    weights = (scores - best.index_select(0, plan.seq).unsqueeze(-1)).exp_()
    total = top.new_zeros(shape).index_add_(0, plan.seq, weights.sum(-1))
    mixed = torch.zeros_like(grouped).index_add_(0, plan.seq, weights @ values)
    return (mixed / total.unsqueeze(-1)).flatten(1, 2).to(q.dtype)


def _like(seq: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return seq[:, None, None].expand_as(x)


def plan_prefill(
    pages: torch.Tensor,  # [max_pages] int64: of this sequence
    kv_len: int,
    rows: slice,
    page_tokens: int,
    window: int = 0,
) -> PrefillPlan:
    """For a chunk that ends at token kv_len of its sequence."""
    num_tokens = rows.stop - rows.start
    start = kv_len - num_tokens
    oldest = max(start + 1 - window, 0) if window else 0
    first = oldest // page_tokens
    page = pages[first : -(-kv_len // page_tokens)]
    num_keys = kv_len - first * page_tokens
    if start == 0 and (not window or window >= kv_len):
        return PrefillPlan(rows, page, num_keys, None)
    query = torch.arange(start, kv_len, device=pages.device)[:, None]
    key = torch.arange(first * page_tokens, kv_len, device=pages.device)
    visible = key <= query
    return PrefillPlan(rows, page, num_keys, visible & (key > query - window) if window else visible)


def attend_prefill(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim]: of this chunk
    view: torch.Tensor,  # [num_pages, kv_heads, page_tokens, 2 * head_dim]
    plan: PrefillPlan,
    scale: float,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    kv = view.index_select(0, plan.page).transpose(0, 1).flatten(1, 2)[None, :, : plan.num_keys]
    keys, values = kv.to(q.dtype).chunk(2, dim=-1)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=plan.visible,
        is_causal=plan.visible is None,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
