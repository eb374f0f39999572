"""Compiles every loop before the first request needs it: each kernel is called once on a few numbers.

Ten to twenty seconds on a machine that has not seen this version, a fraction of one on a machine that has.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import attention, decoder, dense, rope
from .llvm import LANES


def prepare(progress: Callable[[float], None]) -> None:
    """Afterwards no call compiles. `progress` gets 0..1."""
    x, weight = torch.zeros(1, LANES), torch.zeros(LANES, LANES)
    bias, gate_up = torch.zeros(LANES), torch.zeros(1, 2 * LANES)
    heads = torch.zeros(1, 2, LANES)
    view = torch.zeros(1, 1, 1, 2 * LANES)
    zero = torch.zeros(1, dtype=torch.int64)
    plan = attention.plan_decode(zero[None], [1], 1)
    calls: list[Callable[[], object]] = [
        lambda: dense.linear(x, weight, bias),
        lambda: dense.rms_norm(x, bias, 1e-5),
        lambda: dense.add_rms_norm(x, x, bias, 1e-5),
        lambda: dense.swiglu(gate_up),
        lambda: rope.rotate(heads, rope.rope_table(zero, torch.zeros(LANES // 2))),
        lambda: attention.write_rows(view, heads[:, :1], heads[:, 1:], zero, zero),
        lambda: attention.attend_decode(heads, view, plan, 1.0),
        lambda: _layer(zero, view),
    ]
    for i, call in enumerate(calls):
        progress(i / len(calls))
        call()
    progress(1.0)


def _layer(zero: torch.Tensor, view: torch.Tensor) -> None:
    """One head, one token, a layer as small as can be."""
    square, wide = torch.zeros(LANES, LANES), torch.zeros(3 * LANES, LANES)
    norm, angle = torch.zeros(LANES), torch.zeros(1, LANES // 2)
    layer = decoder.LayerWeights((wide, square, wide[: 2 * LANES], square), (norm, norm))
    rows = decoder.Rows(zero[None], (0,), (1,), zero, zero, 1)
    run = decoder.Decoder([layer], heads=1, kv_heads=1, size=LANES, eps=1e-5).begin(
        norm[None], (angle, angle), rows
    )
    run.end(run.ffn(0, run.attention(0, view, None)))
