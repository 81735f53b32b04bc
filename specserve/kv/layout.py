"""Which layer's cache lies where. Pure arithmetic.

Layers that keep the same tokens, all or those of a window, form a group. All groups share one kind of page, so that one
allocator serves them: a page has *columns*, each of which holds one layer's entries or those of several small ones,
and a group is cut into *tables* of as many layers as fit. A slot has a page table for each, and a page belongs to one
table at a time. With one group, a column is a layer, and there is one table.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import TypeVar

from specserve.core import MAX_COUNT

MOST_TABLES = 16
NEAR = 1.05  # memory, in relation to the least, that fewer tables are worth

Spec = TypeVar("Spec")


@dataclass(frozen=True, slots=True)
class Layout:
    """``windows``: of each table, the tokens that it keeps; None: all. ``tables`` and ``columns``: those of each layer.
    ``offsets``: bytes of a token in its column before each layer's. ``column_bytes``: of a token in each column.
    ``chunk`` and ``ahead``: most positions from a request's last known token on that a launch of prompts, or a step,
    writes."""

    windows: tuple[int | None, ...]
    tables: tuple[int, ...]
    columns: tuple[int, ...]
    offsets: tuple[int, ...]
    column_bytes: tuple[int, ...]
    page_size: int
    chunk: int
    ahead: int

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in a page."""
        return sum(self.column_bytes)

    def pages(self, tokens: int, prompts: bool = True) -> int:
        """Return the most pages that a request of so many tokens holds at a time, or if not ``prompts`` in steps."""
        span, whole = max(self.ahead, self.chunk if prompts else 0), -(-tokens // self.page_size)
        seen = [max(window, 2) - 1 for window in self.windows if window]
        some = sum(min(whole, -(-(before + span) // self.page_size) + 1) for before in seen)
        return whole * self.windows.count(None) + some

    def longest(self, pages: int, context: int) -> int:
        """Return the most tokens, in whole pages, of a request that holds at most ``pages`` at a time. Where windows
        alone would let it grow without end, the context counts."""
        wholes = range(max(pages, -(-context // self.page_size)) + 1)
        return self.page_size * (
            bisect_right(wholes, pages, key=lambda whole: self.pages(whole * self.page_size)) - 1
        )


def first_page(window: int | None, tokens: int, page_size: int) -> int:
    """Return the first page of a table that tokens from position ``tokens`` on need. The last page before it is one of
    them, because it has the feature of its last token."""
    return 0 if window is None else max(0, tokens - max(window, 2) + 1) // page_size


def lay_out(
    layers: Sequence[tuple[int, int | None]], context: int, page_size: int, chunk: int, ahead: int
) -> Layout:
    """Lay out layers, each with its bytes a token and its window, in few tables with nearly the least memory of a
    request that fills a quarter of the context. Windows as long as the context keep all tokens."""
    groups: dict[int | None, list[int]] = {}
    for layer, (_, window) in enumerate(layers):
        kept = window if window is not None and window < context else None
        groups.setdefault(kept, []).append(layer)
    # Table 0 keeps the most.
    order = sorted(groups, key=lambda window: MAX_COUNT if window is None else window, reverse=True)
    layouts = [
        _cut(layers, [(window, groups[window]) for window in order], width, page_size, chunk, ahead)
        for width in range(1, max(map(len, groups.values())) + 1)
    ]
    few = [each for each in layouts if len(each.windows) <= max(MOST_TABLES, len(groups))]
    least = min(_bytes(each, context // 4) for each in few)
    near = [each for each in few if _bytes(each, context // 4) <= NEAR * least]
    return min(near, key=lambda each: (len(each.windows), each.token_bytes))


def _bytes(layout: Layout, tokens: int) -> int:
    """Return the bytes of a request's tokens, but for the rest of its last pages."""
    return layout.token_bytes * sum(min(tokens, window or tokens) for window in layout.windows)


def _cut(
    layers: Sequence[tuple[int, int | None]],
    groups: Sequence[tuple[int | None, list[int]]],
    width: int,
    *rest: int,
) -> Layout:
    """Return a layout with ``width`` columns. Columns are as wide as the largest layers of each group; a layer takes
    the first room that it fits, the largest first. ``rest``: the layout's last fields."""
    ordered = [(window, sorted(group, key=lambda layer: -layers[layer][0])) for window, group in groups]
    sizes = [
        max(layers[group[column]][0] for _, group in ordered if column < len(group))
        for column in range(width)
    ]
    windows, places = list[int | None](), dict[int, tuple[int, int, int]]()
    for window, group in ordered:
        room: list[int] = []  # of each column of each of its tables
        for layer in group:
            size = layers[layer][0]
            cell = next((cell for cell, left in enumerate(room) if left >= size), len(room))
            if cell == len(room):
                room += sizes
            table, column = divmod(cell, width)
            places[layer] = len(windows) + table, column, sizes[column] - room[cell]
            room[cell] -= size
        windows += [window] * (len(room) // width)
    tables, columns, offsets = zip(*(places[layer] for layer in range(len(layers))), strict=True)
    return Layout(tuple(windows), tables, columns, offsets, tuple(sizes), *rest)


def blocks(layout: Layout, target: Sequence[Spec]) -> list[tuple[Spec, range, int, range]]:
    """Return the target's layers in few blocks of a spec, columns of equal size, an offset in them, and tables."""
    found = list[tuple[Spec, range, int, range]]()
    places = zip(layout.tables, layout.columns, layout.offsets, strict=True)
    specs = dict(zip(places, target, strict=False))
    for table, offset in product(range(len(layout.windows)), sorted({*layout.offsets})):
        first = 0
        cells = [
            (specs.get((table, column, offset)), size) for column, size in enumerate(layout.column_bytes)
        ]
        for (spec, _), run in groupby(cells):
            columns = range(first, first + len(list(run)))
            first = columns.stop
            if spec is None:
                continue
            for index, (*other, tables) in enumerate(found):
                if (*other, tables.stop) == (spec, columns, offset, table):
                    found[index] = spec, columns, offset, range(tables.start, table + 1)
                    break
            else:
                found.append((spec, columns, offset, range(table, table + 1)))
    return found
