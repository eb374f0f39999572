"""Rotary frequencies, plain and stretched: a few numbers for each model, worked out once. Torch-free.

Sources: RoFormer (arXiv 2104.09864); linear interpolation (2306.15595); YaRN (2309.00071); LongRoPE (2402.13753);
Llama 3.1's banded scaling as in its released configuration. Computed in double precision and rounded by the caller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .config import Rope


@dataclass(frozen=True)
class Frequencies:
    """Angle of pair i at position p is `p * inverse[i]`; cos and sin are multiplied by `scale`."""

    inverse: tuple[float, ...]  # [head_dim / 2]
    scale: float = 1.0


def frequencies(rope: Rope, head_dim: int, max_len: int) -> Frequencies:
    """Frequencies of a model served up to `max_len` tokens.

    LongRoPE has two sets, for texts within the original length and beyond. State computed with one cannot be read with
    the other, so the choice follows from `max_len` once and not from each text.
    """
    plain = [rope.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    match rope.kind:
        case "linear":
            return Frequencies(tuple(f / rope.factor for f in plain))
        case "llama3":
            return Frequencies(tuple(_llama3(f, rope) for f in plain))
        case "yarn":
            return _yarn(plain, rope, head_dim)
        case "longrope":
            table = rope.long_factor if max_len > rope.original_len else rope.short_factor
            return Frequencies(_divide(plain, table), _longrope_scale(rope))
        case "divided":
            return Frequencies(_divide(plain, rope.divisors))
        case _:
            return Frequencies(tuple(plain))


def _divide(plain: list[float], table: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(f / d for f, d in zip(plain, table, strict=True))


def _llama3(frequency: float, rope: Rope) -> float:
    """Short waves stay, long ones are stretched by `factor`, those between are blended."""
    turns = rope.original_len * frequency / (2 * math.pi)  # full turns over the original context
    if turns > rope.high_freq_factor:
        return frequency
    if turns < rope.low_freq_factor:
        return frequency / rope.factor
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return frequency * (kept + (1 - kept) / rope.factor)


def _yarn(plain: list[float], rope: Rope, head_dim: int) -> Frequencies:
    """Pairs that turn more than beta_fast times keep their frequency, less than beta_slow take factor, ramp between."""

    def pair_of(turns: float) -> float:
        return head_dim * math.log(rope.original_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    ramp = [min(max((i - low) / width, 0.0), 1.0) for i in range(len(plain))]
    inverse = tuple(f / rope.factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True))
    return Frequencies(inverse, _yarn_scale(rope))


def _yarn_scale(rope: Rope) -> float:
    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _longrope_scale(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_len))
