"""Hyper-connections: twin of ops/ref/v4/hyper.py. Each token's coefficients are the same bits in any batch."""

from __future__ import annotations

import numpy as np
import torch

from splitserve.ops.ref.v4.hyper import hc_mixes

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
    tokens, n, _ = streams.shape
    mixes = hc_mixes(streams, fn, norm_eps)
    pre, post = torch.empty(tokens, n), torch.empty(tokens, n)
    comb = torch.empty(tokens, n, n)
    loops.split(
        mixes.numpy(),
        base.numpy(),
        scale.numpy(),
        n,
        iters,
        np.float32(eps),
        pre.numpy(),
        post.numpy(),
        comb.numpy(),
    )
    return torch.bmm(pre[:, None], streams)[:, 0], post, comb
