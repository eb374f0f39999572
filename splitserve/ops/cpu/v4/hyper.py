"""Hyper-connections: twins of ops/ref/v4/hyper.py. Each token's numbers are the same bits in any batch."""

from __future__ import annotations

import torch

from splitserve.ops.cpu.llvm import LANES
from splitserve.ops.ref.v4 import hyper as ref

from . import loops


def hc_pre(
    streams: torch.Tensor,  # [T, n, D] float32
    fn: torch.Tensor,  # [2n + n * n, n * D] float32
    base: torch.Tensor,  # [2n + n * n] float32
    scale: torch.Tensor,  # [3] float32: of pre, post, comb
    *,
    iters: int,
    eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x [T, D], post [T, n] float32, comb [T, n, n] float32); comb[t, j, k] takes old stream j into new stream k."""
    tokens, n, size = streams.shape
    if n * size % LANES:
        return ref.hc_pre(streams, fn, base, scale, iters=iters, eps=eps, norm_eps=norm_eps)
    streams = streams.contiguous()
    x, post, comb = torch.empty(tokens, size), torch.empty(tokens, n), torch.empty(tokens, n, n)
    loops.hc_pre(
        streams.data_ptr(),
        tokens,
        n,
        size,
        fn.data_ptr(),
        base.data_ptr(),
        scale.data_ptr(),
        iters,
        eps,
        norm_eps,
        x.data_ptr(),
        post.data_ptr(),
        comb.data_ptr(),
    )
    return x, post, comb


def hc_post(
    y: torch.Tensor,  # [T, D] float32
    streams: torch.Tensor,  # [T, n, D] float32
    post: torch.Tensor,  # [T, n] float32
    comb: torch.Tensor,  # [T, n, n] float32
) -> torch.Tensor:  # [T, n, D]
    y, streams, post, comb = (t.contiguous() for t in (y, streams, post, comb))
    out = torch.empty_like(streams)
    loops.hc_post(
        y.data_ptr(),
        streams.data_ptr(),
        *streams.shape,
        post.data_ptr(),
        comb.data_ptr(),
        out.data_ptr(),
    )
    return out
