"""Digests of rows that lie on a GPU, for the Port of this rank: the kernels of ops, on a stream of their own.

They start when a step is known to have ended and the next may be running; a stream of higher priority lets them pass
it. The host waits for them, and for nothing else on the device: some milliseconds, in the handoffs that are compared.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from splitserve.spec import Field, Kind, Units
from splitserve.transfer.digest import Words


class DeviceDigests:
    """`transfer.digest.Digests` of slabs [units, unit_bytes] uint8 on one device."""

    def __init__(self, memory: Mapping[Kind, torch.Tensor]) -> None:
        self._memory = dict(memory)
        device = next(iter(self._memory.values())).device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._ops = _ops(device)

    def warm_up(self, fields: Sequence[Field], page_tokens: int) -> None:
        """Run over the first page and slot, so that no handoff waits for a kernel to be compiled."""
        units = [Units(kind, (0,), 0, 0, page_tokens) for kind in self._memory]
        self.of_fields(fields, units, start=0, stop=page_tokens, last=True)

    def of_fields(
        self, fields: Sequence[Field], units: Sequence[Units], *, start: int, stop: int, last: bool
    ) -> Words:
        """[len(fields)] uint64, as transfer.digest.field_digests."""
        with torch.cuda.stream(self._stream):  # None: the CPU's, for tests
            each = self._ops.field_digests(fields, self._memory, units, start=start, stop=stop, last=last)
        found: Words = each.numpy().view(np.uint64)
        return found

    def of_all(
        self, fields: Sequence[Field], units: Sequence[Units], *, start: int, stop: int, last: bool
    ) -> int:
        """Their sum modulo 2^64, as transfer.digest.digest."""
        return int(self.of_fields(fields, units, start=start, stop=stop, last=last).sum(dtype=np.uint64))


def _ops(device: torch.device) -> Any:
    """The kernels on a GPU (device.take has seen that it is new enough) with Triton, else plain torch."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from splitserve.ops.triton import digest

        return digest
    from splitserve.ops.ref import digest as plain

    return plain
