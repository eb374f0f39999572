"""Quantised checkpoints into a rank's parameters: what to read is data, numbers stay in the formats of the file.

A parameter is a stack of matrices (one for most; one for each expert), each made of parts of the file's tensors joined
by rows. Quantised tensors have a sibling `X.scale` beside `X.weight`, cut the way its weight is:

    X.weight [out, in]    F8_E4M3 ─ rows r, columns c ─▶ codes
    X.scale  [out / 128, in / 128] ─ the tiles of r, c ─▶ scales, repeated where r or c cut a tile

A rank holds its own part and at most one tensor of the file. Every tensor is checked for its name, type and shape
before the first is read, and for NaN when it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from splitserve.errors import WeightsError

from .safetensors import SafetensorsDir

TILE = 128
GROUP = 32


class Form(StrEnum):
    """How a parameter is kept in memory."""

    DENSE = "dense"  # in the model's dtype
    F32 = "f32"
    INT = "int"  # int32
    TILES = "tiles"  # float8_e4m3fn, and a scale (ue8m0 bits or float32) for each tile
    MXFP4 = "mxfp4"  # two e2m1 in a byte, and ue8m0 bits for 32 of them


_FLOATS = ("BF16", "F32", "F16")
_TYPES = {
    Form.DENSE: _FLOATS,
    Form.F32: _FLOATS,
    Form.INT: ("I64", "I32"),
    Form.TILES: ("F8_E4M3",),
    Form.MXFP4: ("I8", "U8"),
}
_SCALE_TYPES = {Form.TILES: ("F8_E8M0", "F32"), Form.MXFP4: ("F8_E8M0",)}
_AS_TORCH = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "I64": torch.int64,
}


@dataclass(frozen=True)
class Part:
    """Rows and columns of one tensor of the file. `shape` is logical: [out, in] also where two numbers share a byte.

    A range may pass the end of its axis (a vocabulary padded to equal shares); what lies beyond is zero.
    """

    tensor: str
    shape: tuple[int, ...]
    rows: range | None = None  # None: all
    columns: range | None = None

    @property
    def row_range(self) -> range:
        return range(self.shape[0]) if self.rows is None else self.rows

    @property
    def column_range(self) -> range:
        return range(self.shape[-1]) if self.columns is None else self.columns


@dataclass(frozen=True)
class Parameter:
    """`stack` holds one row of parts for a plain matrix or vector, else one for each expert."""

    name: str
    form: Form
    stack: tuple[tuple[Part, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape on this rank, without the stack: [out, in] or [size]."""
        parts = self.stack[0]
        rows = sum(len(p.row_range) for p in parts)
        return (rows, len(parts[0].column_range)) if len(parts[0].shape) > 1 else (rows,)

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that share a scale on this rank: 128, or less where a cut or a join falls inside a tile."""
        rows, at = TILE, 0
        for part in self.stack[0]:
            rows = math.gcd(rows, part.row_range.start, at)
            at += len(part.row_range)
        return rows, math.gcd(TILE, self.stack[0][0].column_range.start)


@dataclass(frozen=True)
class Expected:
    """One tensor that the file must have."""

    shape: tuple[int, ...]
    types: tuple[str, ...]


def expected_tensors(wanted: Iterable[Parameter]) -> dict[str, Expected]:
    """Every tensor that these parameters are made of, scales included, by name."""
    tensors: dict[str, Expected] = {}
    for parameter in wanted:
        for part in (p for parts in parameter.stack for p in parts):
            shape = part.shape
            if parameter.form is Form.MXFP4:
                tensors[scale_name(part.tensor)] = Expected(
                    (shape[0], shape[1] // GROUP), _SCALE_TYPES[Form.MXFP4]
                )
                shape = (shape[0], shape[1] // 2)
            elif parameter.form is Form.TILES:
                grid = (-(-shape[0] // TILE), -(-shape[1] // TILE))
                tensors[scale_name(part.tensor)] = Expected(grid, _SCALE_TYPES[Form.TILES])
            tensors[part.tensor] = Expected(shape, _TYPES[parameter.form])
    return tensors


def scale_name(tensor: str) -> str:
    return tensor.removesuffix(".weight") + ".scale"


def check_checkpoint(
    checkpoint: SafetensorsDir, whole: Iterable[Parameter], *, may_have: Sequence[str] = ()
) -> None:
    """Raise WeightsError, naming tensor and file, unless the checkpoint holds exactly the tensors of `whole`.

    `whole` is the model on one rank: a rank that holds some experts only still knows them all. Tensors whose names
    begin with one of `may_have` are let be.
    """
    tensors = expected_tensors(whole)
    names = set(checkpoint.names())
    missing = sorted(tensors.keys() - names)
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise WeightsError(
            f"{checkpoint.path} lacks tensor {missing[0]!r}{more}", fix="fetch the checkpoint again"
        )
    for name, tensor in tensors.items():
        where = f"{checkpoint.file(name)}: tensor {name!r}"
        if checkpoint.dtype(name) not in tensor.types:
            raise WeightsError(f"{where} is {checkpoint.dtype(name)}, must be {' or '.join(tensor.types)}")
        if checkpoint.shape(name) != tensor.shape:
            raise WeightsError(
                f"{where} has shape {list(checkpoint.shape(name))}, the configuration says {list(tensor.shape)}"
            )
    for name in sorted(names - tensors.keys()):
        if not name.startswith(tuple(may_have)):
            raise WeightsError(
                f"{checkpoint.file(name)} holds tensor {name!r}, which this model does not have"
            )


def read_parameters(
    checkpoint: SafetensorsDir,
    wanted: Sequence[Parameter],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Callable[[float], None] = lambda _: None,
) -> dict[str, torch.Tensor]:
    """Parameters by name; those of quantised ones lie beside them as NAME.scales. After `check_checkpoint`.

    Raises WeightsError, naming tensor and file, for NaN or infinity.
    """
    parameters: dict[str, torch.Tensor] = {}
    total = sum(_size(p) for p in wanted)
    done = 0
    for parameter in wanted:
        for name, shape, type_ in allocations(parameter, dtype, _scale_type(checkpoint, parameter)):
            parameters[name] = torch.zeros(shape, dtype=type_, device=device)
        scales = parameters.get(f"{parameter.name}.scales")
        for i, parts in enumerate(parameter.stack):
            stacked = len(parameter.stack) > 1
            target = parameters[parameter.name][i] if stacked else parameters[parameter.name]
            _fill(checkpoint, parameter, parts, target)
            if scales is not None:
                _fill_scales(checkpoint, parameter, parts, scales[i] if stacked else scales)
            done += _size(parameter) // len(parameter.stack)
            progress(done / total)
    return parameters


def allocations(
    parameter: Parameter, dtype: torch.dtype, scale_type: torch.dtype
) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """(name, shape, dtype) of the tensors that hold a parameter."""
    stack = (len(parameter.stack),) if len(parameter.stack) > 1 else ()
    shape, name = parameter.shape, parameter.name
    match parameter.form:
        case Form.DENSE:
            yield name, (*stack, *shape), dtype
        case Form.F32:
            yield name, (*stack, *shape), torch.float32
        case Form.INT:
            yield name, (*stack, *shape), torch.int32
        case Form.TILES:
            rows, columns = parameter.tile
            yield name, (*stack, *shape), torch.float8_e4m3fn
            yield f"{name}.scales", (*stack, -(-shape[0] // rows), -(-shape[1] // columns)), scale_type
        case Form.MXFP4:
            yield name, (*stack, shape[0], shape[1] // 2), torch.uint8
            yield f"{name}.scales", (*stack, shape[0], shape[1] // GROUP), torch.uint8


def _size(parameter: Parameter) -> int:
    return math.prod(parameter.shape) * len(parameter.stack)


def _scale_type(checkpoint: SafetensorsDir, parameter: Parameter) -> torch.dtype:
    if parameter.form is not Form.TILES:
        return torch.uint8
    name = scale_name(parameter.stack[0][0].tensor)
    return torch.float32 if checkpoint.dtype(name) == "F32" else torch.uint8


def _fill(
    checkpoint: SafetensorsDir, parameter: Parameter, parts: Sequence[Part], target: torch.Tensor
) -> None:
    at = 0
    for part in parts:
        rows, columns = _clipped(part.row_range, part.shape[0]), part.column_range
        values = _read(checkpoint, part.tensor, rows)
        if values.dim() > 1:
            per_byte = 2 if parameter.form is Form.MXFP4 else 1
            values = values[:, columns.start // per_byte : columns.stop // per_byte]
        _check_numbers(checkpoint, part.tensor, values)
        target[at : at + len(rows)] = values
        at += len(part.row_range)


def _fill_scales(
    checkpoint: SafetensorsDir, parameter: Parameter, parts: Sequence[Part], target: torch.Tensor
) -> None:
    high, wide = parameter.tile if parameter.form is Form.TILES else (1, GROUP)
    tile_rows, tile_columns = (TILE, TILE) if parameter.form is Form.TILES else (1, GROUP)
    at = 0
    for part in parts:
        name, rows, columns = scale_name(part.tensor), part.row_range, part.column_range
        first, last = rows.start // tile_rows, -(-rows.stop // tile_rows)
        scales = _read(checkpoint, name, range(first, last))
        if (scales.dtype == torch.uint8 and (scales == 0xFF).any()) or (
            scales.is_floating_point() and not torch.isfinite(scales).all()
        ):
            raise _damaged(checkpoint, name)
        row = torch.arange(rows.start, rows.stop, high) // tile_rows - first
        column = torch.arange(columns.start, columns.stop, wide) // tile_columns
        target[at : at + len(row)] = scales[row][:, column]
        at += len(row)


def _read(checkpoint: SafetensorsDir, name: str, rows: range) -> torch.Tensor:
    """Rows of a tensor in the file's own type; ue8m0 and MXFP4 as their bits."""
    bits = torch.from_numpy(checkpoint.raw(name, rows.start, rows.stop))
    return bits.view(_AS_TORCH.get(checkpoint.dtype(name), torch.uint8))


def _check_numbers(checkpoint: SafetensorsDir, name: str, values: torch.Tensor) -> None:
    if values.dtype == torch.float8_e4m3fn:
        if ((values.view(torch.uint8) & 0x7F) == 0x7F).any():
            raise _damaged(checkpoint, name)
    elif values.is_floating_point() and not torch.isfinite(values.sum(dtype=torch.float32)):
        raise _damaged(checkpoint, name)


def _damaged(checkpoint: SafetensorsDir, name: str) -> WeightsError:
    return WeightsError(
        f"{checkpoint.file(name)}: tensor {name!r} holds NaN or infinity: corrupted",
        fix="fetch the checkpoint again",
    )


def _clipped(part: range, length: int) -> range:
    return range(min(part.start, length), min(part.stop, length))
