"""Tries tile sizes of V4's attention; as tune.py.

python benchmarks/ops/tune_attend.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from splitserve.ops.bench.timing import time_calls
from splitserve.ops.ref.v4.sparse import Rows
from splitserve.ops.triton.v4 import sparse


def candidates(tokens: int) -> Iterator[dict[str, int]]:
    few = tokens <= 16
    rates = ((16, 4, 1), (16, 4, 2), (64, 4, 1)) if few else ((64, 4, 1), (64, 4, 2), (64, 8, 2), (32, 4, 2))
    mixes = ((64, 4, 3), (16, 4, 3), (64, 4, 4)) if few else ((64, 4, 3), (64, 4, 2))
    for block in (32, 64):
        for bh, warps, stages in rates:
            for mix_bh, mix_warps, mix_stages in mixes:
                for fill in (2, 8) if few else (1, 2):
                    yield {"BK": block, "FILL": fill, "RATE_BH": bh, "RATE_WARPS": warps, "RATE_STAGES": stages,
                           "MIX_BH": mix_bh, "MIX_WARPS": mix_warps, "MIX_STAGES": mix_stages}  # fmt: skip


def main() -> None:
    print("attend")
    pool = torch.randint(0, 120, (8192, 64, 584), dtype=torch.uint8, device="cuda")
    rope = torch.randn(8192, 64, 64, device="cuda").bfloat16()
    pool[..., 448:576] = rope.view(torch.uint8)
    pool[..., 576:] = 120
    sink = torch.zeros(64, device="cuda")
    for tokens, far_rows in (
        (1, 512),
        (1, 32),
        (8, 512),
        (16, 512),
        (64, 512),
        (64, 64),
        (2048, 512),
        (2048, 64),
    ):
        found = []
        sets = 8 if tokens < 100 else 2
        q = torch.randn(tokens, 64, 512, device="cuda").bfloat16()
        near = [Rows(pool, torch.randint(0, 8192 * 64, (tokens, 128), device="cuda")) for _ in range(sets)]
        far = [
            Rows(pool, torch.randint(0, 8192 * 64, (tokens, far_rows), device="cuda")) for _ in range(sets)
        ]
        for config in candidates(tokens):
            sparse.tuned = lambda *_, c=config: dict(c)
            t = time_calls(
                [
                    lambda n=n, f=f: sparse.attend(q, n, f, sink, scale=512**-0.5, rope_dim=64)
                    for n, f in zip(near, far, strict=True)
                ],
                replays=7,
            )
            found.append((t.us, config))
        size = tokens * (128 + far_rows) * 584
        bound = max(size / 4.2e6, tokens * (128 + far_rows) * 64 * 512 * 4 / 790e6, 0.7)
        for us, config in sorted(found, key=lambda r: r[0])[:4]:
            print(
                f"attend {tokens} {far_rows} {us:.2f} us bound {bound:.2f} {bound / us:.2f} {config}",
                flush=True,
            )


if __name__ == "__main__":
    main()
