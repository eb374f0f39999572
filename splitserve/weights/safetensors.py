"""Safetensors checkpoints, one file or sharded by an index. Torch-free.

    length u64 | JSON header {name: {dtype, shape, data_offsets}} | bytes

The format is small enough to read here, straight into mapped rows, with errors that name the tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from splitserve.errors import WeightsError

from .checkpoint import Array, Rows, check_inside, map_file

_DTYPES: dict[str, tuple[str, Any]] = {
    "F32": ("f32", np.float32),
    "F16": ("f16", np.float16),
    "BF16": ("bf16", np.uint16),
}
_RAW_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}
"""Bytes of one element of what `raw` reads."""
_MAX_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class _Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsDir:
    """A directory with model.safetensors, or with model.safetensors.index.json and its shards: a Checkpoint."""

    format = "safetensors"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._maps: dict[Path, Array] = {}
        self._entries: dict[str, _Entry] = {}
        index = path / "model.safetensors.index.json"
        claimed = _read_index(index) if index.is_file() else {}
        for file in sorted({path / f for f in claimed.values()}) or [_single(path)]:
            self._open(file)
        for name, file_name in claimed.items():
            if name not in self._entries or self._entries[name].file.name != file_name:
                raise WeightsError(f"{index}: tensor {name!r} should be in {file_name} and is not there")

    def names(self) -> Collection[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def file(self, name: str) -> Path:
        return self._entries[name].file

    def span(self, name: str) -> Array:
        entry = self._entries[name]
        return self._maps[entry.file][entry.start : entry.stop]

    def read(self, name: str, start: int, stop: int) -> Rows:
        entry = self._entries[name]
        if entry.dtype not in _DTYPES:
            raise WeightsError(
                f"{entry.file}: tensor {name!r} is {entry.dtype}", fix=f"{', '.join(_DTYPES)} are read"
            )
        encoding, dtype = _DTYPES[entry.dtype]
        row_bytes = math.prod(entry.shape[1:]) * np.dtype(dtype).itemsize
        raw = self._maps[entry.file][entry.start + start * row_bytes : entry.start + stop * row_bytes]
        return Rows(_typed(raw, dtype).reshape(stop - start, *entry.shape[1:]), encoding)

    def form(self, name: str) -> str:
        dtype = self._entries[name].dtype
        return _DTYPES[dtype][0] if dtype in _DTYPES else ""

    def read_coded(self, name: str, start: int, stop: int) -> tuple[Array, Array]:  # noqa: ARG002
        raise WeightsError(f"{self.file(name)}: tensor {name!r} is not coded")

    def dtype(self, name: str) -> str:
        """The format's own name of a tensor's type: "BF16", "F8_E4M3", ..."""
        return self._entries[name].dtype

    def raw(self, name: str, start: int, stop: int) -> Array:
        """Rows [start, stop) as unsigned integers of the element's size: [rows, ...], not converted, writeable.

        Read and not mapped: pages of a map stay in memory when their tensor is done with, as many as the file has.
        For quantised tensors, whose numbers mean nothing without their scales. Raises WeightsError for other types.
        """
        entry = self._entries[name]
        if entry.dtype not in _RAW_BYTES:
            raise WeightsError(
                f"{entry.file}: tensor {name!r} is {entry.dtype}", fix=f"{', '.join(_RAW_BYTES)} are read"
            )
        size = _RAW_BYTES[entry.dtype]
        row_bytes = math.prod(entry.shape[1:]) * size
        shape = (stop - start, *entry.shape[1:])
        at = entry.start + start * row_bytes
        bits = np.fromfile(entry.file, np.dtype(f"u{size}"), count=math.prod(shape), offset=at)
        return bits.reshape(shape)

    def _open(self, file: Path) -> None:
        if not file.is_file():
            raise WeightsError(f"{file} is missing", fix="fetch the checkpoint again")
        raw = map_file(file)
        self._maps[file] = raw
        for name, entry in _read_entries(file, raw).items():
            if name in self._entries:
                raise WeightsError(f"tensor {name!r} is in {self._entries[name].file} and in {file}")
            self._entries[name] = entry


def _typed(raw: Array, dtype: Any) -> Array:
    """View bytes as numbers; the format does not promise that tensors are aligned, so copy where they are not."""
    return raw.view(dtype) if raw.ctypes.data % np.dtype(dtype).itemsize == 0 else raw.copy().view(dtype)


def _single(path: Path) -> Path:
    found = sorted(path.glob("*.safetensors"))
    if len(found) > 1 and path / "model.safetensors" not in found:
        raise WeightsError(
            f"{path} holds {len(found)} .safetensors files and no model.safetensors.index.json"
        )
    return path / "model.safetensors" if path / "model.safetensors" in found or not found else found[0]


def _read_index(index: Path) -> dict[str, str]:
    try:
        claimed = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise WeightsError(f"{index} is no index of shards: {type(e).__name__} {e}") from e
    if not isinstance(claimed, dict) or not claimed or not all(isinstance(v, str) for v in claimed.values()):
        raise WeightsError(f"{index}: weight_map does not map tensor names to file names")
    return claimed


def _read_entries(file: Path, raw: Array) -> dict[str, _Entry]:
    length = int.from_bytes(bytes(raw[:8]), "little")
    if length > min(_MAX_HEADER, len(raw) - 8):
        raise WeightsError(
            f"{file}: a header of {length} bytes in a file of {len(raw)}: truncated or not safetensors",
            fix="fetch the file again",
        )
    try:
        header = json.loads(bytes(raw[8 : 8 + length]))
        items = [(n, e) for n, e in header.items() if n != "__metadata__"]
    except (ValueError, AttributeError, RecursionError) as e:
        raise WeightsError(f"{file}: its header is no JSON object: corrupted") from e
    entries = {}
    for name, item in items:
        entries[name] = _read_entry(name, item, file, 8 + length)
        entry = entries[name]
        check_inside(name, file, start=entry.start, stop=entry.stop, size=len(raw))
    return entries


def _read_entry(name: str, item: Any, file: Path, base: int) -> _Entry:
    try:
        dtype, shape = str(item["dtype"]), tuple(int(n) for n in item["shape"])
        start, stop = (int(n) for n in item["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError) as e:
        raise WeightsError(f"{file}: tensor {name!r} is described by {item!r}: corrupted") from e
    if dtype in _RAW_BYTES:
        expected = math.prod(shape) * _RAW_BYTES[dtype]
        if min(shape, default=0) < 0 or stop - start != expected:
            raise WeightsError(
                f"{file}: tensor {name!r} of shape {list(shape)} {dtype} needs {expected} bytes, not {stop - start}"
            )
    return _Entry(file, dtype, shape, base + start, base + stop)
