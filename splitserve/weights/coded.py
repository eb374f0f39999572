"""ggml's linear types as a byte a number and a scale and a least number a group: w = scale c + least. Torch-free.

    in the file, for 32 numbers              c                    scale, least
    Q4_0   d, 16 bytes                       nibble               d, -8 d
    Q4_1   d, m, 16 bytes                    nibble               d, m
    Q5_0   d, 32 high bits, 16 bytes         high bit, nibble     d, -16 d
    Q5_1   d, m, 32 high bits, 16 bytes      high bit, nibble     d, m
    Q8_0   d, 32 signed bytes                q + 128              d, -128 d

d and m are f16; the nibble of number i is the low half of byte i, that of number i + 16 the high half. ggml defines w
as d (q - zero) or d q + m. This is the same number: d q needs at most 19 bits, so the one rounding is that of the sum.
"""

from __future__ import annotations

import numpy as np

from .checkpoint import Array

GROUP = 32
TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def codes_and_scales(type_: str, rows: Array) -> tuple[Array, Array]:
    """(codes [n, k] uint8, scales [n, k / 32, 2] float32) of n packed rows [n, bytes] uint8 of one of TYPES."""
    groups = rows.reshape(len(rows), -1, _group_bytes(type_))
    scales = np.empty((*groups.shape[:2], 2), dtype=np.float32)
    num_halves = 2 if type_.endswith("_1") else 1
    halves = np.ascontiguousarray(groups[..., : 2 * num_halves]).view(np.float16)
    scales[..., :num_halves] = halves
    packed = groups[..., 2 * num_halves :]
    if type_ == "Q8_0":
        codes, zero = packed ^ np.uint8(0x80), 128
    elif type_.startswith("Q5"):
        high = np.unpackbits(packed[..., :4], axis=-1, bitorder="little")
        codes, zero = _nibbles(packed[..., 4:]) | (high << np.uint8(4)), 16
    else:
        codes, zero = _nibbles(packed), 8
    if num_halves == 1:
        scales[..., 1] = -zero * scales[..., 0]
    return codes.reshape(len(rows), -1), scales


def _nibbles(packed: Array) -> Array:
    """[..., 16] -> [..., 32]."""
    return np.concatenate((packed & np.uint8(15), packed >> np.uint8(4)), axis=-1)


def _group_bytes(type_: str) -> int:
    return {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}[type_]
