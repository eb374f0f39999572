"""Measures the cases, sets each beside its bound, and writes one table.

    bound = max(bytes / bandwidth, operations / peak of their kind, time of a kernel that does nothing)

Bandwidth and peaks are measured on the device at hand unless they are given. `share` is the kernel's part of the time
that one step spends in all measured kernels.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

from splitserve.ops.kernels.launch import launch, listing
from splitserve.ops.triton.overlap import follow

from . import deepseek, llama
from .case import Case
from .timing import time_calls

MODELS = {"deepseek": deepseek.cases, "llama": llama.cases}


@dataclass(frozen=True)
class Device:
    """What the GPU can do."""

    name: str
    bandwidth: float  # bytes read and written, TB/s
    bf16: float  # TFLOP/s
    fp8: float
    floor_us: float  # a kernel that does nothing, in a graph


@dataclass(frozen=True)
class Measured:
    model: str
    tokens: int
    kernel: str
    shape: str
    us: float
    spread: float
    bound_us: float
    limit: str  # what bounds it: "bytes", "operations" or "launch"
    ratio: float
    per_step: float
    share: float
    path: str  # the kernels that ran
    note: str


@triton.jit
def _nothing(_):
    # grid: [1]
    follow()


def measure_device() -> Device:
    bandwidth = _bandwidth()
    x, y = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    bf16 = 2 * 8192**3 / time_calls([lambda: x @ y] * 4, replays=9).us / 1e6
    fp8 = bf16
    if torch.cuda.get_device_capability() >= (8, 9):
        p, q, one = (
            x.to(torch.float8_e4m3fn),
            y.T.contiguous().to(torch.float8_e4m3fn),
            torch.ones((), device="cuda"),
        )
        product = lambda: torch._scaled_mm(p, q.T, one, one, out_dtype=torch.bfloat16)  # noqa: E731
        fp8 = 2 * 8192**3 / time_calls([product] * 4, replays=9).us / 1e6
    z = torch.zeros(16, device="cuda")
    floor = time_calls([lambda: launch(_nothing, (1,), z, num_warps=4)] * 200, replays=9).us
    return Device(torch.cuda.get_device_name(), bandwidth, bf16, fp8, floor)


def _bandwidth() -> float:
    a, b = (torch.randint(0, 1 << 30, (1 << 29,), dtype=torch.int32, device="cuda") for _ in range(2))
    return 2 * 4 * a.numel() / time_calls([lambda: torch.add(b, 1, out=a)], replays=9).us / 1e6


def measure(models: Sequence[str], tokens: Sequence[int], device: Device) -> list[Measured]:
    result = []
    for model in models:
        for count in tokens:
            rows = []
            for case in MODELS[model](count):
                rows.append((case, path_of(case), time_calls(case.calls)))
                torch.cuda.empty_cache()
            total = sum(t.us * c.per_step for c, _, t in rows)
            for case, path, t in rows:
                bound, limit = bound_of(case, device)
                share = t.us * case.per_step / total if total else 0.0
                result.append(
                    Measured(
                        model,
                        count,
                        case.kernel,
                        case.shape,
                        t.us,
                        t.spread,
                        bound,
                        limit,
                        bound / t.us,
                        case.per_step,
                        share,
                        path,
                        case.note,
                    )
                )
    return result


class _Products(TorchDispatchMode):
    """Notes whether torch multiplied matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen = self.seen or func.overloadpacket in _MULTIPLY
        return func(*args, **(kwargs or {}))


_MULTIPLY = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten._scaled_mm}


def path_of(case: Case) -> str:
    """Which kernels one call starts, and cuBLAS where torch multiplied."""
    with listing() as names, _Products() as products:
        case.calls[0]()
    return " + ".join([*dict.fromkeys(names), *(["cuBLAS"] if products.seen else [])])


def bound_of(case: Case, device: Device) -> tuple[float, str]:
    """Microseconds, and what takes them."""
    peak = device.fp8 if case.peak == "fp8" else device.bf16
    limits = {
        "bytes": case.bytes / device.bandwidth / 1e6,
        "operations": case.flops / peak / 1e6,
        "launch": device.floor_us,
    }
    name = max(limits, key=lambda k: limits[k])
    return limits[name], name


def table(rows: Iterable[Measured]) -> str:
    """Markdown, one block for each model and number of tokens, the largest shares first."""
    lines: list[str] = []
    rows = list(rows)
    for model, tokens in dict.fromkeys((r.model, r.tokens) for r in rows):
        mine = sorted((r for r in rows if (r.model, r.tokens) == (model, tokens)), key=lambda r: -r.share)
        step = sum(r.us * r.per_step for r in mine) / 1e3
        bound = sum(r.bound_us * r.per_step for r in mine) / 1e3
        top, at = [], 0.0
        for r in mine:
            if at < 0.9:
                top.append(r)
            at += r.share
        part = sum(r.bound_us * r.per_step for r in top) / max(sum(r.us * r.per_step for r in top), 1e-9)
        lines += [
            f"\n{model}, {tokens} tokens: kernels of a step {step:.2f} ms, bound {bound:.2f} ms, ratio {bound / step:.2f};"  # noqa: E501
            f" those of 90 % of the time {part:.2f}\n",
            "| case | shape | us | spread | bound us | by | ratio | calls a step | share | path | |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {r.kernel} | {r.shape} | {r.us:.2f} | {r.spread:.1%} | {r.bound_us:.2f} | {r.limit} | {r.ratio:.2f} |"
            f" {r.per_step:g} | {r.share:.1%} | {r.path} | {r.note} |"
            for r in mine
        ]
    return "\n".join(lines)


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def save(path: Path, rows: Sequence[Measured], device: Device, command: str, revision: str) -> None:
    """JSON with everything that a reader needs to repeat it."""
    about = {"machine": asdict(device), "torch": torch.__version__, "triton": triton.__version__}
    about |= {"commit": revision, "command": command}
    path.write_text(json.dumps(about | {"rows": [asdict(r) for r in rows]}, indent=1) + "\n")
