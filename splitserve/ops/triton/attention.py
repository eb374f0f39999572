"""Paged attention with grouped heads: the twins of ops/ref/attention.py.

    view [num_pages, kv_heads, page_tokens, 2 * head_dim]: key then value, any strides

    decode    program (sequence, kv head, span): SPAN tokens for all heads of a group; spans are joined afterwards
    prefill   program (tokens, head): a tile of queries over the keys it may see

A span is a fixed number of tokens, so that a sequence's result does not depend on the others in the batch. Rows past a
sequence's end are never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from splitserve.ops.kernels.counts import cdiv, next_power_of_2
from splitserve.ops.kernels.launch import arch_of, interpreted, launch
from splitserve.ops.kernels.tuned import tuned
from splitserve.ops.triton.overlap import follow

LOG2E = 1.4426950408889634
NEVER = tl.constexpr(-1.0e30)


@dataclass(frozen=True)
class DecodePlan:
    """All one-token sequences of a step."""

    pages: torch.Tensor  # [num_seqs, max_pages] int64
    lens: torch.Tensor  # [num_seqs] int32: tokens, this step's included
    longest: int
    window: int

    @property
    def num_seqs(self) -> int:
        return len(self.lens)


@dataclass(frozen=True)
class PrefillPlan:
    """One sequence's chunk, which ends at token kv_len."""

    rows: slice  # of the step's tokens
    pages: torch.Tensor  # [max_pages] int64
    kv_len: int
    window: int


@triton.jit
def put_rows(
    view, k, v, page, row,
    heads, view_page, view_head, view_row, k_token, k_head, v_token, v_head, D,
    BD: tl.constexpr,
):  # fmt: skip
    # grid: [tokens, heads]
    follow()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    col = tl.arange(0, BD)
    unit = tl.load(page + token)
    place = view + unit * view_page + head * view_head + tl.load(row + token) * view_row + col
    inside = (col < D) & (unit + col * 0 >= 0)
    tl.store(place, tl.load(k + token * k_token + head * k_head + col, mask=inside, other=0.0), mask=inside)
    tl.store(
        place + D, tl.load(v + token * v_token + head * v_head + col, mask=inside, other=0.0), mask=inside
    )


@triton.jit
def _softmax_step(logits, visible, top, total):
    """(weights, shrink, top, total): logits are in powers of two."""
    logits = tl.where(visible, logits, NEVER)
    best = tl.maximum(top, tl.max(logits, 1))
    weights = tl.where(visible, tl.exp2(logits - best[:, None]), 0.0)
    shrink = tl.exp2(top - best)
    return weights, shrink, best, total * shrink + tl.sum(weights, 1)


