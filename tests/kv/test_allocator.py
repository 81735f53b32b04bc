"""Pages have owners; pages without an owner are free."""

from __future__ import annotations

import random

import pytest

from specserve.kv.allocator import PageAllocator


def test_random_use_against_a_counter() -> None:
    rng = random.Random(0)
    allocator = PageAllocator(30)
    owners = dict.fromkeys(range(1, 30), 0)
    for _ in range(3000):
        used = [page for page, count in owners.items() if count]
        action = rng.choice(["allocate", "share", "release"])
        if action == "allocate":
            pages = allocator.allocate(rng.randint(0, allocator.free))
            assert all(owners[page] == 0 for page in pages), "a page in use was handed out"
            assert len(set(pages)) == len(pages)
        else:
            pages = rng.sample(used, rng.randint(0, len(used)))
            (allocator.share if action == "share" else allocator.release)(pages)
        for page in pages:
            owners[page] += -1 if action == "release" else 1
        assert [allocator.references(page) for page in owners] == list(owners.values())
        assert allocator.free == sum(count == 0 for count in owners.values())


def test_page_0_is_nobodys() -> None:
    allocator = PageAllocator(5)
    assert allocator.capacity == 4
    assert sorted(allocator.allocate(4)) == [1, 2, 3, 4]
    assert allocator.free == 0


def test_misuse_is_noticed() -> None:
    allocator = PageAllocator(3)
    (page,) = allocator.allocate(1)
    with pytest.raises(AssertionError, match="without a check"):
        allocator.allocate(2)
    allocator.release([page])
    with pytest.raises(AssertionError, match="released twice"):
        allocator.release([page])
    with pytest.raises(AssertionError, match="is free"):
        allocator.share([page])
    with pytest.raises(ValueError, match="at least 2 pages"):
        PageAllocator(1)
