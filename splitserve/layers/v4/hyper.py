"""Hyper-connections around a sub-layer: four residual streams become its input and take its output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from splitserve.layers.forward import Group

from . import kernels


@dataclass(frozen=True)
class HyperConnection:
    """Replicated on every rank: a sub-layer gives this rank's part of its output, and what is summed over the group is
    that, never the streams.
    """

    fn: torch.Tensor  # [2n + n * n, n * hidden] float32
    base: torch.Tensor
    scale: torch.Tensor
    norm: torch.Tensor  # [hidden] float32: of the sub-layer's input
    iters: int
    hc_eps: float
    eps: float
    tp: Group
    ops: Any = kernels

    def __call__(
        self, streams: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """[T, n, hidden] -> [T, n, hidden]."""
        x, leave = self.ops.hc_enter(
            streams, self.fn, self.base, self.scale, iters=self.iters, eps=self.hc_eps, norm_eps=self.eps,
            norm=self.norm,
        )  # fmt: skip
        left: torch.Tensor = leave(sublayer(x), self.tp)
        return left


@dataclass(frozen=True)
class HyperHead:
    """The streams as one vector, normed: what the output head reads."""

    fn: torch.Tensor  # [n, n * hidden] float32
    base: torch.Tensor
    scale: torch.Tensor
    norm: torch.Tensor  # [hidden] float32
    hc_eps: float
    eps: float
    ops: Any = kernels

    def __call__(self, streams: torch.Tensor) -> torch.Tensor:
        """[T, n, hidden] -> [T, hidden]."""
        x = self.ops.hc_head(streams, self.fn, self.base, self.scale, eps=self.hc_eps, norm_eps=self.eps)
        return self.ops.rms_norm(x, self.norm, self.eps)
