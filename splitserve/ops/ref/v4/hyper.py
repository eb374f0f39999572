"""Manifold-constrained hyper-connections (mHC): n residual streams, mixed by weights that depend on the token.

    streams [T, n, D] ── pre ──▶ x [T, D] ── sub-layer ──▶ y [T, D]
        └──────── comb (doubly stochastic) ──▶ + post * y ──▶ streams [T, n, D]

Coefficients are float32. `n` streams need n (pre) + n (post) + n * n (comb) numbers for each token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def hc_pre(
    streams: torch.Tensor,  # [T, n, D]
    fn: torch.Tensor,  # [2n + n * n, n * D] float32
    base: torch.Tensor,  # [2n + n * n] float32
    scale: torch.Tensor,  # [3] float32: of pre, post, comb
    *,
    iters: int,
    eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x [T, D], post [T, n] float32, comb [T, n, n] float32); comb[t, j, k] takes old stream j into new stream k."""
    n = streams.shape[1]
    mixes = hc_mixes(streams, fn, norm_eps)
    pre, post, comb = hc_split(mixes, base, scale, n=n, iters=iters, eps=eps)
    return _weighted(streams, pre), post, comb


def hc_post(
    y: torch.Tensor,  # [T, D]
    streams: torch.Tensor,  # [T, n, D]
    post: torch.Tensor,  # [T, n] float32
    comb: torch.Tensor,  # [T, n, n] float32
) -> torch.Tensor:  # [T, n, D]
    """new_k = post_k * y + sum_j comb[j, k] * old_j, in float32: the FIRST index of comb is the old stream."""
    mixed = torch.baddbmm(post[:, :, None] * y.float()[:, None], comb.transpose(1, 2), streams.float())
    return mixed.to(streams.dtype)


def hc_head(
    streams: torch.Tensor,  # [T, n, D]
    fn: torch.Tensor,  # [n, n * D] float32
    base: torch.Tensor,  # [n] float32
    scale: torch.Tensor,  # [1] float32
    *,
    eps: float,
    norm_eps: float,
) -> torch.Tensor:  # [T, D]
    """The streams as one, at the end of the model."""
    pre = torch.sigmoid(hc_mixes(streams, fn, norm_eps) * scale + base) + eps
    return _weighted(streams, pre)


def hc_mixes(
    streams: torch.Tensor,  # [T, n, D]
    fn: torch.Tensor,  # [m, n * D] float32
    norm_eps: float,
) -> torch.Tensor:  # [T, m] float32
    """fn applied to the streams, divided by the root mean square of all n * D numbers."""
    flat = streams.flatten(1).float()
    return F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)


def hc_split(
    mixes: torch.Tensor,  # [T, 2n + n * n] float32
    base: torch.Tensor,  # [2n + n * n]
    scale: torch.Tensor,  # [3]
    *,
    n: int,
    iters: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pre [T, n], post [T, n], comb [T, n, n]), all float32."""
    pre = torch.sigmoid(mixes[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (mixes[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(1, (n, n))
    return pre, post, sinkhorn(comb, iters=iters, eps=eps)


def sinkhorn(
    logits: torch.Tensor,  # [T, n, n] float32
    *,
    iters: int,
    eps: float,
) -> torch.Tensor:  # [T, n, n]: columns sum to one, rows nearly
    """Softmax over rows, then `iters` column and `iters - 1` row divisions in turn; ends on columns.

    The sums are products with a matrix of ones, which adds eps and spreads each sum over its row or column in one
    call: these are many steps on few numbers.
    """
    n = logits.shape[-1]
    cell = torch.arange(n * n, device=logits.device)
    same_row = (cell[:, None] // n == cell // n).float()
    same_column = (cell[:, None] % n == cell % n).float()
    floor = same_row.new_full((n * n,), eps)
    c = (logits.softmax(-1) + eps).flatten(1)
    c /= torch.addmm(floor, c, same_column)
    for _ in range(iters - 1):
        c /= torch.addmm(floor, c, same_row)
        c /= torch.addmm(floor, c, same_column)
    return c.unflatten(1, (n, n))


def _weighted(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[T, n, D] and [T, n] -> [T, D]: the float32 sum, in the streams' dtype."""
    return torch.bmm(weights[:, None], streams.float())[:, 0].to(streams.dtype)
