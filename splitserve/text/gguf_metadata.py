"""The key-value head of a GGUF file, nothing of its tensors: what the tokenizer and the chat template need.

    "GGUF" | u32 version | u64 tensors | u64 keys | keys x ( string name | u32 type | value ) | tensors ...
    string = u64 length | bytes          array = u32 type | u64 count | values

Little-endian, versions 2 and 3. The `gguf` package makes a numpy view of every array element, which takes six
seconds for a vocabulary of 49,152; this takes some 60 ms.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from splitserve.errors import WeightsError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


def read(path: Path) -> dict[str, Any]:
    """All metadata of `path`: scalars, strings and lists by key. WeightsError says what is wrong and where."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
            return _Cursor(raw, path).metadata()
    except FileNotFoundError:
        raise WeightsError(f"{path}: no such file") from None
    except (OSError, ValueError) as e:  # mmap refuses an empty file with ValueError
        raise WeightsError(f"{path}: cannot be read: {e}") from e


class _Cursor:
    """Reads values one after another; every length is checked against what is left of the file."""

    def __init__(self, raw: mmap.mmap, path: Path) -> None:
        self._raw = raw
        self._path = path
        self._at = 0

    def metadata(self) -> dict[str, Any]:
        if self._take(4) != b"GGUF":
            raise WeightsError(f"{self._path}: does not begin with GGUF")
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise WeightsError(f"{self._path}: GGUF version {version}, known are {_VERSIONS}")
        self._scalar("Q")  # number of tensors
        num_keys = self._scalar("Q")
        found: dict[str, Any] = {}
        for _ in range(num_keys):
            name = self._string()
            found[name] = self._value(self._scalar("I"))
        return found

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(self._code(kind))
        inner, count = self._scalar("I"), self._scalar("Q")
        if inner in (_STRING, _ARRAY):
            self._need(8 * count)  # each element has at least its length, so that a wild count fails here
            return [self._value(inner) for _ in range(count)]
        code = self._code(inner)
        self._need(struct.calcsize("<" + code) * count)
        return list(struct.unpack(f"<{count}{code}", self._take(struct.calcsize("<" + code) * count)))

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise WeightsError(f"{self._path}: value type {kind} at byte {self._at} is no GGUF type")
        return _SCALARS[kind]

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8", errors="replace")

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _take(self, size: int) -> bytes:
        self._need(size)
        start, self._at = self._at, self._at + size
        return self._raw[start : self._at]

    def _need(self, size: int) -> None:
        left = len(self._raw) - self._at
        if size > left:
            raise WeightsError(f"{self._path}: cut short: {size} bytes wanted at {self._at}, {left} are left")
