"""The catalogue's case of routed experts in eight bits: few rows and many, codes in both orders, of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from splitserve.ops.kernels.archs import FIRST_FP8
from splitserve.ops.triton import grouping, v4
from splitserve.ops.triton.multiply import Lanes, Words, many_rows, multiply
from splitserve.ops.triton.rounding import Rounded, quantise_rows, round_placed

from .meta import F32, HIDDEN, I32, lanes, meta, words


def experts_eight(arch: int) -> None:
    """Decoding, split and whole, and prompts, of one rank of several; the form for few matrices; `multiplies_right`."""
    if arch < FIRST_FP8:
        return
    eight = partial(words, eight=True)
    for ranks, tokens in [
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
        (2, 32),
        *((ranks, tokens) for ranks in (4, 8) for tokens in (1, 32)),
        *((ranks, 2048) for ranks in (1, 2, 4, 8)),
    ]:
        _mixed(lanes, tokens, ranks)
    _mixed(eight, 2048, 1)
    for make, block in ((eight, 64), (lanes, 64), (lanes, 16)):
        groups = grouping.group_pairs(meta(6, 1, dtype=I32), local=range(2), block=block)
        small, order = make(2, 256, 512), make is lanes
        if many_rows(small, groups):
            x: Rounded = round_placed(meta(len(groups.rows_of), 512), groups, 6, lanes=order)
        else:
            x = quantise_rows(meta(6, 512), lanes=order)
        multiply(x, small, groups=groups)


def _mixed(make: Callable[[int, int, int], Lanes | Words], tokens: int, ranks: int) -> None:
    gate_up, down = make(256, 4096 // ranks, HIDDEN), make(256, HIDDEN, 2048 // ranks)
    v4.mix_experts(
        meta(tokens, HIDDEN), gate_up, down, meta(tokens, 6, dtype=F32), meta(tokens, 6, dtype=I32),
        local=range(256), limit=10.0, exact=False,
    )  # fmt: skip
