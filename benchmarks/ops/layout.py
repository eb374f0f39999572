"""DeepSeek-V4 decode attention on slab pages against per-layer pages, for docs/decisions/0002-slab-pages.md.

    slab       a page holds the rows of all layers; a layer's rows of neighbouring pages are a page apart
    per layer  each layer has its own memory; rows of neighbouring pages lie side by side
    padded     as slab, with latents of 592 bytes instead of 584, so that rows start at multiples of 16

Pages of a request are scattered at random in both. What differs is the stride only: the kernels are those that serve.

    python benchmarks/ops/layout.py [BATCH,CONTEXT ...]
"""

from __future__ import annotations

import sys

import torch

from splitserve.ops.bench.timing import time_calls
from splitserve.ops.ref.v4.sparse import Rows
from splitserve.ops.triton.v4.indexer import index_scores
from splitserve.ops.triton.v4.sparse import attend

DEVICE = "cuda"
LATENT, INDEX, HEADS, DIM, WINDOW, TOPK = 584, 132, 64, 512, 128, 512
CSA_LAYERS, HCA_LAYERS, LAYERS = 21, 20, 43


def views(kind: str, pages: int, page_tokens: int) -> dict[str, list[torch.Tensor]]:
    """By state, a view [pages, rows, width] for each layer."""
    fields = {"c4": (page_tokens // 4, LATENT, CSA_LAYERS), "index": (page_tokens // 4, INDEX, CSA_LAYERS)}
    fields["c128"] = (page_tokens // 128, LATENT, HCA_LAYERS)
    stride = {LATENT: 592 if kind == "padded" else LATENT, INDEX: INDEX}
    if kind == "per layer":
        return {n: [fill(torch.empty(pages, r, w, dtype=torch.uint8, device=DEVICE)) for _ in range(k)]
                for n, (r, w, k) in fields.items()}  # fmt: skip
    size = -(-sum(r * stride[w] * k for r, w, k in fields.values()) // 64) * 64
    slab = torch.empty(pages * size, dtype=torch.uint8, device=DEVICE)
    result, offset = {}, 0
    for name, (rows, width, count) in fields.items():
        result[name] = []
        for _ in range(count):
            result[name].append(fill(slab.as_strided((pages, rows, width), (size, stride[width], 1), offset)))
            offset += rows * stride[width]
    return result


def windows(kind: str, batch: int) -> list[torch.Tensor]:
    """A view [batch, WINDOW, width] for each layer."""
    width = 592 if kind == "padded" else LATENT
    row = width * (1 if kind == "per layer" else LAYERS)
    slab = torch.empty(LAYERS * batch * WINDOW * width, dtype=torch.uint8, device=DEVICE)
    step = batch * WINDOW * width if kind == "per layer" else width
    return [
        fill(slab.as_strided((batch, WINDOW, LATENT), (WINDOW * row, row, 1), i * step))
        for i in range(LAYERS)
    ]


def fill(view: torch.Tensor) -> torch.Tensor:
    """Codes of moderate numbers, scales of about one, rotary numbers in bf16."""
    pages, rows, width = view.shape
    for i in range(0, pages, 4096):
        part = view[i : i + 4096]
        part[:] = torch.randint(0, 120, part.shape, dtype=torch.uint8, device=DEVICE)
        if width == LATENT:
            rope = torch.randn(len(part), rows, 64, device=DEVICE, dtype=torch.bfloat16)
            part[..., 448:576] = rope.view(torch.uint8)
            part[..., 576:] = 120
        else:
            part[..., 128:] = torch.ones(len(part), rows, 1, device=DEVICE).view(torch.uint8)
    return view


def measure(kind: str, page_tokens: int, batch: int, context: int) -> list[tuple[str, float, float, float]]:
    """(kernel, microseconds, spread, bytes that it must read) for one layer."""
    per_seq = -(-context // page_tokens)
    pages = batch * per_seq
    state = views(kind, pages, page_tokens)
    table = torch.randperm(pages, device=DEVICE).view(batch, per_seq)
    rings = windows(kind, batch)
    near_index = torch.arange(batch * WINDOW, device=DEVICE).view(batch, WINDOW)
    q = torch.randn(batch, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    sink = torch.zeros(HEADS, device=DEVICE)

    def flat(entries: torch.Tensor, ratio: int) -> torch.Tensor:
        rows = page_tokens // ratio
        return table.gather(1, entries // rows) * rows + entries % rows

    count = context // 4
    chosen = torch.stack([torch.randperm(count, device=DEVICE)[:TOPK] for _ in range(batch)])
    csa = flat(chosen, 4)
    hca = flat(torch.arange(context // 128, device=DEVICE).expand(batch, -1), 128)
    index_q = torch.randn(batch, 64, 128, device=DEVICE, dtype=torch.bfloat16)
    weights = torch.randn(batch, 64, device=DEVICE)
    visible = torch.full((batch,), count, device=DEVICE)

    def run(view: torch.Tensor, ring: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return attend(q, Rows(ring, near_index), Rows(view, index), sink, scale=DIM**-0.5, rope_dim=64)

    rows = WINDOW * LATENT * batch
    cases = {
        "csa": ([lambda v=v, r=r: run(v, r, csa) for v, r in zip(state["c4"], rings, strict=False)],
                rows + csa.numel() * LATENT),
        "hca": ([lambda v=v, r=r: run(v, r, hca) for v, r in zip(state["c128"], rings, strict=False)],
                rows + hca.numel() * LATENT),
        "index": ([lambda v=v: index_scores(index_q, weights, v, table, visible, q_lens=[1] * batch)
                   for v in state["index"]], batch * count * INDEX),
    }  # fmt: skip
    result = []
    for name, (calls, size) in cases.items():
        t = time_calls(calls)
        result.append((name, t.us, t.spread, size))
    return result


def main() -> None:
    given = [tuple(map(int, word.split(","))) for word in sys.argv[1:]]
    shapes = given or [(1, 131072), (16, 8192), (16, 131072), (64, 8192)]
    print("| batch | context | kernel | pages | page_tokens | us a layer | spread | GB/s |\n|" + "---|" * 8)
    for batch, context in shapes:
        for kind in ("per layer", "slab", "padded"):
            for page_tokens in (128, 256, 512) if kind != "padded" else (256,):
                for name, us, spread, size in measure(kind, page_tokens, batch, context):
                    print(f"| {batch} | {context} | {name} | {kind} | {page_tokens} | {us:.2f} | {spread:.1%} |"
                          f" {size / us / 1e3:.0f} |", flush=True)  # fmt: skip
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
