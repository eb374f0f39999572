"""Random weights made where they are used, in seconds: full-size shapes to measure speed with, without a checkpoint.

One pattern of a million numbers fills every parameter again and again. Its length is prime, so that no two rows and no
two experts are alike and routing spreads as random scores spread it. What such a model says means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from splitserve.ops.ref.v4.quant import E4M3_MAX
from splitserve.weights.parameters import Form, Parameter, allocations

from .make_checkpoint import spread

_PATTERN = 1_000_003
_E2M1_DEVIATION = 2.9  # of uniformly drawn codes


def dummy_parameters(
    wanted: Sequence[Parameter],
    *,
    num_experts: int,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    progress: Callable[[float], None] = lambda _: None,
) -> dict[str, torch.Tensor]:
    """What `read_parameters` returns for the same parameters, filled at random; the same on every rank of a shape."""
    draw = torch.Generator(device).manual_seed(seed)
    normal = torch.randn(_PATTERN, generator=draw, device=device)
    codes = (normal * 100).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    nibbles = torch.randint(256, (_PATTERN,), generator=draw, device=device, dtype=torch.uint8)
    parameters: dict[str, torch.Tensor] = {}
    for i, parameter in enumerate(wanted):
        mean, deviation = spread(parameter.stack[0][0].tensor, parameter.stack[0][0].shape[-1])
        for name, shape, type_ in allocations(parameter, dtype, torch.uint8):
            tensor = torch.empty(shape, dtype=type_, device=device)
            if name.endswith(".scales"):
                per_code = 100.0 if parameter.form is Form.TILES else _E2M1_DEVIATION
                tensor.fill_(127 + round(math.log2(deviation / per_code)))
            elif parameter.form is Form.INT:
                first = torch.randint(num_experts, (shape[0], 1), generator=draw, device=device)
                tensor.copy_((first + torch.arange(shape[1], device=device)) % num_experts)
            elif parameter.form is Form.TILES:
                _fill(tensor, codes)
            elif parameter.form is Form.MXFP4:
                _fill(tensor, nibbles)
            else:
                _fill(tensor, (mean + deviation * normal).to(type_))
            parameters[name] = tensor
        progress((i + 1) / len(wanted))
    return parameters


def _fill(tensor: torch.Tensor, pattern: torch.Tensor) -> None:
    """Repeat `pattern` over all of `tensor`."""
    flat = tensor.view(-1)
    whole = flat.numel() // len(pattern) * len(pattern)
    flat[:whole].view(-1, len(pattern)).copy_(pattern)
    flat[whole:].copy_(pattern[: flat.numel() - whole])
