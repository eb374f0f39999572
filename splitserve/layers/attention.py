"""Attention over pages for one step: the step's plan, made once, and what each layer does with it."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from .forward import Forward


@dataclass(frozen=True)
class AttentionPlan:
    """How this step's sequences read their pages, for layers with one window size."""

    ops: ModuleType  # that made the plans and understands them
    decode: Any  # ops.DecodePlan | None
    prefills: tuple[Any, ...]  # of ops.PrefillPlan


def plan_attention(fwd: Forward, ops: ModuleType, *, window: int = 0) -> AttentionPlan:
    """Host work of a step: the one-token sequences as one batch, every other sequence by itself."""
    if fwd.capacity:
        lens = torch.where(fwd.write_page < 0, 0, fwd.positions + 1)
        return AttentionPlan(
            ops, ops.plan_decode_any(fwd.pages, lens, fwd.capacity, fwd.page_tokens, window), ()
        )
    n = fwd.num_decode
    decode = ops.plan_decode(fwd.pages[:n], fwd.kv_lens[:n], fwd.page_tokens, window) if n else None
    prefills, row = [], n
    for i in range(n, len(fwd.q_lens)):
        rows = slice(row, row + fwd.q_lens[i])
        prefills.append(ops.plan_prefill(fwd.pages[i], fwd.kv_lens[i], rows, fwd.page_tokens, window))
        row = rows.stop
    return AttentionPlan(ops, decode, tuple(prefills))


def attend(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    k: torch.Tensor,  # [num_tokens, kv_heads, head_dim]
    v: torch.Tensor,  # [num_tokens, kv_heads, head_dim]
    fwd: Forward,
    *,
    plan: AttentionPlan,
    layer: int,
) -> torch.Tensor:  # [num_tokens, num_heads * head_dim]
    """Write the new keys and values into their pages, then let every token look at its sequence's rows up to itself."""
    ops, view = plan.ops, fwd.states.view("kv", layer)
    ops.write_rows(view, k, v, fwd.write_page, fwd.write_row)
    scale = q.shape[-1] ** -0.5
    if not plan.prefills and plan.decode:
        return ops.attend_decode(q, view, plan.decode, scale).flatten(1)
    out = torch.empty_like(q)
    if plan.decode:
        n = plan.decode.num_seqs
        out[:n] = ops.attend_decode(q[:n], view, plan.decode, scale)
    for chunk in plan.prefills:
        out[chunk.rows] = ops.attend_prefill(q[chunk.rows], view, chunk, scale)
    return out.flatten(1)
