"""The feed-forward part: a few routed experts for each token and one shared by all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from . import kernels


@dataclass(frozen=True)
class Experts:
    """A rank holds a slice of every expert, or some experts whole; either way its sum is a part of the result."""

    gate: torch.Tensor  # [num_experts, hidden], whole on every rank
    gate_bias: torch.Tensor | None  # [num_experts] float32
    experts_of_token: torch.Tensor | None  # [vocab, count] int32: routes by token id instead of by score
    gate_up: kernels.Weight  # [local experts, 2 * ffn, hidden]
    down: kernels.Weight  # [local experts, hidden, ffn]
    shared_gate_up: kernels.Weight
    shared_down: kernels.Weight
    local: range
    count: int
    route_scale: float
    limit: float
    ops: Any = kernels

    def __call__(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[T, hidden] and the tokens' ids [T] -> [T, hidden]: this rank's part of the sum."""
        ops = self.ops

        def shared() -> torch.Tensor:
            y: torch.Tensor = ops.expert_ffn(x, self.shared_gate_up, self.shared_down, self.limit)
            return y

        own = ops.beside(x.shape[0], shared)
        chosen = self._route(x, tokens)
        routed = self.gate_up, self.down
        whole = len(self.local) == len(self.gate)
        y: torch.Tensor = ops.mix_onto(
            x, routed, chosen, own, local=self.local, whole=whole, limit=self.limit
        )
        return y

    def _route(self, x: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ops = self.ops
        logits = ops.linear_f32_parts(x, self.gate)
        if self.experts_of_token is not None:
            return ops.route_by_token(logits, self.experts_of_token, tokens, scale=self.route_scale)
        if self.gate_bias is None:
            raise ValueError("a router needs a bias or a table of tokens")
        return ops.route(logits, self.gate_bias, count=self.count, scale=self.route_scale)
