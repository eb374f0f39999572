"""Time of device work, without the host in it: calls are captured in one CUDA graph and the graph is replayed.

Each call should read other memory than the one before it, enough in all that the cache cannot serve it. Kernels are
warmed up before the capture, so that compiling and choosing algorithms are over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median, quantiles

import torch

AT_LEAST = 8
"""Calls of one graph: its start takes some microseconds, which are shared out among them."""


@dataclass(frozen=True)
class Time:
    us: float  # median over replays, for one call
    spread: float  # distance between the quartiles, as a share of the median


def time_calls(calls: Sequence[Callable[[], object]], replays: int = 15) -> Time:
    """Time of one of `calls`, on average over them; they run one after another, in order, at least `AT_LEAST`."""
    calls = list(calls) * ceil(AT_LEAST / len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for i in range(replays + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        if i >= 3:  # the first replays bring clocks up
            times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    graph.reset()
    low, middle, high = quantiles(times, n=4)
    return Time(median(times), (high - low) / middle)
