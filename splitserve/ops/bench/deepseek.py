"""DeepSeek-V4-Flash on one GPU, kernel by kernel: 43 layers, of which 21 of ratio 4, 20 of ratio 128.

Contexts are 8,192 tokens in decoding; a prefill is the first chunk of its sequence. Experts are drawn at random from a
fixed seed, six different ones for each token; the distinct ones are counted, and only their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any

import torch

from splitserve.ops.ref.v4 import Places, Reach, Rows, locate_entries
from splitserve.ops.triton import v4
from splitserve.ops.triton.grouping import Groups, group_pairs
from splitserve.ops.triton.multiply import Codes, Lanes, many_rows, multiply, multiply_parts, rounded
from splitserve.ops.triton.rounding import Placed, Rounded, round_placed
from splitserve.ops.triton.routing import add_up

from .case import Case, copies, numbers

HIDDEN, HEADS, DIM, ROPE, LATENT = 4096, 64, 512, 64, 584
EXPERTS, COUNT, FFN = 256, 6, 2048
LAYERS, CSA, HCA = 43, 21, 20
CONTEXT, WINDOW, TOPK = 8192, 128, 512
FEW = 64  # tokens that may be decoding; more are a prefill


def cases(tokens: int) -> Iterator[Case]:
    yield from linears(tokens)
    yield from experts(tokens)
    yield from plain_linears(tokens)
    yield from streams(tokens)
    yield from attention(tokens)
    yield from small(tokens)


def codes(out: int, size: int) -> Codes:
    values = torch.randint(0, 120, (out, size), dtype=torch.uint8, device="cuda")
    values |= torch.randint(0, 2, (out, size), dtype=torch.uint8, device="cuda") << 7
    scales = torch.full((ceil(out / 128), ceil(size / 128)), 2.0**-9, device="cuda")
    return Codes(values.view(torch.float8_e4m3fn), scales, (128, 128), True)


def lanes(experts_: int, out: int, size: int) -> Lanes:
    values = torch.empty(experts_, out, size // 4, dtype=torch.int16, device="cuda").random_(-32768, 32768)
    scales = torch.randint(4, 8, (experts_, size // 256, out, 2, 4), dtype=torch.uint8, device="cuda")
    return Lanes(values, scales, torch.full((experts_, out), 2.0**-8, device="cuda"))


def linears(tokens: int) -> Iterator[Case]:
    """Matrices of 8-bit codes, rows rounded beforehand."""
    shapes = [
        ("qkv_a", 1536, HIDDEN, LAYERS),
        ("q_b", HEADS * DIM, 1024, LAYERS),
        ("out_b", HIDDEN, 8192, LAYERS),
        ("index_q", 8192, 1024, CSA),
        ("shared_gate_up", 2 * FFN, HIDDEN, LAYERS),
        ("shared_down", HIDDEN, FFN, LAYERS),
    ]
    for name, out, size, per_step in shapes:
        matrices = [codes(out, size) for _ in range(copies(out * size))]
        x = numbers(tokens, size)
        rows = rounded(x, matrices[0])
        width = FFN if name == "shared_gate_up" else out
        fused = name == "shared_gate_up" and v4.fuses(x, matrices[0], exact=False)
        limit = 10.0 if fused else None
        if isinstance(rows, Rounded):
            calls = [lambda m=m, r=rows, c=limit: multiply(r, m, limit=c) for m in matrices]
        else:
            calls = [lambda m=m, r=rows: v4.linear(r, m) for m in matrices]
        moved = out * size + tokens * (size + 2 * width)
        peak = "fp8" if isinstance(rows, Rounded) else "bf16"
        yield Case(
            name, f"[{out}, {size}] e4m3", tokens, calls, moved, 2.0 * tokens * out * size, peak, per_step
        )
    stacks = [codes(8192, HIDDEN) for _ in range(copies(8192 * HIDDEN))]
    flat = v4.round_groups(numbers(tokens * 8, HIDDEN).view(tokens, 8, HIDDEN), stacks[0])
    yield Case(
        "out_a",
        "8 x [1024, 4096] e4m3",
        tokens,
        [lambda m=m: v4.multiply_groups(flat, m, groups=8) for m in stacks],
        8192 * HIDDEN + tokens * (8 * HIDDEN + 2 * 8192),
        2.0 * tokens * 8192 * HIDDEN,
        "fp8" if isinstance(flat, Rounded) else "bf16",
        LAYERS,
    )
    xs = [numbers(tokens, HIDDEN) for _ in range(copies(3 * tokens * HIDDEN))]
    matrix = codes(128, HIDDEN)
    yield Case(
        "round rows",
        f"[{tokens}, {HIDDEN}]",
        tokens,
        [lambda x=x: rounded(x, matrix) for x in xs],
        3.0 * tokens * HIDDEN,
        per_step=5 * LAYERS,
    )


def experts(tokens: int) -> Iterator[Case]:
    """Routed experts with e2m1 codes: grouping, gate and up with SwiGLU, down, the sum of choices."""
    gate_up, down = lanes(EXPERTS, 2 * FFN, HIDDEN), lanes(EXPERTS, HIDDEN, FFN)
    drawn = _drawn(tokens)
    distinct = sum(len(d.unique()) for d in drawn) / len(drawn)
    load = ceil(tokens * COUNT / EXPERTS)
    from splitserve.ops.kernels.launch import arch_of
    from splitserve.ops.kernels.tuned import tuned

    block = tuned("group_pairs", arch_of(drawn[0]), load)["BM"]
    local = range(EXPERTS)
    groups = [group_pairs(d, local=local, block=block, whole=True) for d in drawn]
    weights = torch.rand(tokens * COUNT, device="cuda")
    x = rounded(numbers(tokens, HIDDEN), gate_up, rows=load)
    pairs, note = tokens * COUNT, f"{distinct:.1f} distinct experts"
    inners = [_between(pairs, down, g) for g in groups]
    placed = isinstance(inners[0], Placed)
    note += ", rows by place between the products" if placed else ""
    peak = "fp8" if isinstance(x, Rounded) else "bf16"
    if tokens > 1:  # one token's pairs need no kernel
        yield Case(
            "group pairs",
            f"{pairs} pairs",
            tokens,
            [lambda d=d: group_pairs(d, local=local, block=block) for d in drawn],
            12.0 * pairs,
            per_step=LAYERS,
        )
    yield Case(
        "experts gate_up",
        "[4096, 4096] e2m1 + SwiGLU",
        tokens,
        [
            lambda g=g: multiply(
                x, gate_up, groups=g, share=COUNT, factors=weights, limit=10.0, placed=placed
            )
            for g in groups
        ],
        distinct * 2 * FFN * HIDDEN * 17 / 32 + tokens * HIDDEN + pairs * 2 * FFN,
        2.0 * pairs * 2 * FFN * HIDDEN,
        peak,
        LAYERS,
        note,
    )
    yield Case(
        "experts down",
        "[4096, 2048] e2m1",
        tokens,
        [lambda g=g, i=i: multiply_parts(i, down, groups=g) for g, i in zip(groups, inners, strict=True)],
        distinct * FFN * HIDDEN * 17 / 32 + pairs * (FFN + 2 * HIDDEN),
        2.0 * pairs * FFN * HIDDEN,
        peak,
        LAYERS,
        note,
    )
    yield _sum_of_choices(tokens, drawn[0])


def _drawn(tokens: int) -> list[torch.Tensor]:
    """Experts of each token, drawn a few times."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    sets = 6 if tokens <= FEW else 2
    numbers_ = [torch.rand(tokens, EXPERTS, device="cuda", generator=generator) for _ in range(sets)]
    return [n.argsort(-1)[:, :COUNT].int().contiguous() for n in numbers_]


