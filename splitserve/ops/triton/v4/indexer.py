"""The lightning indexer: rates compressed entries, of which choosing.py keeps the best few for each token.

    score[t, i] = scale[i] * sum over heads of weight[t, h] * relu(q[t, h] . code[i])

Of many tokens they are rated in rating.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from splitserve.ops.kernels.counts import cdiv, next_power_of_2
from splitserve.ops.kernels.launch import arch_of, interpreted, launch
from splitserve.ops.kernels.tuned import tuned
from splitserve.ops.triton.codes import e4m3_bits
from splitserve.ops.triton.overlap import follow

from .rating import HALF, rate_many

MANY = 128  # tokens from which two share a tile of keys


@triton.jit(
    do_not_specialize=["max_pages", "num_entries"],
    do_not_specialize_on_alignment=["pages", "seq_of", "num_visible"],
)
def rate_entries(
    q,  # [T, heads, D] bf16
    weights, weights_stride, scaled,  # [T, heads] float32, strided; a number that each is to be multiplied by
    view, per_page, page_stride, row_stride,  # strides in steps of ALIGN elements
    pages,  # [num_seqs, max_pages] int64
    max_pages,
    seq_of,  # [T] int64, unless ONE
    num_visible,  # [T] int64
    scores,  # [T, num_entries] float32
    num_entries,
    heads,
    PACKED: tl.constexpr,
    ONE: tl.constexpr,  # every sequence has one token
    D: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    TILES: tl.constexpr,  # tiles of BN entries for one program
    ALIGN: tl.constexpr,
    NATIVE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # grid: [T, ceil(num_entries / (BN * TILES))]
    follow()
    token = tl.program_id(0).to(tl.int64)
    seq = token if ONE else tl.load(seq_of + token)
    visible = tl.load(num_visible + token).to(tl.int32)
    head, col = tl.arange(0, BH), tl.arange(0, D)
    query = tl.load(
        q + (token * heads + head[:, None]) * D + col[None, :], mask=head[:, None] < heads, other=0.0
    )
    NUM: tl.constexpr = tl.bfloat16 if NATIVE else tl.float32
    query = (query.to(tl.float32) * (HALF if PACKED else 1.0)).to(NUM)
    weight = tl.load(weights + token * weights_stride + head, mask=head < heads, other=0.0) * scaled
    first, stop = tl.program_id(1) * TILES, (tl.program_id(1) + 1) * TILES
    seen = tl.minimum(stop, tl.cdiv(visible, BN))
    for tile in tl.range(first, seen, num_stages=STAGES):
        entry = tile * BN + tl.arange(0, BN)
        here = entry < visible
        page = tl.load(pages + seq * max_pages + entry // per_page, mask=here, other=0)
        start = page * (page_stride.to(tl.int64) * ALIGN) + (entry % per_page) * (row_stride * ALIGN)
        rows = tl.multiple_of(view + start, ALIGN)
        if PACKED:
            scale = tl.load((rows + D).to(tl.pointer_type(tl.float32)), mask=here, other=0.0)
            codes = tl.load(rows[:, None] + col[None, :], mask=here[:, None], other=0)
            keys = e4m3_bits(codes, NATIVE)
        else:
            keys = tl.load(rows[:, None] + col[None, :], mask=here[:, None], other=0.0).to(NUM)
        rated = tl.maximum(tl.dot(query, tl.trans(keys)), 0.0)
        score = tl.sum(rated * weight[:, None], 0)
        if PACKED:
            score *= scale * HALF
        out = scores + token * num_entries + entry
        tl.store(out, tl.where(here, score, float("-inf")), mask=entry < num_entries)
    for tile in range(tl.maximum(first, seen), stop):
        entry = tile * BN + tl.arange(0, BN)
        never = tl.full((BN,), float("-inf"), tl.float32)
        tl.store(scores + token * num_entries + entry, never, mask=entry < num_entries)


def index_scores(
    q: torch.Tensor,  # [T, heads, index_dim]
    weights: torch.Tensor,  # [T, heads] float32, strided
    view: torch.Tensor,  # [num_pages, rows_per_page, width]: index keys, any strides
    pages: torch.Tensor,  # [num_seqs, max_pages] int64
    num_visible: torch.Tensor,  # [T] int64: entries that a token may see, the first of its sequence
    *,
    q_lens: Sequence[int],  # tokens of each sequence in q, in order
    scale: float = 1.0,  # of the weights
) -> torch.Tensor:  # [T, entries that the pages hold] float32, -inf where not visible
    """Twin of ref.v4.index_scores, which takes weights scaled; as wide as the pages allow, so that nothing is read back
    from the device.
    """
    tokens, heads, dim = q.shape
    one = tokens == len(q_lens)
    seq_of = num_visible if one else _sequences(q_lens, q.device)
    scores = torch.empty(tokens, pages.shape[1] * view.shape[1], dtype=torch.float32, device=q.device)
    packed = view.dtype == torch.uint8
    align = 4 if packed else 8
    keys = view, view.shape[1], view.stride(0) // align, view.stride(1) // align
    constants = {
        "PACKED": packed, "D": dim, "BH": max(16, next_power_of_2(heads)), "ALIGN": align,
        "NATIVE": not interpreted(),
    }  # fmt: skip
    kind = "rate_many" if tokens >= MANY and not one else "rate_entries"
    config = tuned(kind, arch_of(q), tokens)
    config["STAGES"] = config.pop("num_stages")
    tiles = cdiv(scores.shape[1], config["BN"] * config["TILES"])
    if kind == "rate_many":
        launch(
            rate_many, (cdiv(tokens, 2), tiles),
            q, weights, weights.stride(0), scale, *keys, pages, pages.shape[1], seq_of, num_visible,
            scores, tokens, scores.shape[1], heads, **constants, **config,
        )  # fmt: skip
        return scores
    launch(
        rate_entries, (tokens, tiles),
        q, weights, weights.stride(0), scale, *keys, pages, pages.shape[1], seq_of, num_visible,
        scores, scores.shape[1], heads, **constants, ONE=one, **config,
    )  # fmt: skip
    return scores


def _sequences(q_lens: Sequence[int], device: torch.device) -> torch.Tensor:
    """[T] int64: the sequence of each token."""
    if len(q_lens) == 1:
        return torch.zeros(q_lens[0], dtype=torch.int64, device=device)
    lens = torch.tensor(q_lens, device=device)
    return torch.arange(len(q_lens), device=device).repeat_interleave(lens, output_size=sum(q_lens))
