"""GGUF files: the header read here, tensors turned to numbers by the `gguf` package. Torch-free.

    "GGUF" | version u32 | tensors u64 | entries u64
    entries: key string, type u32, value         (a string is its length u64 and its UTF-8 bytes)
    tensors: name string, dims u32, dim u64 ..., type u32, offset u64     (dims: fastest first, so reversed here)
    padding to general.alignment, then the tensors at their offsets

The header is parsed here, since the package's reader takes seconds on a vocabulary and meets a damaged file with a bare
numpy error. Layout: the GGUF specification in the ggml repository (docs/gguf.md), versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from splitserve.errors import WeightsError

from .checkpoint import Array, Rows, check_inside, map_file

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4  # ggml's own limit
_MAX_ENTRIES = 1 << 24  # more keys, tensors or array items than this is damage, not a model

_PLAIN = {"F32": ("f32", np.float32), "F16": ("f16", np.float16), "BF16": ("bf16", np.uint16)}


@dataclass(frozen=True)
class GgufTensor:
    shape: tuple[int, ...]  # rows first
    type: int  # ggml's number
    start: int  # byte in the file


@dataclass(frozen=True)
class GgufHeader:
    """Everything before the tensor bytes: metadata by key, tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Reads little-endian values from the front of a file and says where it ended."""

    def __init__(self, path: Path, raw: memoryview) -> None:
        self.path = path
        self.raw = raw
        self.at = 0

    def take(self, fmt: str) -> Any:
        start, self.at = self.at, self.at + struct.calcsize("<" + fmt)
        if self.at > len(self.raw):
            raise self.damaged(
                f"the header goes on at byte {start}, the file ends at {len(self.raw)}: truncated"
            )
        return struct.unpack_from("<" + fmt, self.raw, start)[0]

    def string(self) -> str:
        length = self.take("Q")
        start, self.at = self.at, self.at + length
        if self.at > len(self.raw):
            raise self.damaged(
                f"a string of {length} bytes at byte {start} passes the end at {len(self.raw)}"
            )
        # Vocabularies hold pieces of characters, so strings need not be whole UTF-8.
        return str(self.raw[start : self.at], "utf-8", "surrogateescape")

    def count(self, what: str, limit: int = _MAX_ENTRIES) -> int:
        number: int = self.take("Q" if limit > _MAX_DIMS else "I")
        if number > limit:
            raise self.damaged(f"{number} {what} before byte {self.at}: more than any model has")
        return number

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.damaged(f"value of unknown type {kind} before byte {self.at}")
        item, length = self.take("I"), self.count("array items")
        if item == _ARRAY:
            raise self.damaged(f"an array of arrays before byte {self.at}")
        if item in _SCALARS:
            return self._numbers(_SCALARS[item], length)
        return [self.value(item) for _ in range(length)]

    def _numbers(self, fmt: str, length: int) -> list[Any]:
        start, self.at = self.at, self.at + length * struct.calcsize("<" + fmt)
        if self.at > len(self.raw):
            raise self.damaged(f"an array of {length} at byte {start} passes the end at {len(self.raw)}")
        return list(struct.unpack_from(f"<{length}{fmt}", self.raw, start))

    def damaged(self, why: str) -> WeightsError:
        return WeightsError(f"{self.path}: {why}", fix="the file is damaged; fetch it again")


def read_header(path: Path) -> GgufHeader:
    """Parse the header of a GGUF file. Raises WeightsError that names the file and the byte."""
    cursor = _Cursor(path, map_file(path).data)
    if bytes(cursor.raw[:4]) != b"GGUF":
        raise WeightsError(f"{path} is not a GGUF file: it begins with {bytes(cursor.raw[:4])!r}")
    cursor.at = 4
    version = cursor.take("I")
    if version not in (2, 3):
        raise WeightsError(f"{path}: GGUF version {version}; 2 and 3 (little-endian) are read")
    num_tensors, num_entries = cursor.count("tensors"), cursor.count("metadata entries")
    metadata = {}
    for _ in range(num_entries):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.take("I"))
    found = [_read_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise cursor.damaged(f"general.alignment is {alignment!r}")
    base = -(-cursor.at // alignment) * alignment
    return GgufHeader(metadata, {name: GgufTensor(s, t, base + o) for name, s, t, o in found})


def _read_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    dims = tuple(cursor.take("Q") for _ in range(cursor.count(f"dimensions of tensor {name!r}", _MAX_DIMS)))
    return name, dims[::-1], cursor.take("I"), cursor.take("Q")


class GgufFile:
    """An open GGUF file: a Checkpoint, and its metadata."""

    format = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        self.metadata = header.metadata
        self._tensors = header.tensors
        self._bytes = map_file(path)
        if self.metadata.get("split.count", 1) != 1:
            raise WeightsError(
                f"{path} is one of {self.metadata['split.count']} parts",
                fix="join them with llama-gguf-split --merge",
            )
        for name in self._tensors:  # all of them now: a truncated file should fail before minutes of loading
            self._span(name)

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def file(self, name: str) -> Path:  # noqa: ARG002 - one file holds them all
        return self.path

    def type(self, name: str) -> int:
        """ggml's number of a tensor's type."""
        return self._tensors[name].type

    def read(self, name: str, start: int, stop: int) -> Rows:
        tensor = self._tensors[name]
        row_bytes = self._row_bytes(name)
        rows_each = math.prod(
            tensor.shape[1:-1]
        )  # ggml's rows run along the last dimension, ours along the first
        first = tensor.start + start * rows_each * row_bytes
        raw = self._bytes[first : first + (stop - start) * rows_each * row_bytes]
        return self._numbers(raw, name, (stop - start, *tensor.shape[1:]))

    def _span(self, name: str) -> None:
        tensor = self._tensors[name]
        num_rows = math.prod(tensor.shape[:-1] if len(tensor.shape) > 1 else tensor.shape)
        stop = tensor.start + num_rows * self._row_bytes(name)
        check_inside(name, self.path, start=tensor.start, stop=stop, size=len(self._bytes))

    def _row_bytes(self, name: str) -> int:
        """Bytes of one ggml row (the last dimension) of a matrix; of one element of a vector."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        tensor = self._tensors[name]
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type)]
        except (KeyError, ValueError):
            raise WeightsError(f"{self.path}: tensor {name!r} has unknown type {tensor.type}") from None
        columns = tensor.shape[-1] if len(tensor.shape) > 1 else 1
        if columns % block:
            raise WeightsError(
                f"{self.path}: tensor {name!r} has rows of {columns}, not a multiple of {block}"
            )
        return columns // block * block_bytes

    def _numbers(self, raw: Array, name: str, shape: tuple[int, ...]) -> Rows:
        """Bytes of whole rows as numbers: seen in place where they are plain, else dequantised."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType(self._tensors[name].type)
        if kind.name in _PLAIN:
            encoding, dtype = _PLAIN[kind.name]
            return Rows(raw.view(dtype).reshape(shape), encoding)
        try:
            with np.errstate(all="ignore"):  # a damaged scale gives NaN, which the loader reports
                numbers = dequantize(np.asarray(raw).reshape(-1, self._row_bytes(name)), kind)
        except NotImplementedError:
            raise WeightsError(
                f"{self.path}: tensor {name!r} is quantised as {kind.name}, which is not read",
                fix="use a plain type, Q4_0 to Q8_0, a K-quant or an IQ type",
            ) from None
        return Rows(numbers.reshape(shape), "f32")
