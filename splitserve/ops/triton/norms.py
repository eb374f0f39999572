"""Norms and rotations of rows, in one pass: what the models do to heads and hidden states between products.

    rows [BR, D]   ── / root mean square, * weight ──▶   ── last numbers turned by the token's angles ──▶

Arithmetic is float32. Pairs that turn are neighbours (PAIRS, DeepSeek-V4) or halves (Llama).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splitserve.ops.kernels.counts import cdiv, next_power_of_2
from splitserve.ops.kernels.launch import launch
from splitserve.ops.triton.overlap import follow
from splitserve.ops.triton.parts import Parts

Table = tuple[torch.Tensor, torch.Tensor]


@triton.jit
def _numbers(at, here, step, SPLITS: tl.constexpr, NUM: tl.constexpr):
    """Numbers, or what parts of them, `step` apart, come to, rounded as if they had been added up before."""
    if SPLITS == 1:
        return tl.load(at, mask=here, other=0.0)
    else:
        total = tl.load(at, mask=here, other=0.0)
        for split in tl.static_range(1, SPLITS):
            total += tl.load(at + split * step, mask=here, other=0.0)
        return total.to(NUM)


@triton.jit(do_not_specialize=["num_rows"])
def norm_turn(
    x,  # [tokens, heads, D], strided; where SPLITS > 1 so many parts of it in float32
    weight,  # [D]; WEIGHT only
    cos, sin,  # [tokens, ROPE / 2]; TURN only
    out,  # [tokens * heads, D]
    num_rows, heads, x_token, x_head, x_split, eps,
    SPLITS: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    ROPE: tl.constexpr,  # 0: nothing turns
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,  # "": none; "wide": in float32; "rounded": the quotient is rounded to x's type first
    PAIRS: tl.constexpr,
    BACK: tl.constexpr,  # turn by the opposite angle
    NARROW: tl.constexpr,  # cos and sin are rounded to x's type, and so is each product
    BR: tl.constexpr,
):  # fmt: skip
    # grid: [ceil(num_rows / BR)]
    follow()
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    token, head = row // heads, row % heads
    here = (row < num_rows)[:, None]
    col = tl.arange(0, BD)[None, :]
    source = x + (token * x_token + head * x_head)[:, None]
    into = out + row[:, None] * D
    loaded = _numbers(source + col, here & (col < D), x_split, SPLITS, out.dtype.element_ty)
    wide = loaded.to(tl.float32)
    root = tl.full((BR, 1), 1.0, tl.float32)
    if NORM:
        root = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
        wide *= root
        if WEIGHT == "wide":
            wide *= tl.load(weight + col, mask=col < D, other=0.0)
        if WEIGHT == "rounded":
            wide = wide.to(loaded.dtype).to(tl.float32) * tl.load(weight + col, mask=col < D, other=0.0).to(
                tl.float32
            )
    tl.store(into + col, wide, mask=here & (col < D - ROPE))
    if ROPE > 0:
        pair = tl.arange(0, ROPE // 2)[None, :]
        first = D - ROPE + (2 * pair if PAIRS else pair)
        second = first + (1 if PAIRS else ROPE // 2)
        a = _numbers(source + first, here, x_split, SPLITS, out.dtype.element_ty).to(tl.float32) * root
        b = _numbers(source + second, here, x_split, SPLITS, out.dtype.element_ty).to(tl.float32) * root
        if WEIGHT == "wide":
            a *= tl.load(weight + first)
            b *= tl.load(weight + second)
        if NORM:  # what a norm by itself would have handed on
            a, b = a.to(loaded.dtype).to(tl.float32), b.to(loaded.dtype).to(tl.float32)
        c = tl.load(cos + token[:, None] * (ROPE // 2) + pair, mask=here, other=0.0)
        s = tl.load(sin + token[:, None] * (ROPE // 2) + pair, mask=here, other=0.0)
        if BACK:
            s = -s
        if NARROW:
            c, s = c.to(loaded.dtype).to(tl.float32), s.to(loaded.dtype).to(tl.float32)
            ac, bs = (a * c).to(loaded.dtype).to(tl.float32), (b * s).to(loaded.dtype).to(tl.float32)
            bc, as_ = (b * c).to(loaded.dtype).to(tl.float32), (a * s).to(loaded.dtype).to(tl.float32)
            tl.store(into + first, ac - bs, mask=here)
            tl.store(into + second, bc + as_, mask=here)
        else:
            tl.store(into + first, a * c - b * s, mask=here)
            tl.store(into + second, a * s + b * c, mask=here)


@triton.jit(do_not_specialize=["num_rows"])
def add_norm(
    x,  # [rows, D]
    residual,  # [rows, D]
    weight,  # [D]
    total,  # [rows, D]: x + residual
    out,  # [rows, D]
    num_rows, eps,
    D: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    # grid: [rows]
    follow()
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BD)
    a = tl.load(x + row * D + col, mask=col < D, other=0.0)
    added = (a.to(tl.float32) + tl.load(residual + row * D + col, mask=col < D, other=0.0).to(tl.float32)).to(
        a.dtype
    )
    tl.store(total + row * D + col, added, mask=col < D)
    wide = added.to(tl.float32)
    scaled = (wide / tl.sqrt(tl.sum(wide * wide, 0) / D + eps)).to(a.dtype)
    tl.store(out + row * D + col, scaled.to(tl.float32) * tl.load(weight + col, mask=col < D, other=0.0).to(tl.float32),
             mask=col < D)  # fmt: skip


def norm_and_turn(
    x: torch.Tensor | Parts,  # [tokens, heads, size], the last dimension contiguous
    *,
    weight: torch.Tensor | None = None,
    eps: float | None = None,  # None: no norm
    table: Table | None = None,  # cos and sin [tokens, turning / 2]; None: nothing turns
    back: bool = False,
    pairs: bool = True,
    narrow: bool = False,  # as Llama's twins round: after the quotient, and after each product of a rotation
) -> torch.Tensor:  # [tokens, heads, size]
    tokens, heads, size = x.shape
    read = x.sums if isinstance(x, Parts) else x[None]
    if read.stride(3) != 1:
        read = read.contiguous()
    out = torch.empty(tokens, heads, size, dtype=x.dtype, device=read.device)
    cos, sin = table or (out, out)
    width = next_power_of_2(size)
    rows = max(1, 2048 // width)
    kind = "" if weight is None else "rounded" if narrow else "wide"
    launch(
        norm_turn, (cdiv(tokens * heads, rows),),
        read, out if weight is None else weight, cos, sin, out,
        tokens * heads, heads, read.stride(1), read.stride(2), read.stride(0), eps or 0.0,
        SPLITS=len(read), D=size, BD=width, ROPE=0 if table is None else 2 * cos.shape[-1], NORM=eps is not None, WEIGHT=kind,
        PAIRS=pairs, BACK=back, NARROW=narrow, BR=rows, num_warps=4 if width < 4096 else 8,
    )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor,  # [num_tokens, size]
    y: torch.Tensor,  # [num_tokens, size]
    weight: torch.Tensor,  # [size]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # x + y, and its norm
    """Twin of ref.add_rms_norm: the end of one sub-layer and the start of the next."""
    x, y = x.contiguous(), y.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    rows, size = x.shape
    launch(
        add_norm, (rows,), x, y, weight, total, out, rows, eps,
        D=size, BD=next_power_of_2(size), num_warps=8 if size >= 4096 else 4,
    )  # fmt: skip
    return total, out
