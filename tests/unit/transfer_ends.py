"""Two ends of a real transport in one process: memory that one reads from or writes to the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from splitserve.config import TransferConfig
from splitserve.spec import Growth, Kind, Slab, StateSpec, lay_out
from splitserve.transfer import transport as transports
from splitserve.transfer.layout import Copies
from splitserve.transfer.local import SLICE_BYTES
from splitserve.transfer.port import make_card
from splitserve.transfer.transport import TransportEvent

ROW = 1 << 12


class End:
    """One rank's transport and memory."""

    def __init__(self, name: str, nbytes: int, config: TransferConfig) -> None:
        self.name = f"{name}.0"
        self.transport = transports.make("local", agent_name=self.name, config=config)
        self.memory = self.transport.allocate(nbytes)
        slab = Slab(Kind.PAGE, self.memory.data_ptr(), ROW, nbytes // ROW)
        self.card = make_card(
            self.transport,
            agent=self.transport.register([slab]),
            engine=name,
            layout=lay_out([StateSpec("probe", 0, Growth.PAGED, ROW)], page_tokens=1),
            slabs=[slab],
            rank=0,
            size=1,
        )
        self.seen: list[TransportEvent] = []

    def poll(self) -> None:
        self.seen += self.transport.poll()


@contextmanager
def two_ends(config: TransferConfig) -> Iterator[tuple[End, End]]:
    """A source and a target, each with a slice of the local transport and four rows more."""
    made = End("source", SLICE_BYTES + 4 * ROW, config), End("target", SLICE_BYTES + 4 * ROW, config)
    yield made
    for end in made:
        end.transport.close()


def copies(source: End, target: End, at: int, to: int, nbytes: int) -> Copies:
    def table(address: int) -> np.ndarray:
        return np.array([[address, nbytes, 0]], np.uint64)

    return Copies(table(source.memory.data_ptr() + at), table(target.memory.data_ptr() + to))