@triton.jit(do_not_specialize=["spans", "max_pages"], do_not_specialize_on_alignment=["pages", "lens"])
def decode_span(
    q,  # [num_seqs, kv_heads * group, D]
    view, view_page, view_head, view_row,  # strides in steps of 8 elements
    pages, lens,
    part,  # [num_seqs, kv_heads * group, spans, D] float32
    part_top, part_total,  # [num_seqs, kv_heads * group, spans] float32
    kv_heads, group, max_pages, page_tokens, window, spans,
    scale,  # times log2(e)
    NATIVE: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    SPAN: tl.constexpr,
    BG: tl.constexpr,  # group, as a power of two and at least 16
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # grid: [num_seqs, kv_heads, spans]
    follow()
    NUM: tl.constexpr = tl.bfloat16 if NATIVE else tl.float32
    seq, kv_head, span = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens + seq)
    first = tl.maximum(length - window, 0) if window > 0 else 0
    g, col = tl.arange(0, BG), tl.arange(0, BD)
    head = kv_head * group + g
    ours = (g < group)[:, None] & (col < D)[None, :]
    row = seq * kv_heads * group + head
    query = tl.load(q + row[:, None] * D + col[None, :], mask=ours, other=0.0).to(NUM)
    top, total = tl.full((BG,), NEVER, tl.float32), tl.zeros((BG,), tl.float32)
    mixed = tl.zeros((BG, BD), tl.float32)
    start = tl.maximum(span * SPAN, first // BN * BN)
    base = view + kv_head * (view_head.to(tl.int64) * 8)
    for t0 in tl.range(start, tl.minimum((span + 1) * SPAN, length), BN, num_stages=STAGES):
        token = t0 + tl.arange(0, BN)
        here = (token < length) & (token >= first)
        page = tl.load(pages + seq * max_pages + token // page_tokens, mask=here, other=0)
        place = page * (view_page.to(tl.int64) * 8) + (token % page_tokens) * (view_row * 8)
        keys = base + place[:, None] + col[None, :]
        inside = here[:, None] & (col < D)[None, :]
        k = tl.load(keys, mask=inside, other=0.0).to(NUM)
        v = tl.load(keys + D, mask=inside, other=0.0).to(NUM)
        weights, shrink, top, total = _softmax_step(
            tl.dot(query, tl.trans(k)) * scale, here[None, :], top, total
        )
        mixed = tl.dot(weights.to(NUM), v, mixed * shrink[:, None])
    out = row * spans + span
    tl.store(part_top + out, top, mask=g < group)
    tl.store(part_total + out, total, mask=g < group)
    tl.store(part + out[:, None] * D + col[None, :], mixed, mask=ours)


@triton.jit(do_not_specialize=["spans"])
def decode_join(
    part, part_top, part_total,
    out,  # [rows, D]
    spans,
    D: tl.constexpr,
    BD: tl.constexpr,
    BS: tl.constexpr,  # spans at once
):  # fmt: skip
    # grid: [rows]
    follow()
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BD)
    best = tl.full((), NEVER, tl.float32)
    total, mixed = tl.full((), 0.0, tl.float32), tl.zeros((BD,), tl.float32)
    for start in range(0, spans, BS):
        span = start + tl.arange(0, BS)
        at = row * spans + span
        tops = tl.load(part_top + at, mask=span < spans, other=NEVER)
        totals = tl.load(part_total + at, mask=span < spans, other=0.0)
        parts = tl.load(
            part + at[:, None] * D + col[None, :],
            mask=(span < spans)[:, None] & (col < D)[None, :],
            other=0.0,
        )
        top = tl.maximum(best, tl.max(tops, 0))
        weight = tl.exp2(tops - top)
        mixed = mixed * tl.exp2(best - top) + tl.sum(parts * weight[:, None], 0)
        total = total * tl.exp2(best - top) + tl.sum(totals * weight, 0)
        best = top
    tl.store(out + row * D + col, mixed / tl.maximum(total, 1e-30), mask=col < D)  # nobody's place: no keys


@triton.jit
def _prefill_tiles(
    query, base, pages, view_page, view_row, page_tokens, position, start, stop, kv_len, window, scale,
    top, total, mixed,
    MASKED: tl.constexpr, WHOLE: tl.constexpr, NUM: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The running softmax over keys [start, stop); MASKED: some queries do not see some of them."""
    col = tl.arange(0, BD)
    for t0 in tl.range(start, stop, BN, num_stages=STAGES):
        token = t0 + tl.arange(0, BN)
        here = token < kv_len
        if WHOLE:  # of one page: nothing to look up, and to be reckoned with, for each key
            page = tl.load(pages + t0 // page_tokens)
            first = base + page * (view_page.to(tl.int64) * 8) + (t0 % page_tokens) * WHOLE
            keys = first + (tl.arange(0, BN)[:, None] * WHOLE + col[None, :])
        else:
            page = tl.load(pages + token // page_tokens, mask=here, other=0)
            place = page * (view_page.to(tl.int64) * 8) + (token % page_tokens) * (view_row * 8)
            keys = base + place[:, None] + col[None, :]
        if WHOLE and not MASKED and D == BD:
            k = tl.load(keys).to(NUM)
            v = tl.load(keys + D).to(NUM)
        else:
            inside = here[:, None] & (col < D)[None, :]
            k = tl.load(keys, mask=inside, other=0.0).to(NUM)
            v = tl.load(keys + D, mask=inside, other=0.0).to(NUM)
        logits = tl.dot(query, tl.trans(k))
        if MASKED:
            logits *= scale
            visible = token[None, :] <= position[:, None]
            if window > 0:
                visible = visible & (token[None, :] > position[:, None] - window)
            weights, shrink, top, total = _softmax_step(logits, visible, top, total)
        else:
            best = tl.maximum(top, tl.max(logits, 1) * scale)  # the scale is positive
            weights, shrink, top = tl.exp2(logits * scale - best[:, None]), tl.exp2(top - best), best
            total = total * shrink + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(NUM), v, mixed * shrink[:, None])
    return top, total, mixed


@triton.jit(do_not_specialize=["num_tokens", "kv_len"], do_not_specialize_on_alignment=["pages"])
def prefill(
    q,  # [num_tokens, heads, D]
    view, view_page, view_head, view_row,  # strides in steps of 8 elements
    pages,
    out,  # [num_tokens, heads, D]
    num_tokens, heads, group, kv_len, page_tokens, window,
    q_token,
    scale,  # times log2(e)
    NATIVE: tl.constexpr,
    WHOLE: tl.constexpr,  # elements from a row to the next where a page is a number of tiles; else 0
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # grid: [ceil(num_tokens / BM), heads]; products in _prefill_tiles: tl.dot(...)
    follow()
    NUM: tl.constexpr = tl.bfloat16 if NATIVE else tl.float32
    head = tl.program_id(1)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    m, col = tile * BM + tl.arange(0, BM), tl.arange(0, BD)
    position = kv_len - num_tokens + m
    ours = (m < num_tokens)[:, None] & (col < D)[None, :]
    query = tl.load(q + m[:, None].to(tl.int64) * q_token + head * D + col[None, :], mask=ours, other=0.0).to(
        NUM
    )
    top, total = tl.full((BM,), NEVER, tl.float32), tl.zeros((BM,), tl.float32)
    mixed = tl.zeros((BM, BD), tl.float32)
    lowest = kv_len - num_tokens + tile * BM
    first = tl.maximum(lowest + 1 - window, 0) // BN * BN if window > 0 else 0
    base = view + (head // group) * (view_head.to(tl.int64) * 8)
    whole = (
        (lowest + 1) // BN * BN if window == 0 else first
    )  # keys before it are seen by every query of the tile
    top, total, mixed = _prefill_tiles(
        query, base, pages, view_page, view_row, page_tokens, position, first, whole, kv_len, window, scale,
        top, total, mixed, False, WHOLE, NUM, D, BD, BN, STAGES,
    )  # fmt: skip
    top, total, mixed = _prefill_tiles(
        query, base, pages, view_page, view_row, page_tokens, position, whole, tl.minimum(lowest + BM, kv_len),
        kv_len, window, scale, top, total, mixed, True, WHOLE, NUM, D, BD, BN, STAGES,
    )  # fmt: skip
    into = out + (m[:, None].to(tl.int64) * heads + head) * D + col[None, :]
    tl.store(into, mixed / tl.maximum(total, 1e-30)[:, None], mask=ours)


def write_rows(
    view: torch.Tensor,  # [num_pages, kv_heads, page_tokens, 2 * head_dim]
    k: torch.Tensor,  # [num_tokens, kv_heads, head_dim]
    v: torch.Tensor,  # [num_tokens, kv_heads, head_dim]
    page: torch.Tensor,  # [num_tokens] int64; -1: not kept
    row: torch.Tensor,  # [num_tokens] int64
) -> None:
    """Twin of ref.write_rows."""
    tokens, heads, dim = k.shape
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    launch(
        put_rows, (tokens, heads), view, k, v, page, row,
        heads, *view.stride()[:3], *k.stride()[:2], *v.stride()[:2], dim,
        BD=next_power_of_2(dim), num_warps=1,
    )  # fmt: skip


def plan_decode(
    pages: torch.Tensor,  # [num_seqs, max_pages] int64, rows padded with anything
    kv_lens: Sequence[int],  # of each sequence, this step's token included
    page_tokens: int,  # views say it themselves
    window: int = 0,
) -> DecodePlan:
    """Twin of ref.plan_decode."""
    lens = torch.tensor(kv_lens, dtype=torch.int32, device=pages.device)
    return DecodePlan(pages.contiguous(), lens, max(kv_lens, default=0), window)


def plan_decode_any(
    pages: torch.Tensor,  # [num_seqs, max_pages] int64
    lens: torch.Tensor,  # [num_seqs] int64: of each sequence, on the device; 0 for nobody's place
    longest: int,  # that any of them may be
    page_tokens: int,
    window: int = 0,
) -> DecodePlan:
    """Twin of ref.plan_decode_any."""
    return DecodePlan(pages.contiguous(), lens.int(), longest, window)


def attend_decode(
    q: torch.Tensor,  # [num_seqs, num_heads, head_dim]
    view: torch.Tensor,  # [num_pages, kv_heads, page_tokens, 2 * head_dim]
    plan: DecodePlan,
    scale: float,
) -> torch.Tensor:  # [num_seqs, num_heads, head_dim]
    """Twin of ref.attend_decode."""
    q = q.contiguous()
    seqs, heads, dim = q.shape
    kv_heads = view.shape[1]
    config = tuned("decode_span", arch_of(q), plan.longest)
    config["STAGES"] = config.pop("num_stages")
    spans = max(1, cdiv(plan.longest, config["SPAN"]))
    part = torch.empty(seqs, heads, spans, dim, dtype=torch.float32, device=q.device)
    top, total = (torch.empty(seqs, heads, spans, dtype=torch.float32, device=q.device) for _ in range(2))
    group = heads // kv_heads
    width = next_power_of_2(dim)
    launch(
        decode_span, (seqs, kv_heads, spans),
        q, view, *_steps(view), plan.pages, plan.lens, part, top, total,
        kv_heads, group, plan.pages.shape[1], view.shape[2], plan.window, spans, scale * LOG2E,
        NATIVE=not interpreted(), D=dim, BD=max(16, width), BG=max(16, next_power_of_2(group)), **config,
    )  # fmt: skip
    out = torch.empty_like(q)
    launch(decode_join, (seqs * heads,), part, top, total, out, spans, D=dim, BD=width, BS=16, num_warps=4)
    return out


def plan_prefill(
    pages: torch.Tensor,  # [max_pages] int64: of this sequence
    kv_len: int,
    rows: slice,
    page_tokens: int,
    window: int = 0,
) -> PrefillPlan:
    """Twin of ref.plan_prefill."""
    return PrefillPlan(rows, pages.contiguous(), kv_len, window)


def attend_prefill(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim]: of this chunk
    view: torch.Tensor,  # [num_pages, kv_heads, page_tokens, 2 * head_dim]
    plan: PrefillPlan,
    scale: float,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Twin of ref.attend_prefill."""
    tokens, heads, dim = q.shape
    if q.stride()[1:] != (dim, 1):
        q = q.contiguous()
    out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    config = tuned("prefill", arch_of(q), dim)
    config["STAGES"] = config.pop("num_stages")
    launch(
        prefill, (cdiv(tokens, config["BM"]), heads),
        q, view, *_steps(view), plan.pages, out,
        tokens, heads, heads // view.shape[1], plan.kv_len, view.shape[2], plan.window, q.stride(0), scale * LOG2E,
        NATIVE=not interpreted(), WHOLE=0 if view.shape[2] % config["BN"] else view.stride(2),
        D=dim, BD=max(16, next_power_of_2(dim)), **config,
    )  # fmt: skip
    return out


def _steps(view: torch.Tensor) -> tuple[int, int, int]:
    """Strides of pages, heads and rows in steps of eight elements. Raises ValueError where they are none."""
    if any(s % 8 for s in view.stride()[:3]):
        raise ValueError(
            f"a view with strides {view.stride()}: rows of keys must start at multiples of 8 elements"
        )
    return view.stride(0) // 8, view.stride(1) // 8, view.stride(2) // 8
