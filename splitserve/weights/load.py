"""Checkpoint tensors into a rank's parameters, cut while they are read.

A rank holds its own part plus at most one stretch of one tensor: rows are read, converted and placed in stretches of
`_STRETCH` elements. Every tensor is checked for its name and shape before the first byte is converted, and for
finite numbers when it is (a flipped bit in a float's exponent is the damage one can see).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping

import torch

from splitserve.errors import WeightsError

from .arena import allocate
from .checkpoint import Checkpoint, Rows
from .coded import GROUP
from .rules import IGNORED, Expanded, Placement

_STRETCH = 8 << 20  # elements: 32 MB as float32

CODED, SCALES = "coded", ".scales"

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
"""torch's types by our encoding names (StateSpec.encoding, EngineConfig.dtype)."""


def load(
    checkpoint: Checkpoint,
    expanded: Expanded,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    interleaved: int = 0,
    optional: Iterable[str] = (),
    as_stored: bool = False,
    progress: Callable[[float], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Read every placement. Returns parameters by name, contiguous, on `device`.

    `interleaved` is the rotary head size where the file interleaves the rows of rotated tensors, else 0 (see `_halve`).
    `optional` are names that may be in the file and are not wanted. With `as_stored`, matrices stay f16, bf16 or coded
    where all of their tensors are; scales of coded ones lie beside them as NAME.scales. Raises WeightsError naming the
    tensor and the file.
    """
    _check(checkpoint, expanded.placements, set(optional))
    forms = _common_forms(checkpoint, expanded) if as_stored else {}
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, shape in expanded.shapes.items():
        form = forms.get(name, "")
        wanted[name] = shape, torch.uint8 if form == CODED else DTYPES.get(form, dtype)
        if form == CODED:
            wanted[name + SCALES] = (shape[0], shape[1] // GROUP, 2), torch.float32
    parameters = allocate(wanted, device)
    total = sum(math.prod(p.shape) for p in expanded.placements.values())
    done = 0
    for name, placement in expanded.placements.items():
        _fill(parameters, checkpoint, name, placement, interleaved if placement.rotated else 0)
        done += math.prod(placement.shape)
        if progress:
            progress(done / total)
    return parameters


def _common_forms(checkpoint: Checkpoint, expanded: Expanded) -> dict[str, str]:
    """Of each matrix that can stay as it is stored: the form that its tensors share."""
    forms: dict[str, set[str]] = {}
    for name, placement in expanded.placements.items():
        form = checkpoint.form(name) if len(placement.shape) == 2 else ""
        columns = placement.cuts[-1]
        if form == CODED and (columns.start % GROUP or len(columns) % GROUP):
            form = ""
        forms.setdefault(placement.parameter, set()).add(form)
    return {name: next(iter(its)) for name, its in forms.items() if its in ({CODED}, {"f16"}, {"bf16"})}


def _check(checkpoint: Checkpoint, placements: Mapping[str, Placement], optional: set[str]) -> None:
    names = set(checkpoint.names())
    missing = sorted(placements.keys() - names)
    if missing:
        raise WeightsError(
            f"{checkpoint.path} lacks tensor {missing[0]!r}"
            + (f" and {len(missing) - 1} more" if missing[1:] else "")
        )
    for name, placement in placements.items():
        if checkpoint.shape(name) != placement.shape:
            raise WeightsError(
                f"{checkpoint.file(name)}: tensor {name!r} has shape {list(checkpoint.shape(name))}, "
                f"the configuration says {list(placement.shape)}"
            )
    for name in sorted(names - placements.keys() - optional):
        if not any(re.fullmatch(pattern, name) for pattern in IGNORED):
            raise WeightsError(
                f"{checkpoint.file(name)} holds tensor {name!r}, which this model does not have"
            )


def _fill(
    parameters: dict[str, torch.Tensor], checkpoint: Checkpoint, name: str, placement: Placement, head: int
) -> None:
    """Copy `cuts` of one tensor into its parameter, a stretch of whole rows (of heads, when rotated) at a time."""
    target = parameters[placement.parameter][placement.into]
    scales = parameters.get(placement.parameter + SCALES)
    rows, inner = placement.cuts[0], tuple(slice(c.start, c.stop) for c in placement.cuts[1:])
    unit = head or 1
    step = max(unit, _STRETCH // max(math.prod(placement.shape[1:]), 1) // unit * unit)
    for start in range(rows.start, rows.stop, step):
        stop = min(start + step, rows.stop)
        into = slice(start - rows.start, stop - rows.start)
        if scales is None:
            part = _tensor(checkpoint.read(name, start, stop))
        else:
            codes, its = (torch.from_numpy(a) for a in checkpoint.read_coded(name, start, stop))
            _check_finite(its, checkpoint, name)
            groups = slice(inner[0].start // GROUP, inner[0].stop // GROUP)
            scales[placement.into[0]][into] = _halve(its[:, groups], head) if head else its[:, groups]
            part = codes
        part = part[(slice(None), *inner)]
        _check_finite(part, checkpoint, name)
        target[into] = _halve(part, head) if head else part


def _check_finite(numbers: torch.Tensor, checkpoint: Checkpoint, name: str) -> None:
    if numbers.is_floating_point() and not torch.isfinite(numbers.sum(dtype=torch.float32)):
        raise WeightsError(f"{checkpoint.file(name)}: tensor {name!r} holds NaN or infinity: corrupted")


def _tensor(rows: Rows) -> torch.Tensor:
    array = rows.array if rows.array.flags.writeable else rows.array.copy()
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if rows.encoding == "bf16" else tensor


def _halve(part: torch.Tensor, head: int) -> torch.Tensor:
    """Rows of heads from interleaved order (0, h/2, 1, h/2 + 1, ...) back to halves (0, 1, ... | h/2, h/2 + 1, ...).

    llama.cpp rotates neighbouring rows where Hugging Face rotates row i with row i + h/2; its converter reorders
    the rows of q and k of the architecture "llama" to suit.
    """
    pairs = part.unflatten(0, (-1, head // 2, 2))
    return pairs.transpose(1, 2).flatten(0, 2)
