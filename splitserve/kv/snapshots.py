"""Copies of slots in the prefix tree: where they lie, and which goes when there are too many. It touches no memory.

RING and SLOT state belongs to one point of a request. To continue a cached prefix, its state at that page border is
needed as well as its pages; such a copy is a *snapshot*, a slot unit of its own that hangs on a node of the tree.

             reserve                    keep                       evicted by a reserve, its page evicted,
    spare ──────────────▶ reserved ──────────────▶ kept by a node ──────────────▶ spare
      ▲    a step will       │        the step is
      └──  write it  ────────┘ drop   applied

The kept ones go in the order of last use.
"""

from __future__ import annotations

from collections import OrderedDict

from splitserve.errors import InvariantError

from .pages import Pages
from .tree import Node


class Snapshots:
    """Units [first, first + count) of the slot slab."""

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.count = count
        self.num_evicted = 0  # since the start
        self._spare = Pages(count)
        self._reserved: set[int] = set()
        self._kept: OrderedDict[int, Node] = OrderedDict()  # least recently used first

    def __repr__(self) -> str:
        return (
            f"Snapshots({len(self._kept)} kept, {len(self._reserved)} reserved, {self._spare.num_free} spare)"
        )

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def reserve(self) -> int | None:
        """A unit for a step to write, if need be the least recently used one. None: all are about to be written."""
        taken = self._spare.take(1)
        if taken is not None:
            unit = self.first + taken[0]
        elif self._kept:
            unit, node = self._kept.popitem(last=False)
            node.snapshot = None
            self.num_evicted += 1
        else:
            return None
        self._reserved.add(unit)
        return unit

    def keep(self, unit: int, node: Node | None) -> None:
        """The reserved unit holds the state at `node`'s end. It is spare again where there is no need for it."""
        if node is None or node.snapshot is not None:
            self.drop(unit)
            return
        self._reserved.remove(unit)
        node.snapshot = unit
        self._kept[unit] = node

    def drop(self, unit: int) -> None:
        """Nothing worth keeping was written to the reserved unit."""
        self._reserved.remove(unit)
        self._spare.give([unit - self.first])

    def touch(self, unit: int) -> None:
        """A request continues from it."""
        self._kept.move_to_end(unit)

    def forget(self, node: Node) -> None:
        """The node leaves the tree."""
        if node.snapshot is not None:
            del self._kept[node.snapshot]
            self._spare.give([node.snapshot - self.first])
            node.snapshot = None

    def spare(self) -> list[int]:
        """Units whose content means nothing."""
        return [self.first + i for i in self._spare.free_pages()]

    def check(self, nodes: dict[int, Node]) -> None:
        """Raise InvariantError unless `nodes`, by unit, are the kept ones and every unit is in one place."""
        self._spare.check()
        if nodes != dict(self._kept):
            raise InvariantError(f"snapshots {sorted(nodes)} hang in the tree, {sorted(self._kept)} are kept")
        places = sorted([*self.spare(), *self._reserved, *self._kept])
        if places != list(range(self.first, self.first + self.count)):
            raise InvariantError(f"snapshots are lost or in two places: {places} of {self!r}")
