"""Prompts of many lengths before the first one comes, so that no kernel is compiled in service.

Triton compiles a kernel for what sizes have in common (one, a multiple of sixteen, a row of a table of tiles), not for
each size: a few lengths on both sides of every border meet all of them. Nobody owns pages and slots yet, so the
passes write where they like; what they write is overwritten before it is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from splitserve import log
from splitserve.engine import batch
from splitserve.engine.step import Chunk, Step
from splitserve.layers.forward import Forward, Group, States

_log = log.get(__name__)

LENGTHS = (
    1,
    2,
    3,
    5,
    8,
    13,
    16,
    17,
    32,
    33,
    48,
    65,
    100,
    128,
    129,
    200,
    256,
    257,
    300,
    400,
    512,
    513,
    777,
    1024,
    1025,
    1500,
)
SEVERAL = ((2, 100), (3, 33), (4, 256), (7, 129), (8, 64))  # prompts in one pass
LATE = 4096  # a context in which sparse attention has to choose
DEEP = (1, 33)  # tokens of the chunks that begin in contexts of one, two, four ... pages


def warm_up(
    forward: Callable[[Forward], torch.Tensor],
    states: States,
    steps: Sequence[list[Chunk]],  # of `plans`
    *,
    tp: Group,
    device: torch.device,
    page_tokens: int,
    progress: Callable[[float], None] = lambda _: None,
) -> float:
    """Run passes of all kinds, every rank of a group at once. Returns the seconds it took."""
    begun = time.monotonic()
    for i, chunks in enumerate(steps):
        with torch.inference_mode():
            forward(
                batch.build(
                    batch.in_forward_order(Step(0, tuple(chunks))),
                    {},
                    page_tokens=page_tokens,
                    states=states,
                    tp=tp,
                    device=device,
                    between_layers=lambda: None,
                )
            )
        progress((i + 1) / len(steps))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic() - begun


def plans(
    *, page_tokens: int, num_pages: int, max_len: int, has_slots: bool, step_tokens: int
) -> Iterator[list[Chunk]]:
    """Whole prompts of each length, chunks that go on late in a long one, and one beside a single token."""
    room = min(num_pages - 1, max_len // page_tokens) * page_tokens
    pages = tuple(range(num_pages))

    def chunk(start: int, length: int, place: int) -> Chunk:
        stop = start + length
        used = pages[: -(-stop // page_tokens)]
        return Chunk(str(place), start, stop, (1,) * length, used, place if has_slots else -1, sample=True)

    lengths = [n for n in (*LENGTHS, step_tokens // 2 + 1, step_tokens) if n <= min(room, step_tokens)]
    late = min(LATE, room - max(lengths, default=0)) // page_tokens * page_tokens
    for length in sorted(set(lengths)):
        yield [chunk(0, length, 0)]
        if late > 0 and length > 1:
            yield [chunk(late + 1, length - 1, 0)]
    for count, length in SEVERAL:
        if count * length <= step_tokens and length <= room:
            yield [chunk(0, length, 0)] * count
    for pages_before in doublings(room // page_tokens - 1):
        for length in DEEP:
            yield [chunk(pages_before * page_tokens - length // 2, length, 0)]
        yield [chunk(pages_before * page_tokens, length, 0) for length in reversed(DEEP)]
    if late > 0 and lengths:
        yield [chunk(late, 1, 0)] * 3
        short = [n for n in lengths if n <= 512]
        for length in short[:: max(1, len(short) // 4)]:
            yield [chunk(0, length, 0), chunk(late, 1, 0)]
            yield [chunk(late, length, 0), chunk(late, 1, 0)]


def warn_of_compiling() -> None:
    """From now on whatever a step has to wait for is told: a form of a kernel that no pass here has met."""
    from splitserve.ops.kernels.launch import on_compile  # Triton is imported where it is used

    on_compile(lambda name: _log.warning("a step waited for kernel %s: no pass at the start needed it", name))


def doublings(most: int) -> list[int]:
    """1, 2, 4 ... and `most` itself."""
    return sorted({min(1 << k, most) for k in range(max(0, most).bit_length() + 1)} if most > 0 else set())
