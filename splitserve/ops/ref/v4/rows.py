"""Rows of the state: how a latent or an index key is written into its view and read back.

    plain    the numbers, in the view's float type
    packed   latent: nope numbers e4m3 | rotary numbers bf16 | a ue8m0 scale for 64 nope numbers, ... | zeros to 8 bytes
             index:  numbers e4m3 | float32 scale

A view of bytes means packed. Positions in a view are flat: unit * rows_per_unit + row; -1 is no row and reads as zeros,
whatever the memory behind it holds.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .quant import E4M3_MAX, power_of_two_scale, ue8m0_to_float

SCALE_GROUP = 64


def encode_latents(
    x: torch.Tensor,  # [N, head_dim]
    rope_dim: int,
    like: torch.Tensor,  # a view of the state: its dtype says how
) -> torch.Tensor:  # [N, width of a row] in the view's dtype
    return pack_latents(x, rope_dim) if like.dtype == torch.uint8 else x.to(like.dtype)


def decode_latents(
    rows: torch.Tensor,  # [..., width of a row]
    rope_dim: int,
    head_dim: int,
) -> torch.Tensor:  # [..., head_dim] float32
    return unpack_latents(rows, rope_dim, head_dim) if rows.dtype == torch.uint8 else rows.float()


def encode_keys(
    x: torch.Tensor,  # [N, index_dim]
    like: torch.Tensor,
) -> torch.Tensor:
    return pack_keys(x) if like.dtype == torch.uint8 else x.to(like.dtype)


def decode_keys(
    rows: torch.Tensor,  # [..., width of a row]
) -> torch.Tensor:  # [..., index_dim] float32
    return unpack_keys(rows) if rows.dtype == torch.uint8 else rows.float()


def write_rows(
    view: torch.Tensor,  # [units, rows_per_unit, width], any strides
    rows: torch.Tensor,  # [N, width]
    unit: torch.Tensor,  # [N] int64; -1: the row is not kept
    row: torch.Tensor,  # [N] int64; (unit, row) pairs must differ
) -> None:
    kept = unit >= 0
    if not kept.all():
        rows, unit, row = rows[kept], unit[kept], row[kept]
    view[unit, row] = rows.to(view.dtype)


def take_rows(
    view: torch.Tensor,  # [units, rows_per_unit, width], any strides
    index: torch.Tensor,  # [...] int64, flat; -1: none
) -> torch.Tensor:  # [..., width], zeros where index is -1
    at = index.clamp(min=0)
    rows = view[at // view.shape[1], at % view.shape[1]]
    return rows.masked_fill_((index < 0)[..., None], 0)


def pack_latents(
    x: torch.Tensor,  # [N, head_dim]
    rope_dim: int,
) -> torch.Tensor:  # [N, nope + 2 * rope + scales padded to 8] uint8
    nope = x[:, : x.shape[1] - rope_dim].float()
    grouped = F.pad(nope, (0, -nope.shape[1] % SCALE_GROUP)).unflatten(1, (-1, SCALE_GROUP))
    bits = power_of_two_scale(grouped.abs().amax(-1).clamp_min(1e-4), E4M3_MAX)
    scaled = (grouped / ue8m0_to_float(bits)[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    codes = scaled.flatten(1)[:, : nope.shape[1]].to(torch.float8_e4m3fn).view(torch.uint8)
    turned = x[:, nope.shape[1] :].to(torch.bfloat16).contiguous().view(torch.uint8)
    return torch.cat((codes, turned, F.pad(bits, (0, -bits.shape[1] % 8))), dim=1)


def unpack_latents(
    rows: torch.Tensor,  # [..., width] uint8
    rope_dim: int,
    head_dim: int,
) -> torch.Tensor:  # [..., head_dim] float32
    nope = head_dim - rope_dim
    codes = rows[..., :nope].contiguous().view(torch.float8_e4m3fn).float()
    turned = rows[..., nope : nope + 2 * rope_dim].contiguous().view(torch.bfloat16).float()
    scales = ue8m0_to_float(rows[..., nope + 2 * rope_dim :].contiguous())
    wide = scales.repeat_interleave(SCALE_GROUP, -1)[..., :nope]
    return torch.cat((codes * wide, turned), dim=-1)


def pack_keys(
    x: torch.Tensor,  # [N, index_dim]
) -> torch.Tensor:  # [N, index_dim + 4] uint8
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(1e-4) / E4M3_MAX
    codes = (wide / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return torch.cat((codes.view(torch.uint8), scale.view(torch.uint8)), dim=1)


def unpack_keys(
    rows: torch.Tensor,  # [..., index_dim + 4] uint8
) -> torch.Tensor:  # [..., index_dim] float32
    codes = rows[..., :-4].contiguous().view(torch.float8_e4m3fn).float()
    return codes * rows[..., -4:].contiguous().view(torch.float32)