def _between(pairs: int, down: Lanes, groups: Groups) -> torch.Tensor | Rounded:
    """Rows for `down`, as gate_up leaves them."""
    if many_rows(down, groups):
        return round_placed(numbers(len(groups.rows_of), FFN), groups, pairs, lanes=True)
    return rounded(numbers(pairs, FFN), down)


def _sum_of_choices(tokens: int, drawn: torch.Tensor) -> Case:
    """The last part of routed experts: each token's chosen results added up."""
    pairs, local = tokens * COUNT, range(EXPERTS)
    parts = [numbers(1, pairs, HIDDEN) for _ in range(copies(2.0 * pairs * HIDDEN) if tokens <= FEW else 1)]
    return Case(
        "sum of choices",
        f"{pairs} x {HIDDEN}",
        tokens,
        [lambda p=p: add_up(p, drawn, local=local, dtype=torch.float32) for p in parts],
        (2.0 * pairs + 4.0 * tokens) * HIDDEN,
        per_step=LAYERS,
    )


def plain_linears(tokens: int) -> Iterator[Case]:
    """Matrices of bf16 with float32 results: compressors, router, and the head for one token of each sequence."""
    last = min(tokens, FEW) if tokens <= FEW else 1
    shapes = [
        ("compressors ratio 4", 2048 + 512 + 64, HIDDEN, tokens, CSA),
        ("compressor ratio 128", 1024, HIDDEN, tokens, HCA),
        ("router", EXPERTS, HIDDEN, tokens, LAYERS),
        ("head", 129280, HIDDEN, last, 1),
    ]
    for name, out, size, rows, per_step in shapes:
        matrices = [numbers(out, size) for _ in range(copies(2.0 * out * size))]
        x = numbers(rows, size)
        yield Case(
            name,
            f"[{out}, {size}] bf16",
            tokens,
            [lambda m=m, x=x: v4.linear_f32(x, m) for m in matrices],
            2.0 * out * size + rows * (2 * size + 4 * out),
            2.0 * rows * out * size,
            "bf16",
            per_step,
        )


