"""What a Port keeps beside its transport: peers it may write to, writes under way, and copies worked out beforehand."""

from __future__ import annotations

from dataclasses import dataclass, field

from splitserve.transfer.events import WriteOrder
from splitserve.transfer.layout import Copies, Link
from splitserve.wire import Card


@dataclass
class Peers:
    """The ranks of another engine, and how this rank's state maps onto theirs."""

    cards: tuple[Card, ...]
    handles: dict[int, str]  # destination rank -> transport's handle
    links: dict[int, Link]


@dataclass
class Posted:
    """A WriteOrder under way."""

    order: WriteOrder
    ids: set[int] = field(default_factory=set)
    bytes: int = 0
    descriptors: int = 0
    error: str = ""
    began: float = 0.0  # when its first bytes were posted


def first_row(order: WriteOrder) -> int:
    """Where its rows begin that decode does not have already."""
    return min(max(order.start, order.begin), order.stop)


def copies_of(order: WriteOrder, link: Link) -> Copies:
    """What an order means on one link. Raises as `Link.copies`."""
    return link.copies(order.src, order.dst, start=first_row(order), stop=order.stop, last=order.last)


class Prepared:
    """Copies worked out while their rows were still computed; of each room those of one order.

    They are taken only for an order that means the same rows at both ends.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[object, dict[int, Copies]]] = {}

    def keep(self, order: WriteOrder, copies: dict[int, Copies]) -> None:
        """`copies` by destination rank."""
        self._found[order.room] = (_meaning(order), copies)

    def take(self, order: WriteOrder, rank: int) -> Copies | None:
        meaning, copies = self._found.get(order.room, (None, {}))
        return copies.get(rank) if meaning == _meaning(order) else None

    def forget(self, room: int) -> None:
        self._found.pop(room, None)


def _meaning(order: WriteOrder) -> object:
    """All that its copies depend on."""
    return order.generation, order.engine, order.src, order.dst, first_row(order), order.stop, order.last
