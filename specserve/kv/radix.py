"""The prefix cache: a radix tree over pages.

An edge holds a run of pages and their tokens; edges split where two sequences diverge. The tree holds one reference on
each of its pages, requests hold their own, and a page is evicted only when the tree is its last owner.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from specserve.kv.allocator import PageAllocator

Key = tuple[int | str, ...]
"""The tokens of a page; of the first, after its salt if it has one."""


@dataclass(slots=True, eq=False)
class _Node:
    keys: list[Key]  # the tokens of each page on the edge into this node
    pages: list[int]
    parent: _Node | None
    used: int = 0
    children: dict[Key, _Node] = field(default_factory=dict)  # by the first page's tokens
    queued: bool = False  # for eviction


class RadixCache:
    """Maps token prefixes, in whole pages, to pages that hold their KV."""

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self._allocator = allocator
        self._page_size = page_size
        self._root = _Node([], [], None)
        self._clock = 0
        # A heap of last use, last page, leaf. A queued last use may be outdated, and the leaf may have children by now:
        # eviction corrects that when it pops the leaf, so that lookups and inserts need not keep the order.
        self._oldest: list[tuple[int, int, _Node]] = []
        self.num_pages = 0

    def match(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """Return the pages of the longest cached prefix of ``tokens`` that was inserted with the same ``salt``. The
        caller takes references before anything else runs."""
        pages: list[int] = []
        for node, matched in self._walk(self._keys(tokens, salt)):
            pages += node.pages[:matched]
        return pages

    def insert(self, tokens: Sequence[int], pages: Sequence[int], salt: str = "") -> None:
        """Add a sequence with its whole ``pages``; parts that are already cached keep the tree's pages."""
        keys = self._keys(tokens, salt)[: len(pages)]
        node, done = self._root, 0
        for step, matched in list(self._walk(keys)):
            node, done = step, done + matched
            if matched < len(step.pages):
                node = self._split(step, matched)
        if done < len(keys):
            leaf = _Node(keys[done:], list(pages[done : len(keys)]), node, self._tick())
            node.children[leaf.keys[0]] = leaf
            self._queue(leaf)
            self._allocator.adopt(leaf.pages)
            self.num_pages += len(leaf.pages)

    def evict(self, count: int) -> int:
        """Free at least ``count`` pages that only the tree owns, if there are that many, least recently used first; a
        leaf that a request uses counts as used now. Return how many were freed."""
        freed, now = 0, self._tick()
        while self._oldest and freed < count and self._oldest[0][0] < now:
            used, page, leaf = heapq.heappop(self._oldest)
            if leaf.children:
                leaf.queued = False  # until it is a leaf again
            elif used < leaf.used:
                self._queue(leaf)
            elif not self._only_ours(page):
                leaf.used = self._tick()
                self._queue(leaf)
            else:
                freed += self._drop_tail(leaf, count - freed)
        return freed

    def clear(self) -> int:
        """Evict every page that no request uses. Return how many."""
        return self.evict(self.num_pages)

    def pages(self) -> Iterator[int]:
        """Yield every page of the tree."""
        return (page for node in self.nodes() for page in node.pages)

    def _keys(self, tokens: Sequence[int], salt: str) -> list[Key]:
        size = self._page_size
        keys: list[Key] = [tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]
        return [(salt, *keys[0]), *keys[1:]] if salt and keys else keys

    def _walk(self, keys: list[Key]) -> Iterator[tuple[_Node, int]]:
        """Yield each node on the way down that shares pages with ``keys``, and how many."""
        node, done, now = self._root, 0, self._tick()
        while done < len(keys) and (child := node.children.get(keys[done])) is not None:
            matched = 1
            while (
                matched < len(child.keys)
                and done + matched < len(keys)
                and child.keys[matched] == keys[done + matched]
            ):
                matched += 1
            child.used = now
            yield child, matched
            if matched < len(child.keys):
                return
            node, done = child, done + matched

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut the edge into ``node`` after ``at`` pages; return the new upper node."""
        assert node.parent is not None
        upper = _Node(node.keys[:at], node.pages[:at], node.parent, node.used)
        node.parent.children[upper.keys[0]] = upper
        node.keys, node.pages, node.parent = node.keys[at:], node.pages[at:], upper
        upper.children[node.keys[0]] = node
        return upper

    def _queue(self, leaf: _Node) -> None:
        leaf.queued = True
        heapq.heappush(self._oldest, (leaf.used, leaf.pages[-1], leaf))

    def _drop_tail(self, leaf: _Node, most: int) -> int:
        """Free up to ``most`` unused pages at a leaf's end, and unlink the leaf when it is empty. Return how many."""
        first, parent = leaf.keys[0], leaf.parent
        # A request that uses a page also uses all pages before it.
        count = sum(1 for _ in takewhile(self._only_ours, islice(reversed(leaf.pages), most)))
        self._allocator.disown(leaf.pages[-count:])
        del leaf.pages[-count:], leaf.keys[-count:]
        self.num_pages -= count
        if leaf.pages:
            self._queue(leaf)
        elif parent is not None:
            del parent.children[first]
            if parent.pages and not parent.children and not parent.queued:
                self._queue(parent)
        return count

    def _only_ours(self, page: int) -> bool:
        return self._allocator.references(page) == 1

    def nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
