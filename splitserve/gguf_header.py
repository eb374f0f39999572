"""The header of a GGUF file: metadata by key, tensors by name. For weights and for tokenizers; knows neither.

    "GGUF" | version u32 | tensors u64 | entries u64
    entries: key string, type u32, value         (a string is its length u64 and its UTF-8 bytes)
    tensors: name string, dims u32, dim u64 ..., type u32, offset u64     (dims: fastest first, so reversed here)
    padding to general.alignment, then the tensors at their offsets

Parsed here, since the `gguf` package's reader takes seconds on a vocabulary and meets a damaged file with a bare numpy
error. Layout: the GGUF specification in the ggml repository (docs/gguf.md), versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitserve.errors import WeightsError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4  # ggml's own limit
_MAX_ENTRIES = 1 << 24  # more keys, tensors or array items than this is damage, not a model


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
        # Vocabularies may hold pieces of characters, so strings need not be whole UTF-8.
        return str(self.raw[start : self.at], "utf-8", "replace")

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


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:  # what mmap says of an empty file
        raise WeightsError(f"{path} is empty", fix="fetch the file again") from None
    except OSError as e:
        raise WeightsError(f"{path} cannot be read: {e.strerror or e}") from e


def read_header(path: Path) -> GgufHeader:
    """Parse the header of a GGUF file. Raises WeightsError that names the file and the byte."""
    cursor = _Cursor(path, memoryview(_map(path)))
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
