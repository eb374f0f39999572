"""Planted faults: what `verify --plant` breaks on purpose, to show that it would be noticed. Never armed by itself.

A Faults object is given to a Port where the operator allowed it, stays idle until `plant`, and then damages the given
number of writes the way a real bug would: the sender's note does not know of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from splitserve.errors import RequestError
from splitserve.spec import Kind
from splitserve.transfer.layout import Copies
from splitserve.wire import Card, Note

FAULTS: Mapping[str, str] = {
    "drop_chunk": "a chunk's note is sent, its bytes are not",
    "swap_heads": "two pieces (KV heads; where there is one, those of two layers) of a page change places",
    "stale_page": "a page's bytes come from another page",
    "lose_note": "a chunk is written, its note never leaves",
    "drop_state": "one layer's state is left out",
}
"""name -> what happens to a write."""

THROTTLES: Mapping[str, str] = {
    "slow_decode": "a step that decodes takes at least so long, whatever its batch",
    "slow_prefill": "each prompt token of a step takes at least so long",
    "slow_link": "each write that carries bytes takes at least so long, one after another",
}
"""name -> what a planted slowness means. Nothing is damaged: they show what `compare` says of a slow part."""


MAX_SLOW_S = 10.0
"""Longest throttle: a peer is given up after as long a silence."""


class Faults:
    """How many more writes each fault will damage, and how slow each throttled part is."""

    def __init__(self) -> None:
        self._left = dict.fromkeys(FAULTS, 0)
        self._slow_s = dict.fromkeys(THROTTLES, 0.0)

    def plant(self, name: str, times: int = 1) -> None:
        """Damage the next `times` writes. Raises RequestError for a name that is not in FAULTS."""
        if name not in self._left:
            raise RequestError(f"no fault {name!r}", field="fault", fix=f"one of {', '.join(FAULTS)}")
        self._left[name] = times

    def slow(self, name: str, seconds: float) -> None:
        """Throttle a part from now on; 0.0 lets it go. Raises RequestError for a name that is not in THROTTLES."""
        if name not in self._slow_s:
            raise RequestError(f"no throttle {name!r}", field="fault", fix=f"one of {', '.join(THROTTLES)}")
        if not 0.0 <= seconds <= MAX_SLOW_S:
            raise RequestError(
                f"{name} of {seconds * 1000:g} ms; 0 to {MAX_SLOW_S * 1000:g} are allowed", field="ms"
            )
        self._slow_s[name] = seconds

    def slowness(self, name: str) -> float:
        """Seconds planted by `slow`; 0.0 where nothing is."""
        return self._slow_s[name]

    def damage(self, card: Card, copies: Copies, note: Note) -> tuple[Copies, Note | None]:
        """What to write and to say instead (None: nothing). Writes that carry no bytes are spared."""
        name = next((n for n, left in self._left.items() if left and len(copies)), None)
        if name is None:
            return copies, note
        self._left[name] -= 1
        match name:
            case "drop_chunk":
                return Copies(copies.src[:0], copies.dst[:0]), note
            case "swap_heads":
                return _swap_pieces(card, copies), note
            case "stale_page":
                return _shift_page(card, copies), note
            case "lose_note":
                return copies, None
            case _:  # "drop_state": a sender that forgets a layer counts only what it sends
                copies = _leave_out(card, copies)
                return copies, msgspec.structs.replace(note, bytes=copies.num_bytes)

    def check(self) -> dict[str, int]:
        """Faults that are still to come."""
        return {n: left for n, left in self._left.items() if left}


def _cut(card: Card, copies: Copies) -> Copies:
    """The same copies, cut wherever a field of a page begins at the source."""
    slab = next(s for s in card.slabs if s.kind is Kind.PAGE)
    starts = np.array(sorted({f.offset for f in card.fields if f.spec.kind is Kind.PAGE}), np.int64)
    rows = []
    for (src, length, src_device), (dst, _, dst_device) in zip(
        copies.src.tolist(), copies.dst.tolist(), strict=True
    ):
        pages = np.arange(
            (src - slab.addr) // slab.unit_bytes, (src + length - 1 - slab.addr) // slab.unit_bytes + 1
        )
        borders = (pages[:, None] * slab.unit_bytes + starts).ravel() + slab.addr
        inside = borders[(borders > src) & (borders < src + length)]
        begins = [src, *inside.tolist()]
        for begin, end in zip(begins, [*begins[1:], src + length], strict=True):
            rows.append((begin, dst + begin - src, end - begin, src_device, dst_device))
    table = np.array(rows, np.uint64)
    return Copies(table[:, [0, 2, 3]], table[:, [1, 2, 4]])


def _swap_pieces(card: Card, copies: Copies) -> Copies:
    """Source addresses of one head's run and another's exchanged; of one layer's and another's where heads are one."""
    cut = _cut(card, copies)
    fields = [f for f in card.fields if f.spec.kind is Kind.PAGE]
    one = fields[0]
    heads = [
        f
        for f in fields
        if f.piece != one.piece and (f.spec.name, f.spec.layer) == (one.spec.name, one.spec.layer)
    ]
    shape = (one.spec.row_bytes, one.rows_per_unit)
    layers = [
        f for f in fields if f.spec.layer != one.spec.layer and (f.spec.row_bytes, f.rows_per_unit) == shape
    ]
    other = next(iter(heads or layers), one)
    at = {(int(a), int(n)): i for i, (a, n, _) in enumerate(cut.src.tolist())}
    src = cut.src.copy()
    for (address, length), i in at.items():
        j = at.get((address + other.offset - one.offset, length))
        if j is not None and j != i:
            src[[i, j], 0] = src[[j, i], 0]
            break
    return Copies(src, cut.dst)


def _shift_page(card: Card, copies: Copies) -> Copies:
    """The first run reads the same place of a neighbouring unit."""
    src = copies.src.copy()
    address = int(src[0, 0])
    slab = next(s for s in card.slabs if s.addr <= address < s.addr + s.count * s.unit_bytes)
    room_after = address + int(src[0, 1]) + slab.unit_bytes <= slab.addr + slab.count * slab.unit_bytes
    src[0, 0] = address + slab.unit_bytes if room_after else max(slab.addr, address - slab.unit_bytes)
    return Copies(src, copies.dst)


def _leave_out(card: Card, copies: Copies) -> Copies:
    """The first field's runs are not written."""
    cut = _cut(card, copies)
    slab = next(s for s in card.slabs if s.kind is Kind.PAGE)
    first = min(f.offset for f in card.fields if f.spec.kind is Kind.PAGE)
    offset = (cut.src[:, 0].astype(np.int64) - slab.addr) % slab.unit_bytes
    keep = offset != first
    keep[0] = False
    return Copies(cut.src[keep], cut.dst[keep])
