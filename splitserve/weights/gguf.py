"""GGUF files: the header from gguf_header.py, tensors turned to numbers by the `gguf` package. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

import numpy as np

from splitserve.errors import WeightsError
from splitserve.gguf_header import read_header

from . import coded
from .checkpoint import Array, Rows, check_inside, map_file

_PLAIN = {"F32": ("f32", np.float32), "F16": ("f16", np.float16), "BF16": ("bf16", np.uint16)}


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
            self._check_span(name)

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def file(self, name: str) -> Path:  # noqa: ARG002 - one file holds them all
        return self.path

    def type(self, name: str) -> int:
        """ggml's number of a tensor's type."""
        return self._tensors[name].type

    def span(self, name: str) -> Array:
        return self._bytes[self._tensors[name].start : self._stop(name)]

    def read(self, name: str, start: int, stop: int) -> Rows:
        raw = self._raw(name, start, stop)
        return self._numbers(raw, name, (stop - start, *self._tensors[name].shape[1:]))

    def form(self, name: str) -> str:
        kind = self._type_name(name)
        if kind in _PLAIN:
            return _PLAIN[kind][0]
        return "coded" if kind in coded.TYPES and len(self._tensors[name].shape) == 2 else ""

    def read_coded(self, name: str, start: int, stop: int) -> tuple[Array, Array]:
        raw = self._raw(name, start, stop)
        with np.errstate(all="ignore"):  # as in _numbers
            return coded.codes_and_scales(self._type_name(name), raw.reshape(stop - start, -1))

    def _raw(self, name: str, start: int, stop: int) -> Array:
        tensor = self._tensors[name]
        # ggml's rows run along the last dimension, ours along the first
        row_bytes = self._row_bytes(name) * math.prod(tensor.shape[1:-1])
        return self._bytes[tensor.start + start * row_bytes : tensor.start + stop * row_bytes]

    def _type_name(self, name: str) -> str:
        from gguf.constants import GGMLQuantizationType

        return GGMLQuantizationType(self._tensors[name].type).name

    def _check_span(self, name: str) -> None:
        check_inside(
            name, self.path, start=self._tensors[name].start, stop=self._stop(name), size=len(self._bytes)
        )

    def _stop(self, name: str) -> int:
        tensor = self._tensors[name]
        num_rows = math.prod(tensor.shape[:-1] if len(tensor.shape) > 1 else tensor.shape)
        return tensor.start + num_rows * self._row_bytes(name)

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
