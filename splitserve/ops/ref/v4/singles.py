"""A compressor in a step where every sequence has one token: keep the token's row, and close the window it completes.

    row + bias ──▶ pending (and carry)        of every token
               └─▶ pool ─▶ norm ─▶ rotate ─▶ entry in its page        of tokens that complete a window

Everything comes from positions and slots on the device, so that such a step is the same for the host whatever the
positions are, and can be replayed from a CUDA graph. Places of a batch that nobody uses have slot -1: nothing of them
is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .compress import Windows, pool_windows
from .dense import Table, rms_norm, rotate_tail
from .rows import encode_keys, encode_latents, write_rows


@dataclass(frozen=True)
class Singles:
    """A step of one token for each sequence; B of them."""

    positions: torch.Tensor  # [B] int64
    slots: torch.Tensor  # [B] int64; -1: nobody's place
    pages: torch.Tensor  # [B, max_pages] int64
    page_tokens: int


@dataclass(frozen=True)
class Gate:
    """The parameters of a compressor behind its product."""

    bias: torch.Tensor  # [ratio, row] float32, zero under kv
    norm: torch.Tensor  # [w] float32
    eps: float

    @property
    def ratio(self) -> int:
        return len(self.bias)


@dataclass(frozen=True)
class Store:
    """Where one compressor of one layer keeps things."""

    pending: torch.Tensor  # [slots, ratio, 2 * w] float32
    carry: torch.Tensor | None  # [slots, 2 * ratio, 2 * w] float32; ratio 4 only
    entries: torch.Tensor  # [pages, rows_per_page, width]: bytes where packed
    keys: bool  # entries are index keys, else latents


def absorb(
    rows: torch.Tensor,  # [B, row] float32: the compressor's product, without the bias
    gate: Gate,
    store: Store,
    step: Singles,
    *,
    table: Table,  # [B, rope_dim / 2]: of each token's window (`entry_positions`)
    dtype: torch.dtype,  # of activations: what pooled numbers, and normed ones, are rounded to
) -> None:
    plan = windows_of_singles(step, gate.ratio)
    rows = rows + gate.bias[step.positions % gate.ratio]
    pooled = pool_windows(rows, store.pending, store.carry, plan)
    for state, part in (
        (store.pending, rows[:, -store.pending.shape[-1] :]),
        (store.carry, rows[:, : store.pending.shape[-1]]),
    ):
        if state is not None:
            write_rows(state, part, step.slots, step.positions % state.shape[1])
    entries = rms_norm(pooled.to(dtype), gate.norm, gate.eps)
    entries = rotate_tail(entries[:, None], table)[:, 0]
    rope_dim = 2 * table[0].shape[-1]
    encoded = (
        encode_keys(entries, store.entries)
        if store.keys
        else encode_latents(entries, rope_dim, store.entries)
    )
    write_rows(store.entries, encoded, plan.page, plan.row)


def entry_positions(
    positions: torch.Tensor,  # [B] int64
    ratio: int,
) -> torch.Tensor:  # [B] int64: of the first token of each token's window, where its entry is rotated to
    return positions - positions % ratio


def windows_of_singles(step: Singles, ratio: int) -> Windows:
    """The window that each token is in. Where it does not complete it, or is nobody's, the page is -1."""
    position = step.positions
    window, place = position // ratio, position % ratio
    done = (place == ratio - 1) & (step.slots >= 0)
    per_page = step.page_tokens // ratio
    inside = torch.arange(ratio, device=position.device)
    token = torch.arange(len(position), device=position.device)
    page = step.pages.gather(1, (window // per_page)[:, None])[:, 0]
    return Windows(
        ratio=ratio,
        slot=step.slots.clamp(min=0),
        own=torch.where(inside == place[:, None], token[:, None], -1),
        before=torch.full((len(position), ratio), -1, device=position.device),
        before_row=(window[:, None] * ratio - ratio + inside) % (2 * ratio),
        has_before=window > 0,
        position=window * ratio,
        page=page.masked_fill(~done, -1),
        row=window % per_page,
    )
