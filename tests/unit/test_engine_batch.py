"""A step's numbers on their way to a device: packed into one copy, nothing lost, every part aligned."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from splitserve.engine.batch import _on_device, _pack

shapes = st.lists(
    st.one_of(st.tuples(st.integers(0, 9)), st.tuples(st.integers(1, 4), st.integers(1, 7))),
    min_size=1,
    max_size=8,
)


@given(shapes)
def test_packed_arrays_come_out_whole_and_aligned(wanted: list[tuple[int, ...]]) -> None:
    arrays = [np.arange(np.prod(s), dtype=np.int64).reshape(s) + 100 * i for i, s in enumerate(wanted)]
    packed, starts = _pack(arrays, pinned=False)
    for start, array in zip(starts, arrays, strict=True):
        assert start * packed.element_size() % 16 == 0
        assert np.array_equal(packed[start : start + array.size].numpy().reshape(array.shape), array)
    for device in ("cpu", "meta"):
        moved = _on_device(arrays, torch.device(device))
        assert [(t.device.type, tuple(t.shape), t.dtype) for t in moved] == [
            (device, s, torch.int64) for s in wanted
        ]
