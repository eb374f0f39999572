"""All that a layer may read during one forward pass. Passed down by hand; there is no global context.

Sequences come in step order with one-token sequences (decoding) first, so that attention can treat them as one batch.
Token rows of sequence i are [q_start[i], q_start[i + 1]); its state covers kv_len[i] tokens after this pass.

A pass may be made for any lengths (`capacity`): one token for each sequence, and nothing of it known to the host but
how many sequences there are. The same kernels then serve every step of that size, which is what a CUDA graph replays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch


class Group(Protocol):
    """A tensor parallel group, seen from one rank. A group of one does nothing."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor: ...

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor: ...

    def mailbox(self, x: torch.Tensor) -> Any:
        """What a kernel can sum rows like `x` with by itself (ops/triton/exchange.py); None: by all_reduce only."""
        ...


class States(Protocol):
    """Typed views of this rank's slabs (kv/pool.py)."""

    def view(self, name: str, layer: int) -> torch.Tensor:
        """[units, local_pieces, rows_per_unit, row_elements], strided; units are pages or slots by the growth."""
        ...


class Mark(NamedTuple):
    """Keep the slot state of a point inside this pass: `unit` holds what the sequence's slot held before the pass, and
    is to hold in the end what it held after `stop` tokens, were there no more. Models with slots write it beside the
    slot itself.
    """

    sequence: int
    stop: int  # start of the pass <= stop <= kv_len
    unit: int


class Cut(Protocol):
    """Where a pass is taken apart: `work` reads the state and may ask how long sequences are, all else asks only how
    many tokens there are, and can be recorded (engine/pieces.py).
    """

    def __call__(
        self, made: Any, work: Callable[[Any, Forward, Any, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """`work(made, fwd, step, out)`, shaped like made[0]: in `out` or anywhere else. `made` is a tuple of tensors
        [T, ...] or None, `step` what the model works out once for all layers of a pass.
        """
        ...


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Forward:
    tokens: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64, absolute
    logit_rows: torch.Tensor  # [num_logits] int64: which token rows need logits
    q_start: torch.Tensor  # [num_seqs + 1] int64, on the host too:
    q_lens: tuple[int, ...]  # tokens of each sequence in this pass
    kv_lens: tuple[int, ...]  # tokens in the state after this pass; empty where there is a capacity
    num_decode: int  # the first num_decode sequences have one token each
    pages: torch.Tensor  # [num_seqs, max_pages] int64: page unit ids, rows padded with 0
    slots: torch.Tensor  # [num_seqs] int64: slot unit ids, or empty; with a capacity -1 for nobody's place
    write_page: (
        torch.Tensor
    )  # [num_tokens] int64: page unit that takes the token's row; -1 for nobody's place
    write_row: torch.Tensor  # [num_tokens] int64: token's index inside that page
    page_tokens: int
    states: States
    tp: Group
    between_layers: Callable[[], None] = _nothing  # transfers are polled here
    marks: tuple[Mark, ...] = ()
    capacity: int = (
        0  # the longest that any sequence of such a pass may be, this token included; 0: kv_lens say
    )
