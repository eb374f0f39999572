"""The compressor: softmax over the tokens of a window, for each channel by itself, pools them into one entry.

    ratio 128        entry i pools tokens 128 i .. 128 i + 127
    ratio 4          entry w pools half B of tokens 4 w .. 4 w + 3 and half A of the four before them

    a token's row    [kv | score]             for ratio 128
                     [kv A | score A | kv B | score B]   for ratio 4: the first half is carried, the second is pending

Scores have their position's bias already. Tokens of a window come from this step (`fresh`) or from the request's slot;
which, is worked out once for a step (`plan_windows`) and used by every layer. Alignment is by position in the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

CSA = 4


@dataclass(frozen=True)
class Windows:
    """The windows that this step's tokens complete, over all sequences; N of them, each of `ratio` tokens."""

    ratio: int
    slot: torch.Tensor  # [N] int64: slot unit of the sequence
    own: torch.Tensor  # [N, ratio] int64: the window's tokens as rows of this step; -1: in the slot, at row j
    before: torch.Tensor  # [N, ratio] int64: the same for the window before it, in the slot at `before_row`
    before_row: torch.Tensor  # [N, ratio] int64
    has_before: torch.Tensor  # [N] bool: false for a request's first window
    position: torch.Tensor  # [N] int64: of the window's first token, where the entry is rotated to
    page: torch.Tensor  # [N] int64: page unit that takes the entry
    row: torch.Tensor  # [N] int64: and its row there

    def __len__(self) -> int:
        return len(self.slot)


@dataclass(frozen=True)
class Saves:
    """The last tokens of each sequence as rows of a ring: token `token[i]` of this step goes to row `row[i]`."""

    token: torch.Tensor  # [n] int64
    slot: torch.Tensor  # [n] int64
    row: torch.Tensor  # [n] int64: position modulo the ring's rows
    span: slice | None = None  # the tokens, where they follow each other

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, ...] of the step's tokens -> [n, ...] of those that are kept; a view where they follow each other."""
        return rows[self.token] if self.span is None else rows[self.span]


def plan_windows(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    ratio: int,
    slots: torch.Tensor,  # [num_seqs] int64
    pages: torch.Tensor,  # [num_seqs, max_pages] int64
    page_tokens: int,
) -> Windows:
    lens, stops = np.asarray(q_lens, np.int64), np.asarray(kv_lens, np.int64)
    starts, offsets = stops - lens, np.cumsum(lens) - lens
    first = starts // ratio
    counts = stops // ratio - first
    seq = np.repeat(np.arange(len(lens)), counts)
    window = np.arange(len(seq)) - np.repeat(np.cumsum(counts) - counts, counts) + first[seq]
    position = window[:, None] * ratio + np.arange(ratio)
    shift = (offsets - starts)[seq, None]  # from a position to this step's row
    own = np.where(position >= starts[seq, None], position + shift, -1)
    earlier = position - ratio
    before = np.where(earlier >= starts[seq, None], earlier + shift, -1)
    per_page = page_tokens // ratio
    device = slots.device

    def tensor(a: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(a).to(device)

    of = tensor(seq)
    return Windows(
        ratio=ratio,
        slot=slots[of],
        own=tensor(own),
        before=tensor(before),
        before_row=tensor(earlier % (2 * ratio)),
        has_before=tensor(window > 0),
        position=tensor(window * ratio),
        page=pages[of, tensor(window // per_page)],
        row=tensor(window % per_page),
    )


def plan_saves(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    rows: int,  # of the ring
    slots: torch.Tensor,  # [num_seqs] int64
    marks: Sequence[
        tuple[int, int, int]
    ] = (),  # (sequence, stop, slot unit): the same of its tokens before `stop`
) -> Saves:
    lens, stops = np.asarray(q_lens, np.int64), np.asarray(kv_lens, np.int64)
    ends = np.cumsum(lens)
    if marks:
        of, until, units = (np.array(column, np.int64) for column in zip(*marks, strict=True))
        cut = stops[of] - until  # tokens of the step that come after the mark
        lens, stops = np.concatenate([lens, lens[of] - cut]), np.concatenate([stops, until])
        ends = np.concatenate([ends, ends[of] - cut])
        slots = torch.cat([slots, torch.from_numpy(units).to(slots.device)])
    counts = np.minimum(lens, rows)
    seq = np.repeat(np.arange(len(lens)), counts)
    back = np.repeat(np.cumsum(counts), counts) - np.arange(len(seq))  # 1 for a sequence's last token
    token = ends[seq] - back
    row = (stops[seq] - back) % rows
    tokens, rows_of, seqs = (torch.from_numpy(a).to(slots.device) for a in (token, row, seq))
    follow = len(token) > 0 and bool((np.diff(token) == 1).all())
    return Saves(tokens, slots[seqs], rows_of, slice(int(token[0]), int(token[-1]) + 1) if follow else None)


def pool_windows(
    fresh: torch.Tensor,  # [T, 2 * w] (ratio 128) or [T, 4 * w] (ratio 4) float32: this step's rows
    pending: torch.Tensor,  # [slots, ratio, 2 * w] float32: the request's rows of its open window
    carry: torch.Tensor | None,  # [slots, 2 * ratio, 2 * w] float32: half A of the last tokens; ratio 4 only
    windows: Windows,
) -> torch.Tensor:  # [N, w] float32
    """Read before the step's own rows are saved: they take the places of those that windows still need."""
    own = fresh[:, -pending.shape[-1] :]
    place = torch.arange(windows.ratio, device=fresh.device).expand_as(windows.own)
    rows = _choose(own, pending, windows.own, windows.slot, place)
    if carry is None:
        return _pool(rows)
    earlier = _choose(fresh[:, : carry.shape[-1]], carry, windows.before, windows.slot, windows.before_row)
    kv, score = earlier.chunk(2, dim=-1)
    nothing = ~windows.has_before[:, None, None]
    earlier = torch.cat((kv.masked_fill(nothing, 0), score.masked_fill(nothing, -torch.inf)), dim=-1)
    return _pool(torch.cat((earlier, rows), dim=1))


def _choose(
    fresh: torch.Tensor,  # [T, width]
    state: torch.Tensor,  # [slots, rows, width]
    token: torch.Tensor,  # [N, s]
    slot: torch.Tensor,  # [N]
    row: torch.Tensor,  # [N, s]
) -> torch.Tensor:  # [N, s, width]
    old = state[slot[:, None], row]
    return torch.where((token >= 0)[..., None], fresh[token.clamp(min=0)], old)


def _pool(rows: torch.Tensor) -> torch.Tensor:
    """[N, s, 2 * w] -> [N, w]: softmax of the scores over s, for each channel."""
    kv, score = rows.chunk(2, dim=-1)
    return (score.softmax(1) * kv).sum(1)
