"""A name for what a checkpoint says, short enough to compare in a handshake: two models of one shape differ in it.

Not a checksum: it looks at every tensor's name and shape and at a few bytes of at most `_MAX_TENSORS` of them, so that
it costs milliseconds also where a checkpoint lies on a slow disk. It tells apart what training tells apart, and does
not find one damaged byte. Torch-free.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from .checkpoint import Array
from .locate import Source
from .open import open_checkpoint

_MAX_TENSORS = 1024
_BYTES = 256  # of each tensor looked at, from its middle: the ends of embeddings are often padding


def fingerprint(source: Source, *, context: str = "") -> str:
    """Sixteen hex digits; `context` is what else two sides must share to mean the same. Raises WeightsError."""
    checkpoint = open_checkpoint(source)
    names = sorted(checkpoint.names())
    digest = hashlib.blake2b(context.encode(), digest_size=8)
    for name in names:
        digest.update(f"{name}{checkpoint.shape(name)}".encode())
    for name in _spread(names):
        digest.update(_middle(checkpoint.span(name)))
    return digest.hexdigest()


def _spread(names: Sequence[str]) -> Sequence[str]:
    return names[:: -(-len(names) // _MAX_TENSORS) or 1]


def _middle(raw: Array) -> bytes:
    start = max(len(raw) // 2 - _BYTES // 2, 0)
    return bytes(raw[start : start + _BYTES])
