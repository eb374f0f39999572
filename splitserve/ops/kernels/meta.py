"""Tensors and weights without numbers, of the models' real shapes: what the catalogue starts kernels on.

DeepSeek-V4-Flash   hidden 4096, 64 heads of 448 + 64, latents of 584 bytes
"""

from __future__ import annotations

import torch

from splitserve.ops.triton.multiply import Codes, Lanes, Words

BF16, F32, I32, I64, U8 = torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.uint8
HIDDEN, HEADS, DIM, ROPE, LATENT = 4096, 64, 512, 64, 584


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def tiles(*shape: int) -> Codes:
    scales = meta(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128), dtype=F32)
    return Codes(meta(*shape, dtype=torch.float8_e4m3fn), scales, (128, 128), True)


def words(*shape: int, eight: bool = False) -> Words:
    codes = meta(*shape[:-1], shape[-1] // 4, dtype=torch.int16)
    return Words(codes, meta(*shape[:-2], shape[-1] // 128, shape[-2], dtype=torch.int32), eight)


def lanes(experts_: int, out: int, size: int) -> Lanes:
    scales = meta(experts_, size // 256, out, 2, 4, dtype=U8)
    return Lanes(meta(experts_, out, size // 4, dtype=torch.int16), scales, meta(experts_, out, dtype=F32))
