"""The lightning indexer: rates every visible compressed entry of a token's sequence and keeps the best few.

    score[t, i] = sum over heads of weight[t, h] * relu(q[t, h] . key[i])

A weight may be negative. Where all heads are below zero the score is exactly 0; ties fall as topk lets them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .rows import decode_keys

_STRETCH = 1 << 22  # numbers of [tokens, heads, entries] at once: 16 MB


@dataclass(frozen=True)
class Places:
    """Where the entries of a step's sequences lie."""

    pages: torch.Tensor  # [num_seqs, max_pages] int64
    sequence: torch.Tensor | None  # [T] int64: of each token; None: token i is the only one of sequence i
    per_page: int  # entries


def index_scores(
    q: torch.Tensor,  # [T, heads, index_dim]
    weights: torch.Tensor,  # [T, heads] float32, scaled
    view: torch.Tensor,  # [num_pages, rows_per_page, width]: index keys, any strides
    pages: torch.Tensor,  # [num_seqs, max_pages] int64
    num_visible: torch.Tensor,  # [T] int64: entries that a token may see, the first of its sequence
    *,
    q_lens: Sequence[int],  # tokens of each sequence in q, in order
) -> torch.Tensor:  # [T, max entries] float32, -inf where not visible
    """Keys of a sequence are entries 0, 1, ... in the order of its pages."""
    longest = int(num_visible.max())
    scores = weights.new_full((len(q), longest), -torch.inf)
    row = 0
    for seq, length in enumerate(q_lens):
        tokens = slice(row, row + length)
        count = int(num_visible[tokens].max())
        used = pages[seq, : -(-count // view.shape[1])]
        keys = decode_keys(view[used].flatten(0, 1)[:count])
        _score(scores[tokens, :count], q[tokens], weights[tokens], keys)
        row = tokens.stop
    entry = torch.arange(longest, device=q.device)
    return scores.masked_fill_(entry >= num_visible[:, None], -torch.inf)


def choose_entries(
    scores: torch.Tensor,  # [T, N] float32, -inf where not visible
    count: int,
) -> torch.Tensor:  # [T, min(count, N)] int64: entries in any order, -1 where fewer are visible
    best, entries = scores.topk(min(count, scores.shape[1]), dim=-1, sorted=False)
    return entries.masked_fill_(best == -torch.inf, -1)


def locate_entries(
    entries: torch.Tensor,  # [T, K] int64: entries of each token's sequence, -1 for none
    places: Places,
) -> torch.Tensor:  # [T, K] int64: flat positions in a view of pages, -1 for none
    at = entries.clamp(min=0)
    seq = torch.arange(len(entries), device=entries.device) if places.sequence is None else places.sequence
    flat = places.pages[seq[:, None], at // places.per_page] * places.per_page + at % places.per_page
    return flat.masked_fill_(entries < 0, -1)


def _score(
    out: torch.Tensor,  # [t, n]
    q: torch.Tensor,  # [t, heads, index_dim]
    weights: torch.Tensor,  # [t, heads]
    keys: torch.Tensor,  # [n, index_dim]
) -> None:
    step = max(1, _STRETCH // max(q.shape[1] * len(keys), 1))
    for i in range(0, len(q), step):
        rated = (q[i : i + step].float() @ keys.T).relu_()
        out[i : i + step] = torch.bmm(weights[i : i + step, None], rated)[:, 0]
