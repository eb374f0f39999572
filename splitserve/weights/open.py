"""Open a located checkpoint by its format. Torch-free."""

from __future__ import annotations

from .checkpoint import Checkpoint
from .gguf import GgufFile
from .locate import Source
from .safetensors import SafetensorsDir


def open_checkpoint(source: Source) -> Checkpoint:
    """Map the files and read their headers. Raises WeightsError."""
    return GgufFile(source.path) if source.format == "gguf" else SafetensorsDir(source.path)
