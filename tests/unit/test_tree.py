"""The prefix tree against a model that is a dictionary of token sequences."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.errors import InvariantError
from splitserve.kv.tree import Node, Tree

PAGE = 2
prompts = st.lists(st.integers(0, 1), max_size=9).map(tuple)
steps = st.lists(
    st.tuples(st.sampled_from(["publish", "use", "end", "evict"]), prompts, st.integers(0, 30)), max_size=40
)


class Model:
    """What should be cached: prefix of whole pages -> [page, last use, locks]."""

    def __init__(self) -> None:
        self.pages: dict[tuple[int, ...], list[int]] = {}
        self.tick = 0

    def match(self, tokens: tuple[int, ...], most: int) -> list[int]:
        found: list[int] = []
        while len(found) < most and tokens[: PAGE * (len(found) + 1)] in self.pages:
            found.append(self.pages[tokens[: PAGE * (len(found) + 1)]][0])
        return found

    def lock(self, tokens: tuple[int, ...], num: int, by: int) -> None:
        for i in range(num):
            self.pages[tokens[: PAGE * (i + 1)]][2] += by

    def touch(self, tokens: tuple[int, ...], num: int) -> None:
        self.tick += 1
        for i in range(num):
            self.pages[tokens[: PAGE * (i + 1)]][1] = self.tick

    def evict(self, num: int) -> list[int]:
        gone: list[int] = []
        while len(gone) < num:
            leaves = [
                k
                for k, v in self.pages.items()
                if not v[2] and not any(o != k and o[: len(k)] == k for o in self.pages)
            ]
            if not leaves:
                break
            oldest = min(leaves, key=lambda k: (self.pages[k][1], -len(k)))
            gone.append(self.pages.pop(oldest)[0])
        return gone


@settings(max_examples=150, deadline=None)
@given(steps)
def test_against_a_dictionary(history: list[tuple[str, tuple[int, ...], int]]) -> None:
    tree, model = Tree(PAGE), Model()
    open_paths: list[tuple[Node, tuple[int, ...]]] = []
    next_page = 0
    for op, tokens, number in history:
        if op == "publish" and open_paths:
            node, held = open_paths.pop(number % len(open_paths))
            full = held[: PAGE * node.depth] + tokens
            pages = list(range(next_page, next_page + len(full) // PAGE - node.depth))
            next_page += len(pages)
            for i, page in enumerate(pages, start=node.depth):
                model.pages.setdefault(full[: PAGE * (i + 1)], [page, 0, 0])[2] += 1
            added = tree.extend(node, full, pages)
            assert [n.page for n in added] == model.match(full, len(full) // PAGE)[node.depth :]
            open_paths.append((added[-1] if added else node, full))
        elif op == "use":
            node = tree.match(tokens, max_pages=len(tokens) // PAGE)
            assert [n.page for n in tree.path(node)][::-1] == model.match(tokens, len(tokens) // PAGE)
            tree.lock(node)
            model.lock(tokens, node.depth, 1)
            open_paths.append((node, tokens))
        elif op == "end" and open_paths:
            node, held = open_paths.pop(number % len(open_paths))
            tree.unlock(node)
            model.lock(held, node.depth, -1)
            model.touch(held, node.depth)
        elif op == "evict":
            assert sorted(n.page for n in tree.evict(number % 4)) == sorted(model.evict(number % 4))
        tree.check()
        assert tree.num_nodes == len(model.pages)
        assert tree.num_evictable == sum(locks == 0 for _, _, locks in model.pages.values())
    for node, _ in open_paths:
        tree.unlock(node)
    assert len(tree.evict(10**6)) == len(model.pages)
    tree.check()


def _cached(tree: Tree, tokens: list[int], pages: list[int]) -> Node:
    path = tree.extend(tree.root, tokens, pages)
    tree.unlock(path[-1])
    return path[-1]


def test_the_least_recently_used_leaf_goes_first() -> None:
    tree = Tree(2)
    a = _cached(tree, [1, 1, 2, 2], [0, 1])
    _cached(tree, [1, 1, 3, 3], [9, 2])
    tree.lock(a)
    tree.unlock(a)
    assert [n.page for n in tree.evict(3)] == [2, 1, 0]


def test_locked_pages_and_what_is_above_them_stay() -> None:
    tree = Tree(2)
    a = _cached(tree, [1, 1, 2, 2], [0, 1])
    _cached(tree, [1, 1, 2, 2, 3, 3], [8, 9, 2])
    tree.lock(a)
    assert [n.page for n in tree.evict(10)] == [2]
    assert tree.num_evictable == 0


def test_equal_pages_after_different_beginnings_are_different() -> None:
    tree = Tree(2)
    _cached(tree, [1, 1, 7, 7], [0, 1])
    assert tree.match([7, 7], max_pages=1) is tree.root
    assert tree.match([2, 2, 7, 7], max_pages=2) is tree.root


def test_with_snapshots_a_match_ends_at_the_deepest_that_has_one() -> None:
    tree = Tree(1)
    _cached(tree, [1, 2, 3, 4], [0, 1, 2, 3])
    assert tree.with_snapshot(tree.match([1, 2, 3, 4], max_pages=4)) is tree.root
    tree.match([1, 2], max_pages=2).snapshot = 7
    tree.match([1], max_pages=1).snapshot = 8
    found = tree.with_snapshot(tree.match([1, 2, 3, 4], max_pages=4))
    assert (found.depth, found.snapshot) == (2, 7)
    assert tree.with_snapshot(tree.match([1, 9], max_pages=2)).depth == 1


def test_the_eviction_order_does_not_grow_with_use() -> None:
    tree = Tree(1)
    node = _cached(tree, [1], [0])
    for _ in range(1000):
        tree.lock(node)
        tree.unlock(node)
    assert len(tree._leaves) < 100
    tree.check()


def test_unlocking_too_often_is_an_error() -> None:
    tree = Tree(1)
    node = _cached(tree, [1], [0])
    with pytest.raises(InvariantError, match="more often"):
        tree.unlock(node)


def test_a_page_that_is_not_whole_cannot_be_cached() -> None:
    tree = Tree(2)
    with pytest.raises(InvariantError, match="not whole"):
        tree.extend(tree.root, [1, 2, 3], [0, 1])
