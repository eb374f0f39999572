"""Which prompt beginnings are cached: a prefix tree with one node for each whole page of tokens. It allocates nothing.

    root ── (tokens 0..63) page 7 ── (tokens 64..127) page 8 ── (tokens 128..191) page 3
                                 └── (tokens 64..127) page 21

- A node is named by all tokens up to its own page, so equal pages after different beginnings are different nodes.
- A holding locks every node of the path it uses. What nobody locks can be evicted, leaves first, in the order of last
  use, which ends when a path is unlocked. Time is a counter that ticks then; on equal ticks deeper pages go first.
- `node.snapshot` is the slot unit that keeps RING and SLOT state of the point after that page, for models that have
  any: rows alone cannot continue a request of theirs. The tree only carries it (see snapshots.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from splitserve.errors import InvariantError


@dataclass(eq=False, slots=True)
class Node:
    """One cached page. `eq=False`: a node is itself, whatever it holds."""

    page: int
    key: tuple[int, ...]  # this page's tokens
    parent: Node | None
    depth: int  # pages from the beginning, this one included; the root is 0
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    locks: int = 0  # holdings whose path passes here
    used: int = 0  # tick of the last unlock
    snapshot: int | None = None

    def __repr__(self) -> str:
        return (
            f"Node(page {self.page}, depth {self.depth}, {self.locks} locks, {len(self.children)} children)"
        )


class Tree:
    """Nodes, their locks and the order in which they may go. Not thread-safe; one engine loop owns it."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.root = Node(page=-1, key=(), parent=None, depth=0)
        self.num_nodes = 0
        self.num_locked = 0
        self._tick = 0
        self._leaves: list[tuple[int, int, int, Node]] = []  # heap; may hold entries that are no longer true
        self._pushed = 0

    def __repr__(self) -> str:
        return f"Tree({self.num_nodes} pages, {self.num_locked} locked)"

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could give: every node without a lock, since a locked node locks its whole path."""
        return self.num_nodes - self.num_locked

    def match(self, tokens: Sequence[int], *, max_pages: int) -> Node:
        """The deepest node, at most `max_pages` deep, whose tokens begin `tokens`; the root when there is none."""
        node = self.root
        for i in range(max_pages):
            child = node.children.get(self.page_key(tokens, i))
            if child is None:
                break
            node = child
        return node

    def with_snapshot(self, node: Node) -> Node:
        """`node`, or the nearest one above it that has a snapshot; the root when there is none."""
        return next((step for step in self.path(node) if step.snapshot is not None), self.root)

    def page_key(self, tokens: Sequence[int], i: int) -> tuple[int, ...]:
        """Tokens of page `i`; shorter than a page, and so no node's key, where `tokens` ends inside it."""
        return tuple(tokens[i * self.page_tokens : (i + 1) * self.page_tokens])

    def lock(self, node: Node) -> None:
        """Lock the path that ends in `node` for one more holder, who calls `unlock` once."""
        for step in self.path(node):
            self.num_locked += step.locks == 0
            step.locks += 1

    def extend(self, node: Node, tokens: Sequence[int], pages: Sequence[int]) -> list[Node]:
        """Lengthen the holder's path from `node` by one node for each of `pages`, and lock the new part too.

        `pages[i]` holds the rows of the request's page `node.depth + i`. Where a node for those tokens is there
        already (another request was first), the path runs through it, and its page is not `pages[i]`: the caller
        compares, and keeps the page. Returns the new part of the path.
        """
        added = []
        for page in pages:
            key = self.page_key(tokens, node.depth)
            if len(key) != self.page_tokens:
                raise InvariantError(f"page {node.depth} of {len(tokens)} tokens is not whole")
            child = node.children.get(key)
            if child is None:
                child = Node(page=page, key=key, parent=node, depth=node.depth + 1)
                node.children[key] = child
                self.num_nodes += 1
            self.num_locked += child.locks == 0
            child.locks += 1
            added.append(child)
            node = child
        return added

    def unlock(self, node: Node) -> None:
        """Undo one holder's locks of the whole path that ends in `node`; it counts as used now."""
        self._tick += 1
        for step in self.path(node):
            if step.locks < 1:
                raise InvariantError(f"{step} is unlocked more often than it was locked")
            step.used = self._tick
            step.locks -= 1
            self.num_locked -= step.locks == 0
        self._offer(node)

    def evict(self, num: int) -> list[Node]:
        """Remove up to `num` pages that nobody locks, least recently used leaf first, and return their nodes."""
        gone: list[Node] = []
        while len(gone) < num and self._leaves:
            used, _, _, node = heappop(self._leaves)
            if node.used != used or not self._is_leaf(node):
                continue
            assert node.parent is not None  # the root is never offered
            del node.parent.children[node.key]
            self.num_nodes -= 1
            gone.append(node)
            self._offer(node.parent)
            node.parent = None
        return gone

    def path(self, node: Node) -> Iterator[Node]:
        """`node` and all nodes above it, without the root."""
        step: Node | None = node
        while step is not None and step is not self.root:
            yield step
            step = step.parent

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Raise InvariantError unless links, counters, locks and the eviction order hold together."""
        nodes = list(self.nodes())
        entries = {(used, id(node)) for used, _, _, node in self._leaves}
        for node in nodes:
            parent = node.parent
            if parent is None or parent.children.get(node.key) is not node or node.depth != parent.depth + 1:
                raise InvariantError(f"{node} is not linked to its parent")
            if parent is not self.root and node.locks > parent.locks:
                raise InvariantError(f"{node} has more locks than {parent} above it")
            if parent is not self.root and not parent.locks and node.used > parent.used:
                raise InvariantError(f"{node} would go after {parent} above it")
            if self._is_leaf(node) and (node.used, id(node)) not in entries:
                raise InvariantError(f"{node} could go but is not in the eviction order")
        locked = sum(node.locks > 0 for node in nodes)
        if (len(nodes), locked) != (self.num_nodes, self.num_locked):
            raise InvariantError(
                f"counted {self.num_nodes} nodes and {self.num_locked} locked, there are {len(nodes)} and {locked}"
            )
        if self.root.locks or self.root.page != -1:
            raise InvariantError(f"the root holds a page or locks: {self.root}")

    def _is_leaf(self, node: Node) -> bool:
        return node.parent is not None and not node.children and not node.locks

    def _offer(self, node: Node) -> None:
        """Enter `node` in the eviction order if it can go now. Entries that stop being true are skipped later."""
        if not self._is_leaf(node):
            return
        self._pushed += 1
        heappush(self._leaves, (node.used, -node.depth, self._pushed, node))
        if len(self._leaves) > 64 + 2 * self.num_nodes:
            self._leaves = [e for e in self._leaves if e[0] == e[3].used and self._is_leaf(e[3])]
            heapify(self._leaves)