def streams(tokens: int) -> Iterator[Case]:
    count = copies(4 * 8192.0 * tokens + 24 * 4 * 4 * HIDDEN)
    old = [numbers(tokens, 4, HIDDEN) for _ in range(count)]
    fns = [torch.randn(24, 4 * HIDDEN, device="cuda") / 128 for _ in range(count)]
    base, scale = torch.randn(24, device="cuda"), torch.rand(3, device="cuda")
    norm = torch.rand(HIDDEN, device="cuda")  # layers have x normed in the same kernel
    how: dict[str, Any] = {"iters": 20, "eps": 1e-6, "norm_eps": 1e-6, "norm": norm}
    yield Case(
        "hc_pre",
        f"[{tokens}, 4, {HIDDEN}]",
        tokens,
        [lambda s=s, f=f: v4.hc_enter(s, f, base, scale, **how) for s, f in zip(old, fns, strict=True)],
        24 * 16 * HIDDEN + tokens * 10.0 * HIDDEN,
        2.0 * 3 * tokens * 24 * 4 * HIDDEN,
        per_step=2 * LAYERS,
    )
    y = numbers(tokens, HIDDEN)
    leaves = [v4.hc_enter(s, fns[0], base, scale, **how)[1] for s in old]
    yield Case(
        "hc_post",
        f"[{tokens}, 4, {HIDDEN}]",
        tokens,
        [lambda leave=leave: leave(y, None) for leave in leaves],
        tokens * 18.0 * HIDDEN,
        per_step=2 * LAYERS,
    )


def latents(count: int) -> torch.Tensor:
    """[units of 64, 64, 584] packed rows of moderate numbers."""
    view = torch.randint(0, 120, (ceil(count / 64), 64, LATENT), dtype=torch.uint8, device="cuda")
    view[..., 448:576] = numbers(len(view), 64, 64).view(torch.uint8)
    view[..., 576:] = 120
    return view


