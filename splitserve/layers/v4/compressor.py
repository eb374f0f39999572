"""A compressor: turns the tokens of each completed window into one normed and rotated entry, and keeps what is open.

Layers of ratio 4 have two, for latents and for index keys; they differ in width and in the states they use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from splitserve.layers.forward import Forward

from . import kernels as ops
from .plan import Compression


@dataclass(frozen=True)
class Compressor:
    weight: (
        torch.Tensor
    )  # [row width, hidden]: a token's whole row in one product, see ops/ref/v4/compress.py
    bias: torch.Tensor  # [ratio, row width] float32: by position in the window, zero under kv
    norm: torch.Tensor  # [w] float32
    eps: float
    state: str  # "c4", "index" or "c128": names NAME_pending and NAME_carry too
    layer: int

    def __call__(self, x: torch.Tensor, fwd: Forward, plan: Compression) -> torch.Tensor:
        """[T, hidden] -> [N, w] float32: the entries that this step completes, in the order of plan.windows."""
        ratio = plan.windows.ratio
        rows = ops.linear_f32(x, self.weight) + self.bias[fwd.positions % ratio]
        pending = fwd.states.view(f"{self.state}_pending", self.layer)[:, 0]
        carry = fwd.states.view(f"{self.state}_carry", self.layer)[:, 0] if plan.save_carry else None
        pooled = ops.pool_windows(rows, pending, carry, plan.windows) if len(plan.windows) else None
        _save(pending, rows[:, -pending.shape[-1] :], plan.save_pending)
        if carry is not None and plan.save_carry is not None:
            _save(carry, rows[:, : carry.shape[-1]], plan.save_carry)
        if pooled is None:
            return rows.new_empty(0, len(self.norm))
        entries = ops.rms_norm(pooled.to(x.dtype), self.norm, self.eps)
        return ops.rotate_tail(entries[:, None], plan.entry_table)[:, 0]


def bias_rows(
    ape: torch.Tensor,  # [ratio, halves * w] float32, as in the file
    halves: int,
) -> torch.Tensor:  # [ratio, halves * 2 * w]: for each half, zeros under kv and the bias under score
    parts = ape.unflatten(1, (halves, -1))
    return torch.cat((torch.zeros_like(parts), parts), dim=-1).flatten(1)


def _save(view: torch.Tensor, rows: torch.Tensor, save: ops.Saves) -> None:
    ops.write_rows(view, rows[save.token], save.slot, save.row)
