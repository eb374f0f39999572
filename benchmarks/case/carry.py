"""Times of kernels measured on one GPU, carried over to another GPU and over several of them. Pure.

A kernel's measured time is its bound (bytes or operations at the measured GPU's rates) and a rest of starts and waits.

    the rest stays      share * bound * slower + rest * latency      what a kernel of few bytes does
    the ratio stays     share * (bound + rest) * slower              what one that is short of something else does

`share` is 1 / ranks for what tensor parallelism divides and 1 for what every rank repeats. Nobody knows which of the
two a kernel will do on a GPU it has not run on: the better and the worse of them are the ends of the range. A kernel
that only starts and waits is divided by nobody, and the products of a prompt keep their ratio.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

DIVIDED = frozenset(
    {
        "experts gate_up",
        "experts down",
        "q_b",
        "out_a",
        "out_b",
        "shared_gate_up",
        "shared_down",
        "head",
        "attend ratio 4",
        "attend ratio 128",
        "norm + rope of q",
    }
)
"""Kernels of DeepSeek-V4 that each rank runs for its heads, features or words only. All others run whole everywhere."""

FEW = 64
"""Up to so many tokens a step decodes; more are a prompt, where what lies beyond the bound grows with the work."""


@dataclass(frozen=True)
class Gpu:
    """What a GPU reaches, not what its data sheet says. `latency` and `clumsy` are factors to the measured GPU."""

    bytes_s: float
    bf16_s: float
    latency: float = 1.0  # of starts and waits
    clumsy: float = 1.0  # of products: less shared memory makes smaller tiles


@dataclass(frozen=True)
class Measured:
    """Kernel times of one model on one GPU, by number of tokens in the step (`splitserve bench ops --json`)."""

    gpu: Gpu
    rows: Mapping[int, tuple[Mapping[str, Any], ...]]
    _known: dict[tuple[int, Gpu, int, bool], float] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(found: Mapping[str, Any], model: str) -> Measured:
        machine = found["machine"]
        rows: dict[int, list[Mapping[str, Any]]] = {}
        for row in found["rows"]:
            if row["model"] == model:
                rows.setdefault(row["tokens"], []).append(row)
        gpu = Gpu(machine["bandwidth"] * 1e12, machine["bf16"] * 1e12)
        return Measured(gpu, {n: tuple(own) for n, own in sorted(rows.items())})

    def kernels_s(self, tokens: int, gpu: Gpu, ranks: int, *, worse: bool) -> float:
        """Seconds of all kernels of a step of a measured number of tokens on one of `ranks` such GPUs."""
        key = (tokens, gpu, ranks, worse)
        if key not in self._known:
            self._known[key] = (
                sum(self._kernel_us(row, gpu, ranks, worse=worse) for row in self.rows[tokens]) / 1e6
            )
        return self._known[key]

    def _kernel_us(self, row: Mapping[str, Any], gpu: Gpu, ranks: int, *, worse: bool) -> float:
        share = 1 / ranks if row["kernel"] in DIVIDED else 1.0
        match row["limit"]:
            case "bytes":
                slower = self.gpu.bytes_s / gpu.bytes_s
            case "operations":
                slower = self.gpu.bf16_s / gpu.bf16_s * gpu.clumsy
            case _:
                return float(row["per_step"] * row["us"] * gpu.latency)
        ratio_stays = share * row["us"] * slower
        rest_stays = share * row["bound_us"] * slower + max(0.0, row["us"] - row["bound_us"]) * gpu.latency
        end = max if worse else min
        us = end(ratio_stays, rest_stays) if row["tokens"] <= FEW else ratio_stays
        return float(row["per_step"] * us)

    def step_s(self, tokens: float, gpu: Gpu, ranks: int, *, worse: bool) -> float:
        """The same for any number of tokens: straight lines between the measured sizes, and beyond them on."""
        sizes = list(self.rows)
        low, high = next(((a, b) for a, b in pairwise(sizes) if tokens <= b), (sizes[-2], sizes[-1]))
        at_low, at_high = (self.kernels_s(n, gpu, ranks, worse=worse) for n in (low, high))
        return at_low + (at_high - at_low) * max(0.0, (tokens - low) / (high - low))


@dataclass(frozen=True)
class Ring:
    """What adding up over ranks costs: `latency_s` a call, and each rank's own bytes twice around at `bytes_s`."""

    latency_s: float
    bytes_s: float

    def seconds(self, num_bytes: float, ranks: int) -> float:
        return self.latency_s + 2 * (ranks - 1) / ranks * num_bytes / self.bytes_s if ranks > 1 else 0.0
