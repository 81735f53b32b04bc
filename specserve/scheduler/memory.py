"""The pages of running requests: allocate, share through the prefix cache, free.

A request holds all pages of a table that keeps all tokens, and of a window's those that its next tokens see. Pages
before them are free as soon as no launch that is yet to be made reads them: launches run in order on one stream, so one
in flight reads a page before a later one writes it for its next owner. A copy on another stream would need an event.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, count
from operator import ne

from specserve.kv.allocator import PageAllocator
from specserve.kv.layout import first_page
from specserve.kv.radix import Key, Prefix, RadixCache
from specserve.kv.states import STOPS
from specserve.scheduler.points import LAUNCH_COST, Snapshots
from specserve.scheduler.request import Hold, Request
from specserve.speculation.state import PageRun


class Memory:
    """The allocator and the prefix cache as one supply of pages. ``windows``: of each table, the tokens that it keeps;
    None: all. ``cache`` None: prefixes are not shared. ``snapshots``: those of states, None if no layer keeps one."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        prefix_cache: bool,
        windows: Sequence[int | None] = (None,),
        snapshots: Snapshots | None = None,
    ) -> None:
        self.page_size = page_size
        self.windows = windows
        self.allocator = PageAllocator(num_pages)
        self._snapshots = snapshots
        room = 0 if snapshots is None else snapshots.room
        self.cache = RadixCache(self.allocator, page_size, windows, room) if prefix_cache else None
        self._sliding = sum(window is not None for window in windows)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def find(self, request: Request) -> Prefix:
        """Return a request's longest cached prefix. At least the last token is left to compute."""
        if self.cache is None:
            return Prefix(0, 0, [[] for _ in self.windows], 0)
        return self.cache.match(self._keys(self.cache, request, (request.reusable - 1) // self.page_size))

    def _keys(self, cache: RadixCache, request: Request, pages: int) -> list[Key]:
        """Return the keys of a request's first pages, which are made once."""
        if len(request.keys) < pages:
            request.keys += cache.keys(request.tokens, request.salt, len(request.keys))
        return request.keys[:pages]

    def take(self, request: Request, found: Prefix) -> int:
        """Give the request a prefix's pages, in place of its own. Return how many tokens are cached, or were before; if
        there are more now, ``request.state`` is the snapshot after them, which is to be copied before anything else
        runs."""
        request.state, request.known = 0, found.known
        if found.tokens <= request.prefilled:
            return request.prefilled
        request.state = found.state
        for window, hold, pages in zip(self.windows, self._holds(request), found.pages, strict=True):
            start = first_page(window, found.tokens, self.page_size)
            self.allocator.share(pages[start:])
            own = found.tokens // self.page_size - hold.start
            assert own >= 0, "an earlier prefix, whose pages it holds, is still cached"
            self.allocator.release(hold.pages[:own])
            hold.start, hold.pages = start, pages[start:] + hold.pages[own:]
        return found.tokens

    def _holds(self, request: Request) -> list[Hold]:
        """Return the request's holds, one for each table."""
        request.holds = request.holds or [Hold() for _ in self.windows]
        return request.holds

    def shared(self, request: Request, other: Request) -> int:
        """Return how many tokens the cache could give the request once ``other`` has computed its prompt; 0 if they do
        not include the page that the request needs next. The other will leave a snapshot there if that saves much."""
        page = slice(request.prefilled, request.prefilled + self.page_size)
        if self.cache is None or (request.salt, request.context[page]) != (other.salt, other.context[page]):
            return 0
        most = min(len(request.context) - 1, len(other.context))
        same = next(compress(count(), map(ne, request.context, other.context)), most)
        same = min(same, most) // self.page_size * self.page_size
        if self._snapshots is None:
            return same
        ends = (point // self.page_size * self.page_size for point in other.points)
        point = max((end for end in ends if end <= same), default=0)
        if same - max(point, other.prefilled) < LAUNCH_COST:
            return point
        other.points = dict(sorted({**other.points, same: False}.items()))
        return same

    def points(self, request: Request, forked: bool) -> dict[int, bool]:
        """Return where the request's prompt is cut for snapshots. ``forked``: others have the same."""
        if self.cache is None or self._snapshots is None:
            return {}
        known = request.prefilled, request.known
        return self._snapshots.points(request.context, *known, self.page_size, forked)

    def keep(self, request: Request, ends: bool = False) -> int:
        """Return the number of a new snapshot of the request's state, if it is at a point of its prompt without one, or
        ``ends``; 0 otherwise. Its pages have just been remembered."""
        if self.cache is None or self._snapshots is None:
            return 0
        end, asked = request.remembered * self.page_size, len(request.prompt)
        exact = len(request.stop_ids) <= STOPS and self._snapshots.serves(request.computed, end)
        if not end or not (exact if ends else request.prefilled in request.points):
            return 0
        keys, passing = request.keys[: request.remembered], not ends and request.points[request.prefilled]
        # Within the page in which its prompt ends, an answer is none.
        answer, again = ends and end >= asked, ends and request.known + self.page_size >= asked
        return self.cache.keep(keys, request.cached_tokens or 0, answer, passing, again)

    @property
    def available(self) -> int:
        """Pages that are free, or cached and not in use."""
        return self.allocator.free + self.allocator.idle

    @property
    def changes(self) -> int:
        """A count of events after which a request that did not fit may fit: pages were freed, or cached."""
        return self.allocator.changes

    def prepare(self, needs: Sequence[tuple[Request, int]]) -> bool:
        """Free pages for many requests in one eviction; each is given with the number of tokens that ``grow`` will make
        it hold. Return False if there are too few."""
        for request, _ in needs if self._sliding else ():
            self.slide(request)
        short = [(request, tokens) for request, tokens in needs if self._lacks(request, tokens)]
        missing = sum(sum(self._missing(request, tokens, tokens)) for request, tokens in short)
        if missing > self.available:
            return False
        self._make_free(missing)
        return True

    def _lacks(self, request: Request, tokens: int) -> bool:
        """Return quickly whether some table lacks pages: those of all tokens end together, and so do windows."""
        holds = request.holds
        return not holds or tokens > min(holds[0].end, holds[-1].end) * self.page_size

    def _missing(self, request: Request, tokens: int, ahead: int) -> list[int]:
        """Return the pages that each table lacks to hold ``tokens``, or ``ahead`` in windows."""
        ends = [self.pages_for(tokens if window is None else ahead) for window in self.windows]
        return [max(0, end - hold.end) for end, hold in zip(ends, self._holds(request), strict=True)]

    def _make_free(self, pages: int) -> None:
        if self.cache is not None and pages > self.allocator.free:
            self.cache.evict(pages - self.allocator.free)

    def held(self, cached: int) -> int:
        """Return how far a prompt's windows reach when, after ``cached`` tokens, it holds what its steps will."""
        window, size = self.windows[-1], self.page_size
        return first_page(window, cached, size) * size + (window or 0) + size - 1

    def lacking(self, requests: Sequence[Request]) -> int:
        """Return how many tokens of prompts lie after their windows' pages."""
        prompts = [request for request in requests if request.prefilling] if self._sliding else []
        return sum(max(0, len(each.context) - each.holds[-1].end * self.page_size) for each in prompts)

    def grow(
        self, request: Request, tokens: int, ahead: int | None = None, spare: int = 0
    ) -> list[PageRun] | None:
        """Extend the request's pages to hold ``tokens``, of windows only up to ``ahead`` if that is less, evicting
        cached ones. Return the new pages, or None, with nothing changed, if too few are left for ``spare`` tokens of
        windows."""
        if not self._lacks(request, tokens):
            return []
        missing = self._missing(request, tokens, tokens if ahead is None else min(tokens, ahead))
        if sum(missing) + self._sliding * self.pages_for(spare) > self.available:
            return None
        self._make_free(sum(missing))
        runs = list[PageRun]()
        for table, (hold, pages) in enumerate(zip(request.holds, missing, strict=True)):
            if pages:
                runs.append((request.slot, table, hold.end, self.allocator.allocate(pages)))
                hold.pages += runs[-1][-1]
        return runs

    def extend(self, request: Request, tokens: int) -> tuple[int, list[PageRun]]:
        """Extend a prompt's windows toward ``tokens``, as far as there are pages. Return how many tokens they hold, at
        most ``tokens``, and the new pages."""
        if not self._sliding:
            return tokens, []
        end = request.holds[-1].end + self.available // self._sliding  # the last table is a window's
        held = min(tokens, end * self.page_size)
        runs = self.grow(request, held)
        assert runs is not None, "tables that keep all tokens hold the prompt since it was admitted"
        return held, runs

    def slide(self, request: Request) -> None:
        """Free the pages that no token from the request's last known one on sees."""
        if not self._sliding:
            return
        known = request.computed
        for window, hold in zip(self.windows, request.holds, strict=True):
            gone = first_page(window, known, self.page_size) - hold.start
            if gone > 0:
                self.allocator.release(hold.pages[:gone])
                hold.start, hold.pages = hold.start + gone, hold.pages[gone:]

    def remember(self, request: Request) -> list[PageRun]:
        """Offer the request's computed whole pages to the prefix cache. If the cache already has some of them, the
        request takes those and frees its own. Return all its pages if some have changed.

        A request that uses a cached page of a table that keeps all tokens thus also uses all cached pages before it,
        and of windows only pages with such a one.
        """
        whole, before = request.computed // self.page_size, request.remembered
        if self.cache is None or whole == before:
            return []
        request.remembered, changed, keys = whole, False, self._keys(self.cache, request, whole)
        own = [[0] * hold.start + hold.pages[: whole - hold.start] for hold in request.holds]
        found = self.cache.insert(keys, own, goes_on=request.prefilling)
        for hold, mine, cached in zip(request.holds, own, found, strict=True):
            new = max(hold.start, before)  # it has the cache's pages before
            self.allocator.share(cached[new:])
            self.allocator.release(mine[new:])
            hold.pages[new - hold.start : whole - hold.start] = cached[new:]
            changed |= cached[new:] != mine[new:]
        return request.pages if changed else []

    def release(self, request: Request) -> None:
        """Take all pages from the request; the cache keeps those it was offered."""
        for hold in request.holds:
            self.allocator.release(hold.pages)
        request.holds, request.remembered, request.prefilled = [], 0, 0

    def problems(self) -> list[str]:
        """List the inconsistencies of an idle engine, where every page must be free, or cached and not in use."""
        found, capacity = self.allocator.problems(), self.allocator.capacity
        cached = list(self.cache.pages()) if self.cache is not None else []
        leaked = capacity - self.allocator.free - len(cached)
        if leaked:
            found.append(f"{leaked} of {capacity} pages leaked")
        if self.cache is not None and not len(set(cached)) == len(cached) == self.cache.num_pages:
            found.append(
                f"the prefix cache counts {self.cache.num_pages} pages but lists {len(cached)}, "
                f"{len(cached) - len(set(cached))} of them twice"
            )
        states = [] if self.cache is None else [node.state for node in self.cache.nodes() if node.state]
        if self.cache is not None and not len({*states}) == len(states) == self.cache.kept:
            found.append(f"the prefix cache counts {self.cache.kept} snapshots but has {len(states)}")
        used = [page for page in cached if self.allocator.references(page) != 1]
        if used:
            found.append(f"{len(used)} cached pages are still in use, page {used[0]} among them")
        return found
