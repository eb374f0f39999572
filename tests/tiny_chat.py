"""A tiny checkpoint that a server can load: random weights, a byte-level tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from splitserve.text import byte_tokenizer
from tests.tiny import write_checkpoint


def write_chat_checkpoint(path: Path, *, family: str = "llama", **changes: Any) -> Path:
    """Its vocabulary is the byte tokenizer's, if `changes` ask for no other."""
    sizes = {"vocab_size": byte_tokenizer.NUM_TOKENS, "max_position_embeddings": 2048, **changes}
    write_checkpoint(path, family, **sizes)
    byte_tokenizer.write(path)
    return path