def attention(tokens: int) -> Iterator[Case]:
    decode = tokens <= FEW
    sets = 8 if decode else 1
    pool = latents(262_144)
    rows = WINDOW + tokens
    q, sink = numbers(tokens, HEADS, DIM), torch.zeros(HEADS, device="cuda")
    half = torch.rand(tokens, ROPE // 2, device="cuda")
    near = [_anywhere(pool, tokens, WINDOW) for _ in range(sets)]
    if not decode:  # a ring, and the tokens' own rows
        index = torch.randint(0, rows, (tokens, WINDOW), device="cuda")
        near = [Rows(pool.flatten(0, 1)[None, :rows], index)]
    context = CONTEXT if decode else tokens
    for ratio, seen, per_step in ((4, min(TOPK, context // 4), CSA), (128, context // 128, HCA)):
        far = [
            _anywhere(pool, tokens, seen) if decode else _of_pages(pool, tokens, seen, ratio) for _ in near
        ]
        keys = (
            sum(int((n.index >= 0).sum()) + int((f.index >= 0).sum()) for n, f in zip(near, far, strict=True))
            / sets
        )
        distinct = min(keys, pool.shape[0] * 64.0) if decode else min(keys, tokens * (1 + 1 / 4))
        yield Case(
            f"attend ratio {ratio}",
            f"64 heads, {WINDOW} + {seen} latents",
            tokens,
            [
                lambda n=n, f=f: v4.attend(
                    q, n, f, sink, scale=DIM**-0.5, rope_dim=ROPE, turn_back=(half, half)
                )
                for n, f in zip(near, far, strict=True)
            ],
            distinct * LATENT + tokens * HEADS * DIM * 4.0,
            4.0 * keys * HEADS * DIM,
            "bf16",
            per_step,
        )
    yield from _indexing(tokens, context, sets)


def _anywhere(pool: torch.Tensor, tokens: int, count: int) -> Rows:
    return Rows(pool, torch.randint(0, pool.shape[0] * 64, (tokens, count), device="cuda"))


def _of_pages(pool: torch.Tensor, tokens: int, seen: int, ratio: int) -> Rows:
    """What a first chunk's tokens see, of the entries that are complete at each of them."""
    view = pool.view(-1, 256 // ratio, LATENT)
    pages = torch.randperm(len(view), device="cuda")[: ceil(tokens / 256)]
    entry = torch.randint(0, tokens // ratio, (tokens, seen), device="cuda")
    limit = (torch.arange(tokens, device="cuda") + 1) // ratio
    entry.masked_fill_(torch.arange(seen, device="cuda") >= limit[:, None], -1)
    places = Places(pages[None], torch.zeros_like(limit), view.shape[1])
    return Rows(view, locate_entries(entry, places), Reach(pages))


def _indexing(tokens: int, context: int, sets: int) -> Iterator[Case]:
    decode = tokens <= FEW
    count, seqs = context // 4, tokens if decode else 1
    pages_of = ceil(count / 64)
    keys = torch.randint(0, 120, (max(seqs * pages_of, 32_768), 64, 132), dtype=torch.uint8, device="cuda")
    keys[..., 128:] = torch.ones(len(keys), 64, 1, device="cuda").view(torch.uint8)
    tables = [
        torch.randperm(len(keys), device="cuda")[: seqs * pages_of].view(seqs, pages_of) for _ in range(sets)
    ]
    visible = (
        torch.full((tokens,), count, device="cuda")
        if decode
        else (torch.arange(tokens, device="cuda") + 1) // 4
    )
    q, w = numbers(tokens, 64, 128), torch.randn(tokens, 64, device="cuda")
    lens = [1] * tokens if decode else [tokens]
    pairs = float(visible.sum())
    yield Case(
        "index scores",
        f"{count} keys",
        tokens,
        [lambda t=t: v4.index_scores(q, w, keys, t, visible, q_lens=lens) for t in tables],
        seqs * count * 132.0 + tokens * (64 * 128 * 2 + 4.0 * count),
        2.0 * pairs * 64 * 128,
        "bf16",
        CSA,
    )
    scores = [torch.randn(tokens, count, device="cuda") for _ in range(sets)]
    of = None if decode else torch.zeros(tokens, dtype=torch.int64, device="cuda")
    yield Case(
        "choose entries",
        f"{TOPK} of {count}",
        tokens,
        [
            lambda s=s, t=t: v4.choose_located(s, TOPK, Places(t, of, 64), visible)
            for s, t in zip(scores, tables, strict=True)
        ],
        4.0 * pairs + 8 * tokens * TOPK,
        per_step=CSA,
    )


def small(tokens: int) -> Iterator[Case]:
    half = torch.rand(tokens, ROPE // 2, device="cuda")
    weight = torch.rand(HIDDEN, device="cuda")
    xs = [numbers(tokens, HIDDEN) for _ in range(copies(4.0 * tokens * HIDDEN))]
    yield Case(
        "rms_norm",
        f"[{tokens}, {HIDDEN}]",
        tokens,
        [lambda x=x: v4.rms_norm(x, weight, 1e-6) for x in xs],
        4.0 * tokens * HIDDEN,
        per_step=2 * LAYERS,
    )
    qs = [numbers(tokens, HEADS, DIM) for _ in range(copies(4.0 * tokens * HEADS * DIM))]
    yield Case(
        "norm + rope of q",
        f"[{tokens}, {HEADS}, {DIM}]",
        tokens,
        [lambda x=x: v4.rms_norm_rotate(x, None, 1e-6, (half, half)) for x in qs],
        4.0 * tokens * HEADS * DIM,
        per_step=LAYERS,
    )
    ring = latents(64 * 1024)
    kv, unit, row = (
        numbers(tokens, DIM),
        torch.arange(tokens, device="cuda") // 64,
        torch.arange(tokens, device="cuda") % 64,
    )
    yield Case(
        "write latents",
        f"[{tokens}, {DIM}]",
        tokens,
        [lambda: v4.write_latents(ring, kv, unit, row, rope_dim=ROPE)] * 8,
        tokens * (2.0 * DIM + LATENT),
        per_step=LAYERS,
    )
    logits, bias = torch.randn(tokens, EXPERTS, device="cuda"), torch.randn(EXPERTS, device="cuda")
    yield Case(
        "route",
        f"{COUNT} of {EXPERTS}",
        tokens,
        [lambda: v4.route(logits, bias, count=COUNT, scale=1.5)] * 8,
        tokens * (4.0 * EXPERTS + 12 * COUNT),
        per_step=LAYERS,
    )
    yield from _pooling(tokens)


def _pooling(tokens: int) -> Iterator[Case]:
    """As many windows as a quarter of the tokens complete."""
    n = max(1, tokens // 4)
    fresh = torch.randn(max(tokens, 4), 2048, device="cuda")
    state = torch.randn(64, 8, 1024, device="cuda")
    at = torch.arange(n * 4, device="cuda").view(n, 4) % len(fresh)
    zero = torch.zeros(n, dtype=torch.int64, device="cuda")
    plan = v4.Windows(
        4, zero, at, at, at % 8, torch.ones(n, dtype=torch.bool, device="cuda"), zero, zero, zero
    )
    yield Case(
        "pool windows",
        f"{n} of ratio 4",
        tokens,
        [lambda: v4.pool_windows(fresh, state[:, :4], state, plan)] * 8,
        n * (8 * 4 * 1024.0 + 4 * 512),
        per_step=CSA,
    )
