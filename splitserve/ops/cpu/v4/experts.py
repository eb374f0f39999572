"""Experts whose weights are widened by a compiled loop: twins of ops/ref/v4/experts.py."""

from __future__ import annotations

from functools import partial

from splitserve.ops.ref.v4 import experts as ref

from .quant import linear

expert_ffn = partial(ref.expert_ffn, product=linear)
mix_experts = partial(ref.mix_experts, product=linear)
