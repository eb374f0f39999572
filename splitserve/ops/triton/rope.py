"""Rotary embedding over halves of a head: the twins of ops/ref/rope.py."""

from __future__ import annotations

import torch

from splitserve.ops.ref.rope import rope_table
from splitserve.ops.triton.norms import norm_and_turn

__all__ = ["rope_table", "rotate"]


def rotate(
    x: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    table: tuple[torch.Tensor, torch.Tensor],  # of rope_table
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Twin of ref.rotate."""
    cos, sin = (t.flatten(1) for t in table)
    return norm_and_turn(x, table=(cos, sin), pairs=False, narrow=True)
