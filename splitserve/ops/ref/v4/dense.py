"""Norms, float32 products and the rotary embedding of DeepSeek-V4.

Rotary pairs are neighbours, (x0, x1), (x2, x3), ..., in the LAST `rope_dim` numbers of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

Table = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, each [T, rope_dim / 2] float32."""


def rms_norm(
    x: torch.Tensor,  # [..., size]
    weight: torch.Tensor | None,  # [size] float32, or None for no weight
    eps: float,
) -> torch.Tensor:  # [..., size] in x's dtype; the arithmetic, weight included, is float32
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled if weight is None else scaled * weight).to(x.dtype)


def linear_f32(
    x: torch.Tensor,  # [T, in]
    weight: torch.Tensor,  # [out, in], any float type
) -> torch.Tensor:  # [T, out] float32, products and sums in float32
    return F.linear(x.float(), weight.float())


def grouped_linear(
    x: torch.Tensor,  # [T, groups, in]
    weight: torch.Tensor,  # [groups * out, in] in x's dtype
) -> torch.Tensor:  # [T, groups * out]: each group of inputs through its own matrix
    groups = x.shape[1]
    return (
        torch.bmm(x.transpose(0, 1), weight.unflatten(0, (groups, -1)).transpose(1, 2))
        .transpose(0, 1)
        .flatten(1)
    )


def rope_table(
    positions: torch.Tensor,  # [T] int64
    inverse: torch.Tensor,  # [rope_dim / 2] float32
) -> Table:
    angles = positions.float()[:, None] * inverse
    return angles.cos(), angles.sin()


def rotate_tail(
    x: torch.Tensor,  # [T, heads, head_dim]
    table: Table,
    *,
    inverse: bool = False,
) -> torch.Tensor:  # [T, heads, head_dim]
    """Turn the last numbers of every head by its token's angles; `inverse` turns them back. In float32."""
    cos, sin = table[0][:, None], table[1][:, None]
    size = 2 * cos.shape[-1]
    pairs = x[..., -size:].float().unflatten(-1, (-1, 2))
    even, odd = pairs.unbind(-1)
    if inverse:
        sin = -sin
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-size], turned.to(x.dtype)), dim=-1)
