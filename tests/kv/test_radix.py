"""The prefix cache against a dictionary of prefixes, and its evictions."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import Mock

import pytest

from specserve.core import SamplingParams
from specserve.kv.allocator import PageAllocator
from specserve.kv.layout import first_page
from specserve.kv.radix import Prefix
from specserve.kv.radix import RadixCache as RadixCacheOfKeys
from specserve.scheduler.memory import Memory
from specserve.scheduler.points import Snapshots
from specserve.scheduler.request import Request
from specserve.speculation.control.acceptance import RequestEffect

Tokens = tuple[int, ...]


class RadixCacheOfTables(RadixCacheOfKeys):
    """By tokens."""

    def match(self, tokens: Sequence[int], salt: str = "") -> Prefix:  # type: ignore[override]
        return super().match(self.keys(tokens, salt))

    def insert(  # type: ignore[override]
        self, tokens: Sequence[int], pages: Sequence[Sequence[int]], salt: str = "", goes_on: bool = False
    ) -> list[list[int]]:
        return super().insert(self.keys(tokens, salt), pages, goes_on)

    def find(self, tokens: Sequence[int]) -> list[list[int]]:  # type: ignore[override]
        return super().find(self.keys(tokens))

    def keep(self, tokens: Sequence[int], **options: bool) -> int:  # type: ignore[override]
        return super().keep(self.keys(tokens), **options)


class RadixCache(RadixCacheOfTables):
    """With one table."""

    def match(self, tokens: Sequence[int], salt: str = "") -> list[int]:  # type: ignore[override]
        (pages,) = super().match(tokens, salt).pages
        return pages

    def insert(self, tokens: Sequence[int], pages: Sequence[int], salt: str = "") -> None:  # type: ignore[override]
        super().insert(tokens, [pages], salt)


def request_of(tokens: Sequence[int]) -> Request:
    return Request(
        "", tokens, SamplingParams(), 0, 0, 10**6, frozenset(), 0, RequestEffect(0), 0.0, context=tokens
    )


def random_tokens(rng: random.Random, page_size: int) -> Tokens:
    """Few distinct pages, which differ in one token, so that sequences share beginnings and part anywhere, and some end
    within a page."""
    tokens = [0] * page_size * rng.randint(0, 6)
    for start in range(0, len(tokens), page_size):
        tokens[start + rng.choice((0, page_size // 2, page_size - 1))] = rng.randint(0, 2)
    return (*tokens, *([9] * rng.randint(0, page_size - 1)))


@dataclass
class Model:
    """The expected cache: a page by its whole prefix."""

    page_size: int
    pages: dict[Tokens, int] = field(default_factory=dict)

    def prefixes(self, tokens: Tokens) -> list[Tokens]:
        return [
            tokens[: i + self.page_size] for i in range(0, len(tokens) - self.page_size + 1, self.page_size)
        ]

    def match(self, tokens: Tokens) -> list[int]:
        found = []
        for prefix in self.prefixes(tokens):
            if prefix not in self.pages:
                break
            found.append(self.pages[prefix])
        return found

    def insert(self, tokens: Tokens, pages: list[int]) -> list[int]:
        """The pages that are new to the cache."""
        new = []
        for prefix, page in zip(self.prefixes(tokens), pages, strict=False):
            if prefix not in self.pages:
                self.pages[prefix] = page
                new.append(page)
        return new

    def forget(self, pages: set[int]) -> None:
        for prefix in [prefix for prefix, page in self.pages.items() if page in pages]:
            del self.pages[prefix]


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("seed", range(4))
def test_random_use(page_size: int, seed: int) -> None:
    """Requests match, take references, compute the rest, remember it and go; meanwhile pages are evicted."""
    rng = random.Random(seed)
    allocator = PageAllocator(60)
    cache, model = RadixCache(allocator, page_size), Model(page_size)
    running: list[tuple[Tokens, list[int]]] = []
    evicted_total = 0
    for _ in range(800):
        action = rng.choice(["start", "end", "evict", "match"])
        if action == "start":
            tokens = random_tokens(rng, page_size)
            pages = cache.match(tokens)
            assert pages == model.match(tokens)
            allocator.share(pages)
            missing = len(model.prefixes(tokens)) - len(pages)
            if missing > allocator.free:
                allocator.release(pages)
                continue
            pages = pages + allocator.allocate(missing)
            model.insert(tokens, pages)
            cache.insert(tokens, pages)
            running.append((tokens, pages))
        elif action == "end" and running:
            allocator.release(running.pop(rng.randrange(len(running)))[1])
        elif action == "evict":
            evicted_total += check_eviction(rng, cache, model, allocator, running)
        else:
            tokens = random_tokens(rng, page_size)
            assert cache.match(tokens) == model.match(tokens)
        held = {page for _, pages in running for page in pages}
        assert cache.num_pages == len(model.pages)
        assert allocator.free == allocator.capacity - len(held | set(model.pages.values()))
        assert allocator.idle == sum(page not in held for page in model.pages.values())
        # private: what eviction looks through, which no result shows
        assert len(cache._oldest) <= len(list(cache.nodes())), "a node is queued twice"
    assert evicted_total > 50
    for _, pages in running:
        allocator.release(pages)
    cache.clear()
    assert cache.num_pages == 0
    assert allocator.free == allocator.capacity


def check_eviction(
    rng: random.Random,
    cache: RadixCache,
    model: Model,
    allocator: PageAllocator,
    running: list[tuple[Tokens, list[int]]],
) -> int:
    """Free as many as asked if there are that many, none of them in use, no page before one that stays, and the right
    ones."""
    held = {page for _, pages in running for page in pages}
    idle = {page for page in model.pages.values() if page not in held}
    before = set(model.pages.values())
    count = rng.randint(0, 8)
    expected = victims(cache, allocator, count)
    freed = cache.evict(count)
    assert freed == min(count, len(idle))
    gone = {page for page in before if allocator.references(page) == 0}
    assert len(gone) == freed
    assert gone <= idle
    assert gone == expected
    stays = {prefix for prefix, page in model.pages.items() if page not in gone}
    model.forget(gone)
    for prefix in stays:
        assert all(shorter in stays for shorter in model.prefixes(prefix))
    return freed


def victims(cache: RadixCache, allocator: PageAllocator, count: int) -> set[int]:
    """One by one the last page of the least recently used leaf whose last page nobody uses."""
    left = {node: list(node.pages[0]) for node in cache.nodes()}
    gone: set[int] = set()
    while len(gone) < count:
        inner = {node.parent for node, pages in left.items() if pages}
        leaves = [
            node
            for node, pages in left.items()
            if pages and node not in inner and allocator.references(pages[-1]) == 1
        ]
        if not leaves:
            break
        oldest = min(leaves, key=lambda node: node.used)
        assert sum(node.used == oldest.used for node in leaves) == 1, "leaves are never equally old"
        gone.add(left[oldest].pop())
    return gone


def filled(sequences: list[Tokens], page_size: int = 1) -> tuple[RadixCache, PageAllocator, list[list[int]]]:
    """A cache that holds the sequences, oldest first, and nobody else does."""
    allocator = PageAllocator(100)
    cache, taken = RadixCache(allocator, page_size), []
    for tokens in sequences:
        shared = cache.match(tokens)
        allocator.share(shared)
        pages = shared + allocator.allocate(len(tokens) // page_size - len(shared))
        cache.insert(tokens, pages)
        allocator.release(pages)
        taken.append(pages)
    return cache, allocator, taken


def test_the_least_recently_used_goes_first_and_from_its_end() -> None:
    cache, _, _ = filled([(1, 1, 1), (2, 2, 2), (3, 3, 3)])
    cache.match((1, 1, 1))  # now the newest
    assert cache.evict(2) == 2
    assert [len(cache.match(t)) for t in [(1, 1, 1), (2, 2, 2), (3, 3, 3)]] == [3, 1, 3]
    cache.match((2,))  # newer than 3, which was looked at before it
    cache.match((1, 1, 1))
    assert cache.evict(4) == 4
    assert [len(cache.match(t)) for t in [(1, 1, 1), (2, 2, 2), (3, 3, 3)]] == [3, 0, 0]


def test_a_parent_is_no_older_than_its_children() -> None:
    """A beginning that others share outlives the ends that only old requests had."""
    cache, _, _ = filled([(1, 2, 3), (7, 7), (1, 2, 4)])
    cache.match((1, 2, 4))
    assert cache.evict(3) == 3
    assert [len(cache.match(t)) for t in [(1, 2, 4), (1, 2, 3), (7, 7)]] == [3, 2, 0]


def test_pages_in_use_stay() -> None:
    cache, allocator, (pages, _) = filled([(1, 2, 3, 4), (5,)])
    allocator.share(pages[:2])
    assert cache.evict(100) == 3
    assert cache.match((1, 2, 3, 4)) == pages[:2]
    assert allocator.idle == 0
    allocator.release(pages[:2])
    cache.clear()
    assert allocator.free == allocator.capacity


@pytest.mark.parametrize("page_size", [1, 4])
def test_edges_split_where_sequences_part(page_size: int) -> None:
    def repeat(*pages: int) -> Tokens:
        return tuple(token for page in pages for token in [page] * page_size)

    sequences = [repeat(1, 2, 3, 4), repeat(1, 2, 5), repeat(1, 6), repeat(1, 2), repeat(1, 2, 3, 4, 8)]
    cache, allocator, taken = filled(sequences, page_size)
    assert [cache.match(tokens) for tokens in sequences] == taken
    assert taken[1][:2] == taken[2][:1] + taken[0][1:2] == taken[3]
    assert cache.num_pages == 4 + 1 + 1 + 0 + 1
    assert cache.match(repeat(1, 2, 3, 9)) == taken[0][:3]
    assert cache.match(repeat(6)) == []
    if page_size > 1:
        assert cache.match(repeat(1, 2)[:-1]) == taken[0][:1], "only whole pages match"
    assert allocator.free == allocator.capacity - cache.num_pages


def test_what_is_cached_keeps_its_pages() -> None:
    """A second computation of the same tokens adds only what is new."""
    cache, allocator, (first,) = filled([(1, 2, 3)])
    own = allocator.allocate(5)
    cache.insert((1, 2, 3, 4, 5), own)
    allocator.release(own)
    assert cache.match((1, 2, 3, 4, 5)) == first + own[3:]
    assert cache.num_pages == 5
    assert allocator.free == allocator.capacity - 5
    cache.insert((1, 2, 3, 4, 5, 6), own)  # fewer pages than tokens: the last is not whole yet
    assert cache.num_pages == 5


@contextmanager
def count_calls() -> Iterator[list[str]]:
    """What is called or resumed meanwhile, of Python or of C."""
    found: list[str] = []
    sys.setprofile(lambda frame, event, argument: found.append(event) if "call" in event else None)
    try:
        yield found
    finally:
        sys.setprofile(None)


def test_eviction_looks_at_what_it_evicts_alone() -> None:
    """One page at a time, as steps do it, and not at all that is cached: other leaves, the old ones that are in use,
    the rest of a long edge. A use since costs its leaf another turn, but one."""
    allocator = PageAllocator(8000)
    cache = RadixCache(allocator, 1)

    def add(tokens: Tokens) -> list[int]:
        pages = allocator.allocate(len(tokens))
        cache.insert(tokens, pages)
        return pages

    for i in range(500):  # run on: the oldest, never to be evicted
        add((0, i))
    allocator.release(add(tuple(range(1, 3001))))
    short = [(5000 + i, 1) for i in range(1000)]
    for tokens in short:
        allocator.release(add(tokens))
    assert cache.evict(1) == 1  # it met all that run
    with count_calls() as calls:
        assert sum(cache.evict(1) for _ in range(500)) == 500
    assert len(calls) < 40 * 500
    for tokens in short:
        cache.match(tokens)
    assert cache.evict(2499) == 2499, "the long one is the oldest"
    with count_calls() as calls:
        assert sum(cache.evict(1) for _ in range(2000)) == 2000
    assert len(calls) < 40 * 2000


def test_a_leaf_that_was_in_use_is_evicted_by_its_age() -> None:
    """Eviction that met a leaf in use hears of its end."""
    cache, allocator, (old, _, _) = filled([(1, 1), (2, 2), (3, 3)])
    allocator.share(old)
    assert cache.evict(2) == 2
    assert [len(cache.match(t)) for t in [(2, 2), (3, 3)]] == [0, 2]
    allocator.release(old)
    assert cache.evict(2) == 2
    assert [len(cache.match(t)) for t in [(1, 1), (3, 3)]] == [0, 2]


def test_prefixes_of_another_salt_are_not_found() -> None:
    allocator = PageAllocator(8)
    cache = RadixCache(allocator, 2)
    first, second = allocator.allocate(2), allocator.allocate(2)
    cache.insert([1, 2, 3, 4], first)
    cache.insert([1, 2, 3, 4], second, "salt")
    assert cache.match([1, 2, 3, 4]) == first
    assert cache.match([1, 2, 3, 4, 5], "salt") == second
    assert cache.match([1, 2, 3, 4], "pepper") == []
    allocator.release([*first, *second])
    assert cache.clear() == 4
    assert allocator.problems() == []


@pytest.mark.parametrize("page_size", [1, 4])
def test_snapshots(page_size: int) -> None:
    """Against a dictionary by prefix, of as many as there is room for: a prefix is used up to its longest snapshot,
    which stays while others are used less recently and all its pages are cached."""
    rng, allocator, room = random.Random(page_size), PageAllocator(60), 6
    cache, model = RadixCacheOfTables(allocator, page_size, snapshots=room), Model(page_size)
    states, passing, hits, lost = dict[Tokens, int](), set[Tokens](), 0, 0  # by last use
    for _ in range(3000):
        tokens = random_tokens(rng, page_size)
        prefixes = model.prefixes(tokens)
        found, (known,) = cache.match(tokens), cache.find(tokens)
        best = max((prefix for prefix in prefixes if prefix in states), key=len, default=())
        assert found.pages == [known[: len(best) // page_size]]
        assert (found.tokens, found.known) == (len(best), len(known) * page_size)
        assert found.state == states.get(best, 0)
        if found.state:
            hits += 1
            states[best] = states.pop(best)
            passing.discard(best)
        missing = len(prefixes) - len(known)
        cache.evict(missing - allocator.free if rng.random() < 0.8 else rng.randint(0, 20))
        model.forget({page for page in model.pages.values() if not allocator.references(page)})
        gone = [prefix for prefix in states if prefix not in model.pages]
        lost += len([states.pop(prefix) for prefix in gone])
        passing &= states.keys()
        ends = sorted({rng.randint(0, len(prefixes)) for _ in range(2)})
        pages = [model.pages.get(prefix, 0) for prefix in prefixes]
        own = allocator.allocate(min(pages.count(0), allocator.free))
        for end in [end for end in ends if end and len(pages[:end]) - pages[:end].count(0) + len(own) >= end]:
            taken = iter(own)
            given = [page or next(taken) for page in pages[:end]]
            cache.insert(tokens, [given], goes_on=end < ends[-1])
            model.insert(tokens[: end * page_size], given)
            end = rng.choice([end, rng.randint(1, end)])  # what others have inserted may go on
            passed, last = rng.random() < 0.5, prefixes[end - 1]
            if number := cache.keep(tokens[: end * page_size], passing=passed):
                if number in states.values():
                    among = filter(passing.__contains__, states) if 4 * len(passing) > room else states
                    gone = next(iter(among))
                    assert (len(states), number) == (room, states.pop(gone))
                    passing.discard(gone)
                states[last] = number
            else:
                states[last], passed = states.pop(last), False
            (passing.add if passed else passing.discard)(last)
        allocator.release(own)
        assert cache.kept == len(states)
    assert min(hits, lost) > 200
    cache.clear()
    assert (cache.kept, allocator.free, allocator.problems()) == (0, 59, [])


def test_answers_that_go_on_from_a_prefix_are_counted() -> None:
    """So that a snapshot costs the same however many do."""
    rng, allocator, counted = random.Random(0), PageAllocator(40), 0
    cache = RadixCacheOfTables(allocator, 1, snapshots=6)
    for _ in range(1000):
        tokens = random_tokens(rng, 1)
        (known,) = cache.find(tokens)
        cache.evict(rng.choice([0, len(tokens) - len(known) - allocator.free, 20]))
        (known,) = cache.find(tokens)
        own = allocator.allocate(min(len(tokens) - len(known), allocator.free))
        if end := len(known) + len(own):
            cache.insert(tokens[:end], [known + own])
            cache.keep(tokens[:end], answer=rng.random() < 0.5)
        allocator.release(own)
        for node in cache.nodes():
            assert node.answers == sum(child.answer for child in node.children.values())
            counted += node.answers
    assert counted > 300


def test_windows_stay_where_prefixes_end() -> None:
    """Not at the ends of chunks. Those of earlier turns go before anything else that was used later; when the last turn
    has gone, the one before it can be used."""
    allocator = PageAllocator(100)
    cache = RadixCacheOfTables(allocator, 1, (None, 4))

    def run(tokens: Tokens, hit: int, *chunks: int) -> None:
        shared = cache.match(tokens).pages
        assert len(shared[0]) == hit
        new = [allocator.allocate(len(tokens) - hit) for _ in shared]
        pages = [before + own for before, own in zip(shared, new, strict=True)]
        for end in (*chunks, len(tokens)):
            cache.insert(tokens, [own[:end] for own in pages], goes_on=end < len(tokens))
        for own in new:
            allocator.release(own)

    def hits(*texts: Tokens) -> list[int]:
        return [len(cache.match((*tokens, 0)).pages[0]) for tokens in texts]

    first, second = tuple(range(1, 31)), tuple(range(101, 131))
    run(first[:12], 0, 3, 6, 9)
    assert cache.evict(1) == 8
    run(second[:12], 0, 5)
    run(first[:18], 12)
    run(second[:18], 12)
    run(first[:24], 18)
    run(second[:24], 18)
    assert allocator.free == 99 - 2 * 24 - (24 - 8) - 24
    between = 8 + 4 * 2  # windows of the second's first turn, and of all later ones
    assert cache.evict(between) == between
    assert [cache.evict(1) for _ in range(2)] == [4, 4]
    assert cache.evict(6 + 3) == 6 + 3
    assert hits(first[:24], first[:12], second[:24], second[:12]) == [18, 0, 24, 0]
    cache.clear()
    assert (allocator.free, allocator.problems()) == (99, [])


def test_the_longest_prefix_is_looked_for_from_its_end() -> None:
    allocator, tokens = PageAllocator(9000), range(4000)
    cache = RadixCacheOfTables(allocator, 1, (None, 4))
    cache.insert(tokens, [allocator.allocate(4000) for _ in range(2)])
    with count_calls() as calls:
        assert cache.match(tokens).tokens == 4000
    assert len(calls) < 100


@pytest.mark.parametrize("windows", [(None, 6, 6), (9, 5), (None, None, 20)], ids=str)
@pytest.mark.parametrize("page_size", [1, 4])
def test_tables_with_windows(
    page_size: int, windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests use what is cached as far as every table goes on, compute the rest in chunks, let go of what windows
    leave behind, and end. A page holds what its prefix says, whoever has it, and every page that nobody uses can be
    evicted."""
    rng, contents = (
        random.Random(page_size),
        dict[int, tuple[Tokens, int]](),
    )  # of a page: its prefix and its table
    memory = Memory(70, page_size, prefix_cache=True, windows=windows)
    cache, allocator = memory.cache, memory.allocator
    assert cache is not None
    running: list[Request] = []
    hits, frees = 0, 0

    def deepest(tokens: Tokens) -> int:
        """Worked out depth by depth, from the pages of the tree."""
        found = cache.find(cache.keys(tokens))
        for depth in range(len(found[0]), 0, -1):
            firsts = [first_page(window, depth * page_size, page_size) for window in windows]
            if all(all(pages[first:depth]) for first, pages in zip(firsts, found, strict=True)):
                return depth
        return 0

    def check(request: Request) -> None:
        for table, (window, hold) in enumerate(zip(windows, request.holds, strict=True)):
            assert hold.start <= first_page(window, request.computed, page_size)
            for index, page in enumerate(
                hold.pages[: request.computed // page_size - hold.start], hold.start
            ):
                prefix = tuple(request.tokens[: (index + 1) * page_size])
                assert contents.setdefault(page, (prefix, table)) == (prefix, table)

    def taking(count: int, allocate: Callable[[int], list[int]] = allocator.allocate) -> list[int]:
        pages = allocate(count)
        for page in pages:
            contents.pop(page, None)
        return pages

    monkeypatch.setattr(allocator, "allocate", taking)
    for _ in range(3000):
        action = rng.choice(["start", "compute", "compute", "write", "end", "evict"])
        request = rng.choice(running) if running else None
        if action == "start":
            drawn = [token for _ in range(0, 40, page_size) for token in [rng.randrange(2)] * page_size]
            tokens = drawn[: rng.randint(1, 40)]
            request = request_of(tokens)
            expected = deepest(tuple(tokens[:-1]))
            request.prefilled = memory.take(request, memory.find(request))
            assert request.prefilled == expected * page_size
            if memory.grow(request, len(tokens) + 1, request.prefilled + 7) is None:
                memory.release(request)
                continue
            hits += bool(request.prefilled)
            running.append(request)
        elif request is not None and action == "compute" and request.prefilling:
            end, _ = memory.extend(request, min(request.prefilled + 7, len(request.context)))
            if end > request.prefilled:
                request.prefilled = end
                memory.remember(request)
                check(request)
                memory.slide(request)
        elif request is not None and action == "write" and not request.prefilling:
            if memory.prepare([(request, len(request.tokens) + 1)]):
                assert memory.grow(request, len(request.tokens) + 1) is not None
                request.output.append(rng.randrange(2))
        elif request is not None and action == "end":
            if rng.random() < 0.7:
                memory.remember(request)
            check(request)
            memory.release(request)
            running.remove(request)
        elif action == "evict":
            idle, count = allocator.idle, rng.randint(1, 10)
            freed = cache.evict(count)
            assert min(count, idle) <= freed <= idle
            frees += freed
        if request in running:
            check(request)
        assert not allocator.problems()
        cached = list(cache.pages())
        assert len(set(cached)) == len(cached) == cache.num_pages
    for request in running:
        memory.release(request)
    assert min(hits, frees) > 80
    idle = allocator.idle
    assert cache.evict(10**6) == idle
    assert allocator.free == allocator.capacity


def test_what_a_chunk_of_a_long_prompt_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """References of its own pages, wherever it is. Keys are made once, however often the prompt is looked up."""
    shared, size, prompt = list[int](), 4, range(256)
    memory = Memory(100, size, True, snapshots=Snapshots(20, (), 8))
    assert memory.cache is not None
    share, keys = memory.allocator.share, Mock(wraps=memory.cache.keys)

    def sharing(pages: Sequence[int]) -> None:
        shared.append(len(pages))
        share(pages)

    monkeypatch.setattr(memory.allocator, "share", sharing)
    monkeypatch.setattr(memory.cache, "keys", keys)
    request = request_of(prompt)
    assert [memory.find(request).known for _ in range(3)] == [0, 0, 0]
    assert memory.grow(request, len(prompt)) is not None
    request.points = dict.fromkeys(range(16, 257, 16), True)
    for request.prefilled in range(16, 257, 16):
        memory.remember(request)
        assert memory.keep(request)
    assert keys.call_count == 1
    assert max(shared) == 16 // size
