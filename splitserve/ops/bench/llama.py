"""Llama-3-8B on one GPU, kernel by kernel: 32 layers, 32 heads of 128 over 8; context 8,192 tokens in decoding."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from splitserve.ops import triton as ops

from .case import Case, copies, numbers

HIDDEN, HEADS, KV, DIM, FFN, LAYERS = 4096, 32, 8, 128, 14336, 32
CONTEXT, PAGE, FEW = 8192, 256, 64


def cases(tokens: int) -> Iterator[Case]:
    for name, out, size in (
        ("qkv", 6144, HIDDEN),
        ("out", HIDDEN, HIDDEN),
        ("gate_up", 2 * FFN, HIDDEN),
        ("down", HIDDEN, FFN),
    ):
        matrices = [numbers(out, size) for _ in range(copies(2.0 * out * size))]
        x = numbers(tokens, size)
        yield Case(
            f"llama {name}",
            f"[{out}, {size}] bf16",
            tokens,
            [lambda m=m, x=x: ops.linear(x, m) for m in matrices],
            2.0 * (out * size + tokens * (out + size)),
            2.0 * tokens * out * size,
            "bf16",
            LAYERS,
        )
    yield from _attention(tokens)
    weight = numbers(HIDDEN)
    xs = [numbers(tokens, HIDDEN) for _ in range(copies(8.0 * tokens * HIDDEN))]
    yield Case(
        "add_rms_norm",
        f"[{tokens}, {HIDDEN}]",
        tokens,
        [lambda x=x: ops.add_rms_norm(x, xs[0], weight, 1e-5) for x in xs],
        8.0 * tokens * HIDDEN,
        per_step=2 * LAYERS,
    )
    gates = [numbers(tokens, 2 * FFN) for _ in range(copies(6.0 * tokens * FFN))]
    yield Case(
        "swiglu",
        f"[{tokens}, {2 * FFN}]",
        tokens,
        [lambda g=g: ops.swiglu(g) for g in gates],
        6.0 * tokens * FFN,
        per_step=LAYERS,
    )
    half = torch.rand(tokens, 1, DIM // 2, device="cuda")
    turning = [numbers(tokens, HEADS + KV, DIM) for _ in range(copies(4.0 * tokens * 40 * DIM))]
    yield Case(
        "rotate",
        f"[{tokens}, 40, {DIM}]",
        tokens,
        [lambda x=x: ops.rotate(x, (half, half)) for x in turning],
        4.0 * tokens * 40 * DIM,
        per_step=LAYERS,
    )


def _attention(tokens: int) -> Iterator[Case]:
    decode = tokens <= FEW
    seqs, length = (tokens, CONTEXT) if decode else (1, tokens)
    pages_of = -(-length // PAGE)
    pages = seqs * pages_of
    layers = copies(4.0 * seqs * length * KV * DIM) if decode else 1
    slab = torch.randn(
        pages, layers, KV, PAGE, 2 * DIM, device="cuda", dtype=torch.bfloat16
    )  # layers inside a page
    table = torch.randperm(pages, device="cuda").view(seqs, pages_of)
    q = numbers(tokens, HEADS, DIM)
    if decode:
        plan = ops.plan_decode(table, [length] * seqs, PAGE)
        yield Case(
            "decode attention",
            f"{length} tokens, {HEADS} heads over {KV}",
            tokens,
            [lambda i=i: ops.attend_decode(q, slab[:, i], plan, DIM**-0.5) for i in range(layers)],
            4.0 * seqs * length * KV * DIM,
            4.0 * seqs * length * HEADS * DIM,
            "bf16",
            LAYERS,
        )
    else:
        chunk = ops.plan_prefill(table[0], length, slice(0, tokens), PAGE)
        yield Case(
            "prefill attention",
            f"{length} tokens, {HEADS} heads over {KV}",
            tokens,
            [lambda: ops.attend_prefill(q, slab[:, 0], chunk, DIM**-0.5)],
            4.0 * length * KV * DIM + 4.0 * tokens * HEADS * DIM,
            2.0 * length * length * HEADS * DIM,
            "bf16",
            LAYERS,
        )
    k, v = numbers(tokens, KV, DIM), numbers(tokens, KV, DIM)
    at = torch.arange(tokens, device="cuda")
    page, row = (at % pages, at * 0) if decode else (table[0][at // PAGE], at % PAGE)
    yield Case(
        "write_rows",
        f"[{tokens}, {KV}, {2 * DIM}]",
        tokens,
        [lambda i=i: ops.write_rows(slab[:, i], k, v, page, row) for i in range(layers)],
        8.0 * tokens * KV * DIM,
        per_step=LAYERS,
    )
