"""Page ownership by reference counts: a request and the prefix tree each hold one reference to a page that they use."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np


class PageAllocator:
    """Hands out pages 1 .. num_pages - 1; page 0 belongs to no request and takes padding's writes."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"the KV pool needs at least 2 pages, found {num_pages}")
        self.num_pages = num_pages
        self._references = array("q", bytes(8 * num_pages))
        self._free = array("q", range(num_pages - 1, 0, -1))
        self._cached: set[int] = set()
        self.idle = 0  # pages whose only owner is the prefix tree
        self.changes = 0  # times that a page became available, or both cached and in use

    @property
    def capacity(self) -> int:
        return self.num_pages - 1

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free pages, each with one reference. The caller has checked that there are enough."""
        assert count <= len(self._free), "allocation without a check"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add an owner to each page."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free and cannot be shared"
            if self._references[page] == 1 and page in self._cached:
                self.idle -= 1
                self.changes += 1
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove an owner from each page; a page without owners is free."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is released twice"
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)
                self.changes += 1
            elif self._references[page] == 1 and page in self._cached:
                self.idle += 1
                self.changes += 1

    def adopt(self, pages: Iterable[int]) -> None:
        """Make the prefix tree an owner of pages that a request holds."""
        for page in pages:
            self.share([page])
            self._cached.add(page)
            self.changes += 1

    def disown(self, pages: Iterable[int]) -> None:
        """End the prefix tree's ownership."""
        for page in pages:
            self._cached.remove(page)
            if self._references[page] == 1:
                self.idle -= 1
                self._free.append(page)
            self._references[page] -= 1

    def references(self, page: int) -> int:
        return self._references[page]

    def problems(self) -> list[str]:
        """Return the inconsistencies: free pages with owners, pages that are free twice, too few references, wrong
        counts. There may be millions of pages."""
        free, references, found = np.array(self._free), np.array(self._references), []
        times = np.bincount(free, minlength=self.num_pages)
        if twice := len(free) - np.count_nonzero(times):
            found.append(f"{twice} pages are free twice")
        if len(owned := np.flatnonzero(times * references)):
            found.append(f"{len(owned)} free pages have owners, page {owned[0]} among them")
        ownerless = np.count_nonzero(references[1:] <= 0)
        if ownerless != len(free) - twice:
            found.append(f"{ownerless} pages have no owner, {len(free) - twice} are free")
        idle = sum(self._references[page] == 1 for page in self._cached)
        if idle != self.idle:
            found.append(f"{idle} cached pages are not in use, {self.idle} were counted")
        return found
