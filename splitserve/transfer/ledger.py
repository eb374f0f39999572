"""What has been noted of one handoff, and whether it is all. Pure; kept by the receiving side.

A *link* is (source rank, destination rank). Each write on a link is chunk 0, 1, 2 ... and its note says how many bytes
it carried and whether it was the last. Notes come in any order, across links and within one. A handoff is complete
when every link that owes bytes has all its chunks and the bytes are exactly what the StateSpecs say.

                    chunk 0   chunk 1   chunk 2
    link (0, 0)     noted     noted     noted, last      3 of 3, bytes add up
    link (1, 0)     noted               noted, last      chunk 1 missing: not complete
"""

from __future__ import annotations

from collections.abc import Mapping

from splitserve.errors import ProtocolError
from splitserve.wire import FirstToken, Note

Pair = tuple[int, int]

_MASK = (1 << 64) - 1


class Ledger:
    """Notes of one generation of one room."""

    def __init__(self) -> None:
        self.expected: dict[Pair, int] | None = (
            None  # bytes each link owes; None until prefill's cards are known
        )
        self.num_duplicates = 0
        self._notes: dict[Pair, dict[int, Note]] = {}
        self._digests: dict[Pair, int] = {}

    def expect(self, links: Mapping[Pair, int]) -> None:
        """Say what is owed. A link that owes 0 bytes may be listed: it must then be noted all the same."""
        self.expected = dict(links)

    def add(self, dst_rank: int, note: Note) -> bool:
        """Count one note; False for a duplicate. Raises ProtocolError when it contradicts an earlier one."""
        link = (note.src_rank, dst_rank)
        chunks = self._notes.setdefault(link, {})
        if note.chunk in chunks:
            if chunks[note.chunk] != note:
                raise ProtocolError(
                    f"room {note.room}: link {link} noted chunk {note.chunk} twice, differently"
                )
            self.num_duplicates += 1
            return False
        lasts = [c for c, n in chunks.items() if n.last] + [note.chunk] * note.last
        if len(lasts) > 1 or (lasts and max([*chunks, note.chunk]) > lasts[0]):
            raise ProtocolError(
                f"room {note.room}: link {link} noted chunks {sorted(chunks)} and {note.chunk}, last {lasts}"
            )
        chunks[note.chunk] = note
        return True

    def all_noted(self) -> bool:
        """Whether every write that will ever be made on every link has been noted."""
        if self.expected is None or self.stray():
            return False
        return all(self._whole(link) for link in self.expected)

    def wrong(self) -> str | None:
        """What cannot be put right by waiting: a link that owes nothing was noted, or a whole link's bytes are off."""
        if self.expected is None:
            return None
        for link in self.stray():
            return f"source rank {link[0]} wrote to rank {link[1]}, which it owes nothing"
        for link, owed in self.expected.items():
            came = self.bytes_on(link)
            if self._whole(link) and came != owed:
                return (
                    f"source rank {link[0]} wrote {came} bytes to rank {link[1]}, the state specs say {owed}"
                )
        if self.all_noted() and self.first is None:
            return "the last note carried no first token"
        return None

    def gaps(self) -> dict[Pair, list[int]]:
        """Chunks that are missing though a later one, or another link's last, is here; empty before any `last`."""
        lasts = [c for chunks in self._notes.values() for c, n in chunks.items() if n.last]
        if not lasts or self.expected is None:
            return {}
        top = max(lasts)
        holes = {k: [c for c in range(top + 1) if c not in self._notes.get(k, {})] for k in self.expected}
        return {link: chunks for link, chunks in holes.items() if chunks}

    def stray(self) -> list[Pair]:
        """Links that were noted and owe nothing."""
        return [] if self.expected is None else [k for k in self._notes if k not in self.expected]

    def digested(self) -> list[Pair]:
        """Links whose notes all carry digests; only these can be compared."""
        return [k for k, chunks in self._notes.items() if chunks and all(n.digested for n in chunks.values())]

    def compared(self, link: Pair, digest: int) -> bool:
        """Note this side's digest of a link; False when it is not the sum of what the notes say."""
        self._digests[link] = digest
        return digest == self.digest(link)

    def all_compared(self) -> bool:
        return all(link in self._digests for link in self.digested())

    def digest(self, link: Pair) -> int:
        """What the source says of a link: digests are sums, so those of its chunks add up (modulo 2^64)."""
        return sum(n.digest for n in self._notes.get(link, {}).values()) & _MASK

    def own_digest(self, link: Pair) -> int | None:
        return self._digests.get(link)

    def bytes_on(self, link: Pair) -> int:
        return sum(n.bytes for n in self._notes.get(link, {}).values())

    @property
    def num_bytes(self) -> int:
        return sum(self.bytes_on(link) for link in self._notes)

    @property
    def num_notes(self) -> int:
        return sum(len(chunks) for chunks in self._notes.values())

    @property
    def first(self) -> FirstToken | None:
        """The first token, from whichever note carried it."""
        return next((n.first for chunks in self._notes.values() for n in chunks.values() if n.first), None)

    def _whole(self, link: Pair) -> bool:
        chunks = self._notes.get(link, {})
        return any(n.last and len(chunks) == c + 1 for c, n in chunks.items())
