"""This rank's slabs: the memory of pages and slots, and typed views of it. It decides nothing about who owns a unit.

    slab of pages, uint8:  │ unit 0                         │ unit 1 ...
                           │ piece 0: layer 0 rows, layer 1 │
    view("kv", 1)[unit, piece, row, :] ───────────▲          strides in elements, 64-bit

The memory comes from `allocate`, which the transport supplies (registered or shared memory). It is used as it comes:
fresh memory is not cleared, because a row is always written before it is read; `verify` and tests call `poison`
first to prove that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from splitserve.errors import CapacityError, InvariantError
from splitserve.spec import Field, Kind, Layout, Slab, StateSpec

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
"""Element types of encodings; rows of any other encoding are seen as bytes."""

POISON = 0xFF
"""A byte that makes NaN of every element it fills: f32, bf16, f16, and FP8 E4M3 and E5M2 alike."""


class Pool:
    """Slabs of one rank; implements `layers.forward.States`. Works in `with`; `close` lets the memory go."""

    def __init__(
        self,
        specs: Sequence[StateSpec],
        *,
        layout: Layout,
        num_pages: int,
        num_slots: int,
        device: torch.device | str,
        allocate: Callable[[int], Tensor],
    ) -> None:
        """Allocates both slabs. `allocate(nbytes)` returns [nbytes] uint8 on `device`, or raises.

        Raises CapacityError, with the bytes that one page needs, when there is no memory for it.
        """
        self.device = torch.device(device)
        self.layout = layout
        self._memory: dict[Kind, Tensor] = {}
        self._fields = _by_name(layout)
        missing = [(s.name, s.layer) for s in specs if (s.name, s.layer) not in self._fields]
        if missing:
            raise InvariantError(f"the layout has no fields for states {missing}")
        counts = {Kind.PAGE: (num_pages, layout.page_bytes), Kind.SLOT: (num_slots, layout.slot_bytes)}
        for kind, (count, unit_bytes) in counts.items():
            if unit_bytes:
                self._memory[kind] = self._allocate(kind, count, unit_bytes, allocate)
        self._views = {key: self._view(fields) for key, fields in self._fields.items()}
        self.slabs = tuple(
            Slab(kind, memory.data_ptr(), memory.shape[1], memory.shape[0], _device_index(memory))
            for kind, memory in self._memory.items()
        )

    def __repr__(self) -> str:
        slabs = ", ".join(f"{s.count} {s.kind}s of {s.unit_bytes:,} bytes" for s in self.slabs)
        return f"Pool({slabs} on {self.device})"

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def memory(self) -> dict[Kind, Tensor]:
        """Each slab as [units, unit_bytes] uint8."""
        return dict(self._memory)

    def view(self, name: str, layer: int) -> Tensor:
        """[units, local_pieces, rows_per_unit, row_elements] of one spec, strided, in its encoding's dtype.

        Reading and writing go to the slab. Raises InvariantError for a spec that the model did not declare.
        """
        try:
            return self._views[name, layer]
        except KeyError:
            known = sorted({n for n, _ in self._views})
            raise InvariantError(f"no state {name!r} of layer {layer} here; states are {known}") from None

    def unit_bytes_at(self, kind: Kind, unit: int) -> Tensor:
        """[unit_bytes] uint8 of one page or slot, not a copy."""
        return self._memory[kind][unit]

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slot units whole: (from, to), one after the other."""
        memory = self._memory[Kind.SLOT]
        for source, target in pairs:
            memory[target].copy_(memory[source])

    def poison(self, page_ids: Sequence[int], slot_ids: Sequence[int] = ()) -> None:
        """Fill units with NaN patterns, so that whoever reads a row that nobody wrote is found out.

        They are filled when it returns: a peer may write to them next, and its writes know nothing of our stream.
        """
        for kind, ids in ((Kind.PAGE, page_ids), (Kind.SLOT, slot_ids)):
            if len(ids):
                memory = self._memory[kind]
                memory[torch.as_tensor(ids, dtype=torch.int64, device=memory.device)] = POISON
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Forget memory and views; the memory is freed when nobody else (a transport) refers to it."""
        self._views.clear()
        self._memory.clear()
        self.slabs = ()

    def _allocate(self, kind: Kind, count: int, unit_bytes: int, allocate: Callable[[int], Tensor]) -> Tensor:
        size = count * unit_bytes
        what = f"{count} {kind}s of {unit_bytes:,} bytes ({size:,} bytes) on {self.device}"
        page_bytes = f"one page of {self.layout.page_tokens} tokens needs {self.layout.page_bytes:,} bytes"
        if count < 1:
            raise CapacityError(f"no room for {what}: {page_bytes}", field="memory_mb")
        try:
            flat = allocate(size)
        except (
            MemoryError,
            OSError,
            RuntimeError,
        ) as e:  # torch's allocators raise RuntimeErrors, a memfd OSError
            raise CapacityError(
                f"no memory for {what}: {page_bytes}; {e}",
                field="memory_mb",
                fix="give less memory_mb, or fewer pages or slots",
            ) from e
        if flat.dtype != torch.uint8 or flat.shape != (size,) or flat.device.type != self.device.type:
            raise InvariantError(
                f"allocate({size}) returned {flat.dtype} {tuple(flat.shape)} on {flat.device}"
            )
        return flat.view(count, unit_bytes)

    def _view(self, fields: Sequence[Field]) -> Tensor:
        """Pieces of one spec lie at equal distances (spec.lay_out), so that one strided tensor covers them."""
        first, spec = fields[0], fields[0].spec
        step = fields[1].offset - first.offset if len(fields) > 1 else 0
        if any(f.offset != first.offset + i * step for i, f in enumerate(fields)):
            raise InvariantError(f"pieces of {spec.name!r} of layer {spec.layer} lie at unequal distances")
        memory = self._memory[spec.kind]
        size = spec.element_bytes
        elements = memory.view(-1).view(DTYPES.get(spec.encoding, torch.uint8))
        return elements.as_strided(
            (memory.shape[0], len(fields), first.rows_per_unit, spec.row_bytes // size),
            (memory.shape[1] // size, step // size, first.row_stride // size, 1),
            elements.storage_offset() + first.offset // size,
        )


def _by_name(layout: Layout) -> dict[tuple[str, int], list[Field]]:
    """Fields of each spec, by piece."""
    fields: dict[tuple[str, int], list[Field]] = {}
    for field in sorted((*layout.page_fields, *layout.slot_fields), key=lambda f: f.piece):
        fields.setdefault((field.spec.name, field.spec.layer), []).append(field)
    return fields


def _device_index(memory: Tensor) -> int:
    """As in `Slab.device`: -1 for host memory."""
    return memory.device.index or 0 if memory.device.type == "cuda" else -1
