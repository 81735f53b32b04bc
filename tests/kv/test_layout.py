"""Which layer lies where, and how much memory that saves."""

from __future__ import annotations

import random

import pytest
import torch

from specserve.kv.layout import Layout, first_page, lay_out
from specserve.kv.pool import KVPool, PoolConfig
from specserve.kv.spec import HeadKV

PAGE, CHUNK = 16, 2048


def layers(full: int, window: int, tokens: int = 1024, size: int = 8192) -> list[tuple[int, int | None]]:
    return [(size, None)] * full + [(size, tokens)] * window


def share(layout: Layout, each: list[tuple[int, int | None]], tokens: int) -> float:
    """The bytes of a request in steps beside those of all its tokens in all layers."""
    pages = layout.pages(tokens, prompts=False)
    return layout.token_bytes * PAGE * pages / (tokens * sum(size for size, _ in each))


@pytest.mark.parametrize(
    ("full", "window", "tables", "at_16k", "at_32k"), [(8, 40, 6, 0.23, 0.2), (10, 52, 7, 0.235, 0.2)]
)
def test_five_windows_to_one(full: int, window: int, tables: int, at_16k: float, at_32k: float) -> None:
    """The layers of Gemma-3-12B and 27B: about a fifth."""
    each = layers(full, window)
    layout = lay_out(each, 131072, PAGE, CHUNK, 8)
    assert len(layout.windows) == tables
    assert share(layout, each, 16384) < at_16k
    assert share(layout, each, 32768) < at_32k
    assert share(layout, each, 1024) < 1.14


@pytest.mark.parametrize(
    ("full", "window", "tables", "waste"),
    [((8, 2048), (40, 8192), 15, 1.4), ((10, 8192), (50, 16384), 11, 1.05), ((3, 2048), (12, 1024), 3, 1.05)],
)
def test_layers_of_two_sizes(
    full: tuple[int, int], window: tuple[int, int], tables: int, waste: float
) -> None:
    """Of Gemma-4-12B, 31B and E2B: small layers share columns."""
    each = [(full[1], None)] * full[0] + [(window[1], 1024)] * window[0]
    layout = lay_out(each, 131072, PAGE, CHUNK, 8)
    assert len(layout.windows) == tables
    least = sum(size * min(32768, kept or 32768) for size, kept in each)
    assert share(layout, each, 32768) * sum(size for size, _ in each) * 32768 < waste * least


def test_one_retention_is_one_table_of_all_layers_in_order() -> None:
    for each in ([(512, None)] * 7, layers(0, 7), [(512, 4096), (512, None)] * 3):
        layout = lay_out(each, 4096, PAGE, CHUNK, 8)
        assert len(layout.windows) == 1
        assert layout.tables == (0,) * len(each)
        assert layout.columns == tuple(range(len(each)))
        assert layout.token_bytes == sum(size for size, _ in each)


@pytest.mark.parametrize("seed", range(20))
def test_every_layer_has_its_own_place(seed: int) -> None:
    """And table 0 keeps the most, a column is as wide as its widest layer, and the longest request fits, but no page
    more of it."""
    rng = random.Random(seed)
    each = [(rng.choice([256, 512]), rng.choice([None, 80, 700])) for _ in range(rng.randint(1, 40))]
    layout = lay_out(each, 4096, PAGE, rng.choice([1, 64, 700]), 8)
    places = list(zip(layout.tables, layout.columns, strict=True))
    taken = [
        (*place, byte)
        for place, offset, (size, _) in zip(places, layout.offsets, each, strict=True)
        for byte in range(offset, offset + size, 64)
    ]
    assert len(set(taken)) == len(taken)
    kept = [window or 4096 for window in layout.windows]
    assert kept == sorted(kept, reverse=True)
    ends = [offset + size for offset, (size, _) in zip(layout.offsets, each, strict=True)]
    for end, (_, window), (table, column) in zip(ends, each, places, strict=True):
        assert layout.windows[table] == window
        assert layout.column_bytes[column] >= end
    pages = rng.randint(len(layout.windows), 5000)
    longest = layout.longest(pages, 100)
    assert layout.pages(longest) <= pages
    assert None not in layout.windows or layout.pages(longest + PAGE) > pages


@pytest.mark.parametrize("page", [1, 16, 64])
def test_a_window_never_holds_more_than_it_says(page: int) -> None:
    for window in (1, 80, 128):
        for span in (1, 5, 64):
            layout = lay_out([(1, window), (1, None)], 10**6, page, span, 1)
            for low in range(0, 700, 7):
                held = -(-(low + span) // page) - first_page(window, low, page)
                assert held + -(-(low + span) // page) <= layout.pages(low + span)


def test_views_of_a_shared_page_do_not_overlap() -> None:
    """Target layers of two geometries and a draft's: what one stores no other of its table sees, and blocks of the
    target cover the target alone."""
    wide, narrow = HeadKV(2, 8, torch.float32), HeadKV(1, 4, torch.float32)
    target = [*[narrow] * 6, HeadKV(2, 8, torch.float32, window=80), HeadKV(2, 8, torch.float32, window=80)]
    specs = [*target, wide]
    each = [(spec.token_bytes, spec.window) for spec in specs]
    layout = lay_out(each, 10**5, PAGE, 9, 1)
    pool = KVPool(PoolConfig(target, [wide], layout, 0, torch.float32), 5, torch.device("cpu"))
    for number, layer in enumerate(pool.layers, start=1):
        layer[1 + pool.tables[number - 1]] = number
    for number, layer in enumerate(pool.layers, start=1):
        assert (layer[1 + pool.tables[number - 1]] == number).all()
    for group, tables in pool.target_groups:
        for table in range(tables.start, tables.stop):
            group[:, 1 + table] = -1
    cleared = [bool((layer[1 + pool.tables[i]] == -1).all()) for i, layer in enumerate(pool.layers)]
    assert cleared == [True] * 8 + [False]
    assert bool((pool.layers[8][1 + pool.tables[8]] == 9).all())
    assert max(layout.offsets) > 0
