"""The names of kernels.py for bf16 on a GPU: Triton's kernels, several of kernels.py's steps in one of them.

Rows that meet weights in codes are rounded to e4m3 first, a power of two for each 128 of them, as DeepSeek's own
recipe does. On an H200 that takes a layer of a decode step from 0.22 to 0.19 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from splitserve.ops.triton import parts, v4
from splitserve.ops.triton.multiply import Matrix, rounded
from splitserve.ops.triton.parts import Parts

T = TypeVar("T")

FEW = 32
"""Tokens of a step that is served faster by two streams: on an H200 7 % at one, 2-3 % at 8 and 16, a loss at 64."""


class GpuKernels:
    """Functions of ops/triton/v4 by the names that layers use."""

    def __init__(self, *, exact: bool = False) -> None:
        """`exact`: rows are taken as they are."""
        self._exact = exact
        self.expert_ffn = partial(v4.expert_ffn, exact=exact, parts=True)
        self.grouped_linear = partial(v4.grouped_linear, exact=exact)
        self.mix_onto = partial(v4.mix_onto, exact=exact)
        self.prepare = partial(v4.prepare, exact=exact)
        self._lanes: dict[int, torch.cuda.Stream] = {}

    def beside(self, tokens: int, work: Callable[[], T], *, lane: int = 0) -> Callable[[], T]:
        """Start `work` next to what follows; the function that comes back waits for it and gives its result.

        Work of one lane is done in order; that of another runs next to it too.

        Only while decoding of few tokens is recorded: then most of the device is idle, and each kernel waits for the
        one before it. Whatever `work` reads must stay alive until then.
        """
        if tokens > FEW or not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return _done(work())
        main = torch.cuda.current_stream()
        if lane not in self._lanes:
            self._lanes[lane] = torch.cuda.Stream()
        side = self._lanes[lane]
        side.wait_stream(main)
        with torch.cuda.stream(side):
            value = work()
        done = torch.cuda.Event()
        done.record(side)
        joined: set[int] = set()

        def join() -> T:
            stream = torch.cuda.current_stream()
            if stream.cuda_stream not in joined:  # a kernel that waits for two cannot start early
                joined.add(stream.cuda_stream)
                stream.wait_event(done)  # and not for what this lane is given later
            return value

        return join

    def linear(self, x: torch.Tensor, weight: Matrix) -> torch.Tensor:
        if self._exact or isinstance(weight, torch.Tensor):
            return v4.linear(x, weight)
        return v4.linear_rounded(x, weight)

    def linear_parts(self, x: torch.Tensor, weight: Matrix) -> torch.Tensor | Parts:
        if len(x) > parts.FEW or isinstance(weight, torch.Tensor):
            return self.linear(x, weight)
        return parts.linear_parts(x if self._exact else rounded(x, weight), weight)

    def linear_f32_parts(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | Parts:
        few = len(x) <= parts.FEW and x.dtype == weight.dtype == torch.bfloat16
        return parts.linear_parts(x, weight, torch.float32) if few else v4.linear_f32(x, weight)

    absorb = staticmethod(v4.absorb)
    attend = staticmethod(v4.attend)
    choose_located = staticmethod(v4.choose_located)
    encode_latents = staticmethod(v4.encode_latents)
    hc_enter = staticmethod(v4.hc_enter)
    hc_head = staticmethod(v4.hc_head)
    index_scores = staticmethod(v4.index_scores)
    linear_f32 = staticmethod(v4.linear_f32)
    pool_windows = staticmethod(v4.pool_windows)
    rms_norm = staticmethod(v4.rms_norm)
    rms_norm_rotate = staticmethod(v4.rms_norm_rotate)
    rotate_tail = staticmethod(v4.rotate_tail)
    route = staticmethod(v4.route)
    route_by_token = staticmethod(v4.route_by_token)
    write_keys = staticmethod(v4.write_keys)
    write_latents = staticmethod(v4.write_latents)
    write_rows = staticmethod(v4.write_rows)


def _done(value: T) -> Callable[[], T]:
    return lambda: value
