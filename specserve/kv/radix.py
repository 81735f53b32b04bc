"""The prefix cache: a radix tree over pages.

An edge holds a run of tokens, whole pages of them, and the pages of each table; edges split where two sequences
diverge, or where one ended and another went on. The tree holds one reference on each of its pages, requests hold their
own, and a page is evicted only when the tree is its last owner. A window's table may lack pages, before the window of
whoever computed them, or evicted: a prefix can be used where each table has the pages that tokens after it see.

Of layers that keep a state, a prefix can be used only where a snapshot of it exists, which is at ends of edges.
Snapshots have memory of their own, where the least useful one makes room; no request holds any.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, count, pairwise
from operator import ne

from specserve.kv.allocator import PageAllocator
from specserve.kv.layout import first_page

Key = tuple[int | str, ...]
"""The tokens of a page; of the first, after its salt if it has one."""


@dataclass(slots=True, eq=False)
class _Node:
    keys: list[Key]  # the tokens of each page on the edge into this node
    pages: list[list[int]]  # of each table, one for each key; 0: absent
    parent: _Node | None
    used: int = 0
    children: dict[Key, _Node] = field(default_factory=dict)  # by the first page's tokens
    queued: bool = False  # for eviction
    goes_on: bool = False  # a leaf to which its request will add
    ended: int = 0  # with windows: when a prefix that others share last ended with this edge; 0: no longer
    state: int = 0  # the snapshot of the state after this edge; 0: none
    answer: bool = False  # of an answer, to its end
    answers: int = 0  # children that are


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix that can be used, and how many ``tokens`` it has: its pages by table, 0 before a window, and the
    snapshot of the state after them, 0 without states. ``known``: tokens that are cached, whether they can be used or
    not."""

    tokens: int
    known: int
    pages: list[list[int]]
    state: int


