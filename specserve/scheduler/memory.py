"""The pages of running requests: allocate, share through the prefix cache, free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress, count
from operator import ne

from specserve.kv.allocator import PageAllocator
from specserve.kv.radix import RadixCache
from specserve.scheduler.request import Request


class Memory:
    """The allocator and the prefix cache as one supply of pages. ``cache`` None: prefixes are not shared."""

    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.cache = RadixCache(self.allocator, page_size) if prefix_cache else None

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def take_prefix(self, request: Request, tokens: Sequence[int]) -> int:
        """Give the request the cached pages of its tokens, in place of its own. At least the last token is left to
        compute. Return how many tokens are cached."""
        if self.cache is None:
            return 0
        cached = self.cache.match(tokens[: len(tokens) - 1], request.salt)
        self.allocator.share(cached)
        self.allocator.release(request.pages[: len(cached)])
        request.pages[: len(cached)] = cached
        return len(cached) * self.page_size

    def shared(self, request: Request, other: Request) -> int:
        """Return how many tokens the cache could give the request once ``other`` has computed its prompt; 0 if they do
        not include the page that the request needs next."""
        page = slice(request.prefilled, request.prefilled + self.page_size)
        if self.cache is None or (request.salt, request.context[page]) != (other.salt, other.context[page]):
            return 0
        most = min(len(request.context) - 1, len(other.context))
        same = next(compress(count(), map(ne, request.context, other.context)), most)
        return min(same, most) // self.page_size * self.page_size

    @property
    def available(self) -> int:
        """Pages that are free, or cached and not in use."""
        return self.allocator.free + self.allocator.idle

    @property
    def changes(self) -> int:
        """A count of events after which a request that did not fit may fit: pages were freed, or cached."""
        return self.allocator.changes

    def prepare(self, needs: Iterable[tuple[Request, int]]) -> bool:
        """Free pages for many requests in one eviction; each is given with the number of tokens that ``grow`` will make
        it hold. Return False, with nothing changed, if there are too few."""
        missing = sum(max(0, self.pages_for(tokens) - len(request.pages)) for request, tokens in needs)
        if missing > self.available:
            return False
        self._make_free(missing)
        return True

    def _make_free(self, pages: int) -> None:
        if self.cache is not None and pages > self.allocator.free:
            self.cache.evict(pages - self.allocator.free)

    def grow(self, request: Request, tokens: int) -> list[int] | None:
        """Extend the request's pages to hold ``tokens``, evicting cached ones. Return the new pages, or None, with
        nothing changed, if there are too few."""
        missing = self.pages_for(tokens) - len(request.pages)
        if missing <= 0:
            return []
        if missing > self.available:
            return None
        self._make_free(missing)
        pages = self.allocator.allocate(missing)
        request.pages += pages
        return pages

    def remember(self, request: Request) -> bool:
        """Offer the request's computed whole pages to the prefix cache. If the cache already has some of them, the
        request takes those and frees its own. Return whether its pages changed.

        A request that uses a cached page thus also uses all cached pages before it, and eviction, which starts at the
        tree's leaves, can reach every page that is not in use.
        """
        whole = request.computed // self.page_size
        if self.cache is None or whole == request.remembered:
            return False
        request.remembered = whole
        tokens, own = request.tokens[: whole * self.page_size], request.pages[:whole]
        self.cache.insert(tokens, own, request.salt)
        cached = self.cache.match(tokens, request.salt)
        self.allocator.share(cached)
        self.allocator.release(own)
        request.pages[:whole] = cached
        return cached != own

    def release(self, request: Request) -> None:
        """Take all pages from the request; the cache keeps those it was offered."""
        self.allocator.release(request.pages)
        request.pages, request.remembered = [], 0

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
        used = [page for page in cached if self.allocator.references(page) != 1]
        if used:
            found.append(f"{len(used)} cached pages are still in use, page {used[0]} among them")
        return found
