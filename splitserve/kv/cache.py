"""Who holds which page and slot: one engine's state memory as its scheduler sees it. It touches no memory.

A page is in exactly one of four places; `check` proves it:

             grow                     publish, or release after it
    free ─────────────▶ held by one ─────────────────▶ cached (prefix tree; locked while a holding uses it)
      ▲                 holding  │                          │
      │ release                  │ quarantine               │ evicted by a grow, or flush
      ├──────────────────────────┤                          │
      │                          ▼                          │
      │ release             quarantined                     │
      └─────────────────────────┴───────────────────────────┘

The page table of a holding, `pages`, mixes pages of the tree (its cached prefix, and what it published) with pages of
its own. A page that another request published first stays the holding's own until release, because steps already
planned may name it; the tree keeps the other one.

Slots exist for models with RING or SLOT state. A holding gets one with its first `grow` and keeps it until release.
A cached prefix of such a model can be continued where a snapshot of its slot was kept (snapshots.py); who wants one
reserves a unit, lets a step write it, and gives it to `keep_snapshot` once the pages up to there are published.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from splitserve.errors import InvariantError
from splitserve.spec import Kind, Units

from .pages import Pages
from .snapshots import Snapshots
from .tree import Node, Tree


@dataclass(eq=False)
class Holding:
    """What one request owns; made by `Cache.open`, ended by `Cache.release`. Read the fields before `path` only."""

    pages: list[int]  # page of tokens [i * page_tokens, (i + 1) * page_tokens) at index i
    slot: int | None
    num_cached: int  # prompt tokens found in the prefix tree, whole pages
    num_matched: (
        int  # more than num_cached where pages go on beyond the last snapshot: others may fork there too
    )
    snapshot: int | None  # slot unit with the state at num_cached; its first step copies it into `slot`
    path: Node = field(repr=False)  # deepest node of its locked path
    own: set[int] = field(default_factory=set)  # pages that are not the tree's
    quarantined: bool = False
    released: bool = False


class Cache:
    """Pages, slots and prefix reuse of one engine. All ranks of a TP group use the same page numbers."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_tokens: int,
        num_slots: int = 0,
        num_snapshots: int = 0,
        prefix: bool = True,
    ) -> None:
        """Snapshots are slot units too, numbered from `num_slots` on."""
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.num_slots = num_slots
        self.prefix = prefix
        self.num_quarantined = 0  # pages
        self.num_evicted = 0  # pages, since the start
        self.num_asked_tokens = 0  # of prompts opened, since the start
        self.num_hit_tokens = 0  # of those, found cached
        self._pages = Pages(num_pages)
        self._slots = Pages(num_slots)
        self._snapshots = Snapshots(num_slots, num_snapshots)
        self._tree = Tree(page_tokens)

    def __repr__(self) -> str:
        return (
            f"Cache({self.num_pages} pages of {self.page_tokens}: {self.num_free} free, {self._tree.num_nodes} cached "
            f"({self.num_evictable} evictable), {self.num_quarantined} quarantined)"
        )

    @property
    def num_free(self) -> int:
        """Pages that nobody holds and the tree does not keep."""
        return self._pages.num_free

    @property
    def num_evictable(self) -> int:
        """Cached pages that no holding uses; `grow` may take these too."""
        return self._tree.num_evictable

    @property
    def num_cached(self) -> int:
        """Pages in the prefix tree, in use or not."""
        return self._tree.num_nodes

    @property
    def num_free_slots(self) -> int:
        return self._slots.num_free

    @property
    def num_snapshots(self) -> int:
        """Snapshots in the tree."""
        return self._snapshots.num_kept

    @property
    def finds_prefixes(self) -> bool:
        """Whether a prompt that was computed once can be continued by others."""
        return self.prefix and (self.num_slots == 0 or self._snapshots.count > 0)

    def free_pages(self) -> list[int]:
        """The page units that nobody holds and the tree does not keep: their rows mean nothing."""
        return list(self._pages.free_pages())

    def free_slots(self) -> list[int]:
        """Slot units that nobody holds, those for snapshots included."""
        return [*self._slots.free_pages(), *self._snapshots.spare()]

    def open(self, tokens: Sequence[int], *, computes: bool = True) -> Holding:
        """Begin a request: match and lock the longest cached prefix of its prompt. Takes no page and cannot fail.

        The match is whole pages and never the whole prompt: the last token must be computed, for its logits. With
        slots it ends at the deepest page that has a snapshot, unless the state of the slot comes from elsewhere
        (`computes` is false: a peer will write it).
        """
        node = matched = self._tree.root
        if self.prefix:
            most = (len(tokens) - 1) // self.page_tokens if tokens else 0
            node = matched = self._tree.match(tokens, max_pages=most)
        if self.num_slots and computes:
            node = self._tree.with_snapshot(matched)
            if node.snapshot is not None:
                self._snapshots.touch(node.snapshot)
        self._tree.lock(node)
        pages = [step.page for step in self._tree.path(node)][::-1]
        num_cached = len(pages) * self.page_tokens
        self.num_asked_tokens += len(tokens)
        self.num_hit_tokens += num_cached
        return Holding(
            pages=pages,
            slot=None,
            num_cached=num_cached,
            num_matched=matched.depth * self.page_tokens,
            snapshot=node.snapshot if self.num_slots and computes else None,
            path=node,
        )

    def grow(self, holding: Holding, upto: int) -> bool:
        """Give the holding pages for tokens [0, upto), and its slot. All or nothing: False leaves all as it was.

        Cached pages that nobody uses are evicted when free ones do not suffice, but not in vain.
        """
        self._alive(holding, "grow")
        num = max(0, -(-upto // self.page_tokens) - len(holding.pages))
        needs_slot = self.num_slots > 0 and holding.slot is None
        if num > self.num_free + self.num_evictable or (needs_slot and not self.num_free_slots):
            return False
        if num > self.num_free:
            self._evict(num - self.num_free)
        taken = self._pages.take(num, after=holding.pages[-1] if holding.pages else None)
        slots = self._slots.take(1) if needs_slot else None
        if taken is None or (needs_slot and slots is None):
            raise InvariantError(f"{num} pages and a slot were counted free but could not be taken: {self}")
        holding.pages += taken
        holding.own.update(taken)
        if slots:
            holding.slot = slots[0]
        return True

    def publish(self, holding: Holding, tokens: Sequence[int], upto: int) -> None:
        """Let others reuse the whole pages of `tokens[:upto]`, whose rows must be complete. Cheap to call again.

        Where another request has published the same tokens, the tree keeps that page and the holding keeps its own.
        """
        self._alive(holding, "publish")
        depth, whole = holding.path.depth, min(upto, len(tokens)) // self.page_tokens
        if not self.prefix or whole <= depth:
            return
        if whole > len(holding.pages):
            raise InvariantError(f"publish of {upto} tokens, but the holding has {len(holding.pages)} pages")
        added = self._tree.extend(holding.path, tokens, holding.pages[depth:whole])
        for node, page in zip(added, holding.pages[depth:whole], strict=True):
            if node.page == page:
                holding.own.remove(page)
        holding.path = added[-1]

    def reserve_snapshot(self) -> int | None:
        """A slot unit into which a step may copy a request's state; `keep_snapshot` or `drop_snapshot` ends this."""
        return self._snapshots.reserve() if self.prefix else None

    def keep_snapshot(self, holding: Holding, upto: int, unit: int) -> None:
        """The reserved unit holds the slot state of the holding's tokens [0, upto), whole pages and published."""
        self._alive(holding, "keep_snapshot")
        at = (node for node in self._tree.path(holding.path) if node.depth * self.page_tokens == upto)
        self._snapshots.keep(unit, next(at, None))

    def drop_snapshot(self, unit: int) -> None:
        """Nothing worth keeping was written to the reserved unit."""
        self._snapshots.drop(unit)

    def units(self, holding: Holding, start: int, stop: int) -> tuple[Units, ...]:
        """The units that hold tokens [start, stop): pages, then the slot if the holding has one."""
        first, end = start // self.page_tokens, -(-stop // self.page_tokens)
        if not 0 <= start <= stop or end > len(holding.pages):
            raise InvariantError(
                f"units of tokens [{start}, {stop}) asked, but the holding has {len(holding.pages)} pages "
                f"of {self.page_tokens} tokens"
            )
        pages = Units(Kind.PAGE, tuple(holding.pages[first:end]), first, start, stop)
        if holding.slot is None:
            return (pages,)
        return (pages, Units(Kind.SLOT, (holding.slot,), 0, start, stop))

    def release(self, holding: Holding) -> None:
        """End the holding: its own pages and its slot become free, what it published stays cached."""
        self._alive(holding, "release", even_quarantined=True)
        holding.released = True
        if holding.quarantined:
            self.num_quarantined -= len(holding.own)
        self._pages.give(holding.own)
        if holding.slot is not None:
            self._slots.give([holding.slot])
        self._tree.unlock(holding.path)

    def quarantine(self, holding: Holding) -> None:
        """A peer may still read or write the holding's rows: keep everything, counted apart, until `release`.

        Its cached pages stay locked too, since a late read of them must still find the right rows. Calling it again
        changes nothing.
        """
        self._alive(holding, "quarantine", even_quarantined=True)
        if not holding.quarantined:
            holding.quarantined = True
            self.num_quarantined += len(holding.own)

    def flush(self) -> int:
        """Forget every cached page that no holding uses; returns how many became free."""
        return self._evict(self.num_evictable)

    def check(self, holdings: Iterable[Holding]) -> None:
        """Raise InvariantError unless every page and slot is in exactly one place, given all living holdings."""
        holdings = list(holdings)
        self._pages.check()
        self._slots.check()
        self._tree.check()
        places = {page: ["free"] for page in self._pages.free_pages()}
        for node in self._tree.nodes():
            places.setdefault(node.page, []).append("cached")
        for i, holding in enumerate(holdings):
            for page in holding.own:
                places.setdefault(page, []).append(f"own of holding {i}")
        _once_each("page", self.num_pages, places)
        slots = {slot: ["free"] for slot in self._slots.free_pages()}
        for i, holding in enumerate(holdings):
            if holding.slot is not None:
                slots.setdefault(holding.slot, []).append(f"slot of holding {i}")
        _once_each("slot", self.num_slots, slots)
        self._snapshots.check({n.snapshot: n for n in self._tree.nodes() if n.snapshot is not None})
        self._check_holdings(holdings)

    def _check_holdings(self, holdings: Sequence[Holding]) -> None:
        locks: Counter[int] = Counter()
        for i, holding in enumerate(holdings):
            path = list(self._tree.path(holding.path))[::-1]
            locks.update(id(node) for node in path)
            if holding.released:
                raise InvariantError(f"holding {i} was released but is still in use: {holding}")
            if len(set(holding.pages)) != len(holding.pages) or len(path) > len(holding.pages):
                raise InvariantError(f"holding {i} names a page twice, or fewer than it published: {holding}")
            shared = {node.page for node, page in zip(path, holding.pages, strict=False) if node.page == page}
            if set(holding.pages) != holding.own | shared or holding.own & shared:
                raise InvariantError(
                    f"holding {i} uses pages that are neither its own nor on its path: {holding}"
                )
        for node in self._tree.nodes():
            if node.locks != locks[id(node)]:
                raise InvariantError(f"{node} is locked {node.locks} times for {locks[id(node)]} holdings")
        quarantined = sum(len(holding.own) for holding in holdings if holding.quarantined)
        if quarantined != self.num_quarantined:
            raise InvariantError(f"{self.num_quarantined} pages counted quarantined, {quarantined} are")

    def _evict(self, num: int) -> int:
        gone = self._tree.evict(num)
        for node in gone:
            self._snapshots.forget(node)
        self._pages.give(node.page for node in gone)
        self.num_evicted += len(gone)
        return len(gone)

    @staticmethod
    def _alive(holding: Holding, verb: str, *, even_quarantined: bool = False) -> None:
        if holding.released or (holding.quarantined and not even_quarantined):
            state = "released" if holding.released else "quarantined"
            raise InvariantError(f"{verb} of a holding that is {state}: {holding}")


def _once_each(what: str, total: int, places: dict[int, list[str]]) -> None:
    leaked = [unit for unit in range(total) if unit not in places]
    if leaked:
        raise InvariantError(f"{len(leaked)} of {total} {what}s leaked, nobody has them: {leaked[:8]}")
    for unit, owners in places.items():
        if len(owners) > 1 or not 0 <= unit < total:
            raise InvariantError(f"{what} {unit} of {total} is shared or does not exist: {', '.join(owners)}")