class RadixCache:
    """Maps token prefixes, in whole pages, to pages that hold their KV. ``windows``: of each table, the tokens that it
    keeps; None: all. ``snapshots``: of states, the most that are kept, with numbers from 1 on; 0: no layer has one."""

    def __init__(
        self,
        allocator: PageAllocator,
        page_size: int,
        windows: Sequence[int | None] = (None,),
        snapshots: int = 0,
    ) -> None:
        self._allocator = allocator
        self._page_size = page_size
        self._windows = windows
        self._sliding = any(window is not None for window in windows)
        self._root = _Node([], [[] for _ in windows], None)
        self._clock = 0
        # A heap of leaves by last use and inner nodes by ``ended``, equals by when they were queued. Both may be
        # outdated: eviction corrects them when it pops a node, so that lookups and inserts need not keep the order.
        self._oldest: list[tuple[int, int, _Node]] = []
        # Pages that a window lies in, and one.
        self._reach = max(window or 0 for window in windows) // page_size + 3
        self._unthinned = OrderedDict[_Node, None]()  # may have pages of windows that are not needed
        self.num_pages = 0
        self.snapshots = snapshots
        self._free_snapshots = list(range(snapshots, 0, -1))
        # Where snapshots are, by last use: those that others replace, all others, and which of these are passing.
        self._spent, self._kept, self._passing = (OrderedDict[int, _Node]() for _ in range(3))

    def match(self, keys: list[Key]) -> Prefix:
        """Return a sequence's longest prefix that was inserted and can be used. The caller takes references, and the
        snapshot, before anything else runs."""
        path, size = list(self._walk(keys)), self._page_size
        found, states, end = self._pages_on(path), dict[int, _Node](), 0
        for node, matched in path:
            end += matched
            if node.state and matched == len(node.keys):
                states[end] = node
        ends = reversed(states) if self.snapshots else range(end, 0, -1)
        best = next((length for length in ends if self._has_windows(found, length)), 0)
        for window, pages in zip(self._windows, found, strict=True):
            first = first_page(window, best * size, size)
            pages[:] = [0] * first + pages[first:best]
        if best in states:
            self._put_state(states[best], self._kept)
        prefix = Prefix(best * size, end * size, found, states[best].state if best in states else 0)
        for node, _ in path if self._sliding else ():
            best -= len(node.keys)
            if not best:
                self._end_at(node)
        return prefix

    def _has_windows(self, found: list[list[int]], length: int) -> bool:
        """Return whether no page is missing of the windows that tokens after the first ``length`` pages see."""
        size = self._page_size
        return not any(
            window is not None and 0 in pages[first_page(window, length * size, size) : length]
            for window, pages in zip(self._windows, found, strict=True)
        )

    def keys(self, tokens: Sequence[int], salt: str = "", begin: int = 0) -> list[Key]:
        """Return the keys of a sequence's whole pages, from index ``begin`` on."""
        size = self._page_size
        starts = range(begin * size, len(tokens) - size + 1, size)
        keys: list[Key] = [tuple(tokens[i : i + size]) for i in starts]
        return [(salt, *keys[0]), *keys[1:]] if salt and keys and not begin else keys

    def find(self, keys: list[Key]) -> list[list[int]]:
        """Return the pages, by table, of a sequence's longest prefix that was inserted; 0 where there is none."""
        return self._pages_on(self._walk(keys))

    def _pages_on(self, path: Iterable[tuple[_Node, int]]) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self._windows]
        for node, matched in path:
            for pages, own in zip(found, node.pages, strict=True):
                pages += own[:matched]
        return found

    def insert(
        self, keys: list[Key], pages: Sequence[Sequence[int]], goes_on: bool = False
    ) -> list[list[int]]:
        """Add a sequence with its whole ``pages`` by table, 0 where there is none; parts that are already cached keep
        the tree's pages. Return what ``find`` does. ``goes_on``: more of it is to come, and others are not expected to
        go on from its end."""
        keys = keys[: len(pages[0])]
        node, done = self._root, 0
        for step, matched in list(self._walk(keys)):
            if matched < len(step.keys):
                step = self._split(step, matched)
            self._fill(step, [own[done : done + matched] for own in pages])
            node, done = step, done + matched
        if done == len(keys):
            return self.find(keys)
        parent = node
        if not parent.goes_on or parent.state:
            parent.goes_on = False
            node = parent.children[keys[done]] = _Node([], [[] for _ in pages], parent)
        begin = len(node.keys)
        node.keys += keys[done:]
        for own in node.pages:
            own += [0] * (len(keys) - done)
        node.goes_on, node.used = goes_on, self._tick()
        self._fill(node, [own[done : len(keys)] for own in pages], begin)
        self._queue(node)
        if node is not parent:
            self._end_at(parent)  # where sequences can go on when the leaf has been evicted
        return self.find(keys)

    def keep(
        self,
        keys: list[Key],
        replaces: int = 0,
        answer: bool = False,
        passing: bool = False,
        again: bool = False,
    ) -> int:
        """Return the number of a new snapshot after pages that are cached; 0 if there is one. That of the first
        ``replaces`` tokens and those since then make room before all others, but where several sequences go on or, if
        its prompt came ``again``, no answer has ended. Then go those in ``passing``, which serve only texts that leave
        this one there, while they are more than a quarter, and then the one used least recently. If the prompt left the
        chat's last ``answer``, as one without its thoughts does, the next will leave this one: only free room takes its
        snapshot, and the last one before it stays."""
        *path, (node, matched) = self._walk(keys)
        if matched < len(node.keys):
            node = self._split(node, matched)
        if answer and not node.answer:
            assert node.parent is not None
            node.answer, node.parent.answers = True, node.parent.answers + 1
        if node.state:
            self._put_state(node, self._kept)
            return 0
        end, fewer, leaves = 0, list[_Node](), False
        for above, below in pairwise([*(each for each, _ in path), node]):
            end += len(above.keys) * self._page_size
            left = 0 if below.answer else above.answers
            leaves = left > 0 or (leaves and not above.answer)
            alone = left == len(above.children) - 1 and (above.answer or not again)
            if end >= replaces > 0 and above.state and alone:
                fewer.append(above)
            if leaves and below.answer:
                del fewer[-1:]
        for above in fewer:
            self._put_state(above, self._spent)
        free, spent = self._free_snapshots, leaves and answer
        if spent and not free:
            return 0
        node.state = free.pop() if free else self._drop_state(self._least_useful())
        self._put_state(node, self._spent if spent else self._kept)
        if passing:
            self._passing[node.state] = node
        return node.state

    def _put_state(self, node: _Node, order: OrderedDict[int, _Node]) -> None:
        """Count a node's snapshot as used now, and as one of an ``order``."""
        self._forget_state(node)
        order[node.state] = node

    def _forget_state(self, node: _Node) -> None:
        for order in (self._spent, self._passing, self._kept):
            order.pop(node.state, None)

    def _least_useful(self) -> _Node:
        many = 4 * len(self._passing) > self.snapshots
        return next(iter((self._spent or (self._passing if many else self._kept)).values()))

    def _drop_state(self, node: _Node) -> int:
        """Forget a node's snapshot. Return its number."""
        self._forget_state(node)
        state, node.state = node.state, 0
        return state

    @property
    def kept(self) -> int:
        """Snapshots that exist."""
        return len(self._spent) + len(self._kept)

    def _fill(self, node: _Node, pages: Sequence[Sequence[int]], begin: int = 0) -> None:
        """Adopt those pages, from index ``begin`` on, that the node lacks."""
        if not self._sliding and node.pages[0][begin]:
            return
        new = [
            (table, index, page)
            for table, own in enumerate(pages)
            for index, page in enumerate(own, begin)
            if page and not node.pages[table][index]
        ]
        for table, index, page in new:
            node.pages[table][index] = page
        self._allocator.adopt(page for _, _, page in new)
        self.num_pages += len(new)
        if new:
            self._unsee(node)

    def _end_at(self, node: _Node) -> None:
        """Note that a prefix ends with an edge: sequences go on from here, and see its last windows."""
        if self._sliding and node.keys:
            node.ended = self._tick()
            self._queue(node)

    def _unsee(self, node: _Node) -> None:
        """Note that pages of windows on an edge, and on those that windows reach from it, may be needed no more."""
        reach = self._reach if self._sliding else 0
        while node.parent is not None and reach > 0:
            self._unthinned[node] = None
            node, reach = node.parent, reach - len(node.keys)

    def evict(self, count: int) -> int:
        """Free at least ``count`` pages that only the tree owns, if there are that many. First go pages of windows that
        no prefix needs which ends with an edge; then the least recently used: ends of leaves, and windows where a
        prefix ended that others share; last all other windows. A leaf that a request uses counts as used now. Return
        how many were freed."""
        freed, now = self._evict_unseen(count), self._tick()
        while self._oldest and freed < count and self._oldest[0][0] < now:
            used, _, node = heapq.heappop(self._oldest)
            node.queued = False
            if used < (node.ended if node.children else node.used):
                self._queue(node)
            elif node.children:
                node.ended = 0
                self._unsee(node)
                freed += self._evict_unseen(count - freed)
            elif not self._unused(node, -1):
                node.used = self._tick()
                self._queue(node)
            else:
                freed += self._drop_tail(node, count - freed)
        if self._sliding and freed < count:
            for node in sorted(self.nodes(), key=lambda each: each.used):
                freed += self._thin(node, [len(node.keys)] * len(node.pages)) if freed < count else 0
        return freed

    def _evict_unseen(self, count: int) -> int:
        """Free pages of windows that no sequence sees which goes on from where a prefix ended, edge by edge until
        ``count`` are free. Return how many were freed."""
        freed = 0
        for _ in range(len(self._unthinned)):
            if freed >= count:
                break
            node, _ = self._unthinned.popitem(last=False)
            begin, above = 0, node.parent
            while above is not None:
                begin, above = begin + len(above.keys), above.parent
            end = begin + len(node.keys) + self._ahead(node)
            # A prompt that ends here goes on from a page before: its last token is computed.
            last = (end - 1) * self._page_size
            ahead = [first_page(window, last, self._page_size) for window in self._windows]
            behind = [min(max(0, first - begin), len(node.keys)) for first in ahead]
            freed += self._thin(node, behind)
            if any(any(pages[:end]) for pages, end in zip(node.pages, behind, strict=True)):
                self._unthinned[node] = None  # some are in use
        return freed

    def _ahead(self, node: _Node) -> int:
        """Return how many pages after an edge's end the next prefix ends, at most as many as windows reach."""
        nearest, below = self._reach, [(0, node)]
        while below:
            ahead, node = below.pop()
            if node.ended or not node.children:
                nearest = min(nearest, ahead)
            elif ahead < nearest:
                below += [(ahead + len(child.keys), child) for child in node.children.values()]
        return nearest

    def _thin(self, node: _Node, ends: Sequence[int]) -> int:
        """Free the unused pages of a node's windows, by table before an end. Return how many."""
        gone = list[int]()
        for window, pages, end in zip(self._windows, node.pages, ends, strict=True):
            for index in range(end if window is not None else 0):
                if pages[index] and self._only_ours(pages[index]):
                    gone.append(pages[index])
                    pages[index] = 0
        self._allocator.disown(gone)
        self.num_pages -= len(gone)
        return len(gone)

    def clear(self) -> int:
        """Evict every page that no request uses. Return how many."""
        return self.evict(self.num_pages)

    def pages(self) -> Iterator[int]:
        """Yield every page of the tree."""
        return (page for node in self.nodes() for pages in node.pages for page in pages if page)

    def _walk(self, keys: list[Key]) -> Iterator[tuple[_Node, int]]:
        """Yield each node on the way down that shares pages with ``keys``, and how many."""
        node, done, now = self._root, 0, self._tick()
        while done < len(keys) and (child := node.children.get(keys[done])) is not None:
            matched = min(len(child.keys), len(keys) - done)
            ahead = keys[done : done + matched]
            if child.keys[:matched] != ahead:
                matched = next(compress(count(), map(ne, child.keys, ahead)))
            child.used = now
            yield child, matched
            if matched < len(child.keys):
                return
            node, done = child, done + matched

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut the edge into ``node`` after ``at`` pages; return the new upper node."""
        assert node.parent is not None
        upper = _Node(node.keys[:at], [pages[:at] for pages in node.pages], node.parent, node.used)
        node.parent.children[upper.keys[0]] = upper
        upper.answer, upper.answers = node.answer, int(node.answer)
        node.keys, node.pages, node.parent = node.keys[at:], [pages[at:] for pages in node.pages], upper
        upper.children[node.keys[0]] = node
        self._end_at(upper)
        self._unsee(upper)
        return upper

    def _queue(self, node: _Node) -> None:
        """Queue a node for eviction, if it is not queued already."""
        if not node.queued:
            node.queued = True
            used = node.ended if node.children else node.used
            heapq.heappush(self._oldest, (used, self._tick(), node))

    def _drop_tail(self, leaf: _Node, most: int) -> int:
        """Free about ``most`` unused pages at a leaf's end, and unlink the leaf when it is empty. Return how many."""
        first, parent, freed = leaf.keys[0], leaf.parent, 0
        # A request that uses a page also uses all pages before it, of tables that keep all tokens.
        while leaf.keys and freed < most and self._unused(leaf, -1):
            leaf.keys.pop()
            gone = [page for pages in leaf.pages if (page := pages.pop())]
            self._allocator.disown(gone)
            freed += len(gone)
        self.num_pages -= freed
        if freed and leaf.state:
            self._free_snapshots.append(self._drop_state(leaf))
        if leaf.keys:
            self._queue(leaf)
        elif parent is not None:
            del parent.children[first]
            parent.answers -= leaf.answer
            self._unthinned.pop(leaf, None)
            self._unsee(parent)
            if parent.keys and not parent.children:
                self._queue(parent)
        return freed

    def _unused(self, node: _Node, index: int) -> bool:
        return all(not pages[index] or self._only_ours(pages[index]) for pages in node.pages)

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
