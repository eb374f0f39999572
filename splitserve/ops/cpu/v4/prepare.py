"""Compiles every loop before the first request needs it: each is called once on a few numbers.

A quarter of a minute on a machine that has not seen this version, half a second on a machine that has.
"""

from __future__ import annotations

import torch

from splitserve.ops.cpu.llvm import LANES
from splitserve.ops.ref.v4.quant import MXFP4_GROUP, Mxfp4, Tiles
from splitserve.ops.ref.v4.sparse import Rows

from . import dense, experts, hyper, quant, sparse


def prepare() -> None:
    """Afterwards no call compiles."""
    size = MXFP4_GROUP
    x, heads, zero = torch.zeros(1, size), torch.zeros(1, 1, LANES), torch.zeros(1, dtype=torch.int64)
    tiles = Tiles(torch.zeros(1, size).to(torch.float8_e4m3fn), torch.ones(1, 1), (1, size))
    codes = torch.zeros(2 * size, size // 2, dtype=torch.uint8)
    pair = Mxfp4(codes, torch.zeros(2 * size, 1, dtype=torch.uint8)), Mxfp4(codes[:size], codes[:size, :1])
    quant.dequantise(tiles, torch.float32)
    quant.linear(x, tiles)
    dense.grouped_linear(x[:, None], tiles)
    dense.rms_norm(x, None, 1e-6)
    dense.rotate_tail(heads, (torch.ones(1, 1), torch.zeros(1, 1)))
    view = torch.zeros(1, 1, LANES)
    dense.write_rows(view, heads[0], zero, zero)
    experts.expert_ffn(x, *pair, 1.0)
    x, post, comb = hyper.hc_pre(
        view, torch.zeros(3, LANES), torch.zeros(3), torch.zeros(3), iters=1, eps=1e-6, norm_eps=1e-6
    )
    hyper.hc_post(x, view, post, comb)
    sparse.attend(heads, Rows(view, zero[None]), None, torch.zeros(1), scale=1.0, rope_dim=0)
    sparse.index_scores(heads, torch.zeros(1, 1), view, zero[None], zero + 1, q_lens=(1,))
