"""One token for each row of logits: the best, or a draw with Gumbel noise from the engine's generator.

    noise[key, token] = -log(-log(u)),  u = the top 52 bits of SplitMix64 at counter `token` of stream `key`, centred

Rows are cut into parts of which each gives its best; the best of those, and of equals the first, is the row's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splitserve.ops.kernels.counts import cdiv, next_power_of_2
from splitserve.ops.kernels.launch import launch
from splitserve.ops.triton.digest import GOLDEN, _down, _mixed
from splitserve.ops.triton.overlap import follow

PART = 4096


@triton.jit
def best_of_part(
    logits,  # [rows, vocab] float32
    temperatures,  # [rows] float32; 0: no noise
    keys,  # [rows] int64
    values,  # [rows, parts] float32
    tokens,  # [rows, parts] int64
    vocab,
    BD: tl.constexpr,
):  # fmt: skip
    # grid: [rows, parts]
    follow()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * BD + tl.arange(0, BD)
    x = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf"))
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        z = _mixed(tl.load(keys + row) + (token + 1).to(tl.int64) * GOLDEN)
        u = (_down(z, 12).to(tl.float64) + 0.5) * (2.0**-52)
        x = x / temperature - tl.log((-tl.log(u)).to(tl.float32))
        x = tl.where(token < vocab, x, float("-inf"))
    at = row * tl.num_programs(1) + part
    best = tl.max(x, 0)
    tl.store(values + at, best)
    tl.store(tokens + at, tl.min(tl.where(x == best, token, 2147483647), 0).to(tl.int64))


@triton.jit
def best_of_parts(
    values, tokens,  # [rows, parts]
    out,  # [rows] int64
    parts,
    BP: tl.constexpr,
):  # fmt: skip
    # grid: [rows]
    follow()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BP)
    value = tl.load(values + row * parts + part, mask=part < parts, other=float("-inf"))
    token = tl.load(tokens + row * parts + part, mask=part < parts, other=9223372036854775807)
    tl.store(out + row, tl.min(tl.where(value == tl.max(value, 0), token, 9223372036854775807), 0))


def draw(
    logits: torch.Tensor,  # [rows, vocab] float32; -inf is never drawn
    temperatures: torch.Tensor,  # [rows] float32; 0 takes the best token, the lowest id on a tie
    keys: torch.Tensor,  # [rows] int64: random_key of the token to choose
) -> torch.Tensor:  # [rows] int64
    """argmax(logits / temperature + noise(key)), as engine.sampler does it."""
    logits = logits.contiguous()
    rows, vocab = logits.shape
    parts = cdiv(vocab, PART)
    values = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    launch(
        best_of_part, (rows, parts), logits, temperatures, keys, values, tokens, vocab, BD=PART, num_warps=8
    )
    launch(best_of_parts, (rows,), values, tokens, out, parts, BP=next_power_of_2(parts), num_warps=1)
    return out
