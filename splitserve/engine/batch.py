"""A step as tensors: what the forward pass reads. Built with numpy in one pass over chunks, never over tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from splitserve.engine.step import Chunk, Step
from splitserve.layers.forward import Forward, Group, Mark, States
from splitserve.types import Rid


def in_forward_order(step: Step) -> list[Chunk]:
    """Chunks of one token first, then the others, each in the step's order (see layers/forward.py)."""
    return sorted(step.chunks, key=lambda c: c.num_tokens > 1)


def build(
    chunks: list[Chunk],
    last_tokens: Mapping[Rid, int],
    *,
    page_tokens: int,
    states: States,
    tp: Group,
    device: torch.device,
    between_layers: Callable[[], None],
) -> Forward:
    """The Forward of `chunks` (in forward order). PENDING tokens are looked up in `last_tokens`."""
    q_lens = np.array([c.num_tokens for c in chunks], dtype=np.int64)
    starts = np.array([c.start for c in chunks], dtype=np.int64)
    q_start = np.zeros(len(chunks) + 1, dtype=np.int64)
    np.cumsum(q_lens, out=q_start[1:])
    sequence = np.repeat(np.arange(len(chunks)), q_lens)
    positions = np.arange(q_start[-1]) - q_start[sequence] + starts[sequence]
    pages = np.zeros((len(chunks), max(len(c.pages) for c in chunks)), dtype=np.int64)
    for i, chunk in enumerate(chunks):
        pages[i, : len(chunk.pages)] = chunk.pages

    tokens, at, rows, begins, pages_of, slots, page, row = _on_device(
        [
            _tokens(chunks, last_tokens),
            positions,
            _logit_rows(chunks, q_start),
            q_start,
            pages,
            np.array([c.slot for c in chunks], dtype=np.int64),
            pages[sequence, positions // page_tokens],
            positions % page_tokens,
        ],
        device,
    )
    return Forward(
        tokens=tokens,
        positions=at,
        logit_rows=rows,
        q_start=begins,
        q_lens=tuple(q_lens.tolist()),
        kv_lens=tuple(c.stop for c in chunks),
        num_decode=int((q_lens == 1).sum()),
        pages=pages_of,
        slots=slots,
        write_page=page,
        write_row=row,
        page_tokens=page_tokens,
        states=states,
        tp=tp,
        between_layers=between_layers,
        marks=tuple(Mark(i, stop, unit) for i, c in enumerate(chunks) for stop, unit in c.marks),
    )


def _on_device(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """int64 arrays as tensors; on a GPU by one copy that nobody waits for, not by many that wait for what is before."""
    if device.type == "cpu":
        return [torch.from_numpy(a) for a in arrays]
    packed, starts = _pack(arrays, pinned=device.type == "cuda")
    moved = packed.to(device, non_blocking=True)
    return [moved[i : i + a.size].view(a.shape) for i, a in zip(starts, arrays, strict=True)]


def _pack(arrays: list[np.ndarray], *, pinned: bool) -> tuple[torch.Tensor, list[int]]:
    """Behind each other, and where each starts: at a multiple of 16 bytes, which kernels are compiled for."""
    starts = [0]
    for a in arrays:
        starts.append(starts[-1] + a.size + a.size % 2)
    packed = torch.empty(starts.pop(), dtype=torch.int64, pin_memory=pinned)
    numbers = packed.numpy()
    for i, a in zip(starts, arrays, strict=True):
        numbers[i : i + a.size] = a.reshape(-1)
    return packed, starts


def _tokens(chunks: list[Chunk], last_tokens: Mapping[Rid, int]) -> np.ndarray:
    flat: list[int] = []
    for chunk in chunks:
        flat.extend(chunk.tokens)
        if chunk.waits:
            flat[-1] = last_tokens[chunk.rid]
    return np.array(flat, dtype=np.int64)


def _logit_rows(chunks: list[Chunk], q_start: np.ndarray) -> np.ndarray:
    """Token rows whose logits are needed, chunk after chunk: rated prompt rows from the front, then the last row,
    and those of drafts.
    """
    rows: list[int] = []
    for i, chunk in enumerate(chunks):
        rows.extend(range(q_start[i], q_start[i] + len(chunk.prompt_next)))
        if chunk.sample:
            rows.extend(range(int(q_start[i + 1]) - 1 - chunk.num_draft, int(q_start[i + 1])))
    return np.array(rows, dtype=np.int64)
