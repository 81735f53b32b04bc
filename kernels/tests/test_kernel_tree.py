"""Ancestor masks and the walk, on random trees packed by slot, against explicit nodes."""

from __future__ import annotations

import random

import pytest
import torch
from specserve_kernels import MAX_NODES, Tree, chain_masks, tree_masks
from specserve_kernels.reference.tree.accept import accept_walk

from tests.reference import tree

Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_parents(rng: random.Random, size: int, levels: int) -> list[int]:
    """Parents before children, no deeper than ``levels``."""
    parents, depth = [-1], [0]
    for _ in range(1, size):
        parent = rng.choice([i for i, d in enumerate(depth) if d < levels])
        parents.append(parent)
        depth.append(depth[parent] + 1)
    return parents


def pack(slots: list[list[int]]) -> Packed:
    """``parent_T`` (packed, a root's its own), ``slot_T`` and ``local_T``."""
    parent, slot, local = [], [], []
    for index, parents in enumerate(slots):
        start = len(parent)
        for node, above in enumerate(parents):
            parent.append(start + max(above, 0))
            slot.append(index)
            local.append(node)
    return torch.tensor(parent), torch.tensor(slot), torch.tensor(local)


def tree_of(
    token_T: torch.Tensor, packed: Packed, masks: tuple[torch.Tensor, torch.Tensor], levels: int
) -> Tree:
    """A tree of what the walk reads; the rest is filled with anything."""
    parent_T, slot_T, local_T = packed
    path_TA = token_T[:, None].expand(-1, levels)
    return Tree(
        token_T, parent_T, slot_T, slot_T, local_T, *masks, *[local_T] * 2, path_TA, local_T, is_chain=False
    )


def bits(mask: int, size: int) -> list[bool]:
    return [bool((mask >> j) & 1) for j in range(size)]


def test_masks_of_random_trees() -> None:
    rng = random.Random(0)
    for _ in range(60):
        levels = rng.randint(1, 7)
        slots = [random_parents(rng, rng.randint(1, MAX_NODES), levels) for _ in range(rng.randint(1, 4))]
        parent_T, _, local_T = pack(slots)
        depth_T, mask_T = tree_masks(parent_T, local_T, levels)
        assert depth_T.tolist() == [depth for parents in slots for depth in tree.depths(parents)]
        expected = [row for parents in slots for row in tree.ancestor_mask(parents)]
        for mask, row in zip(mask_T.tolist(), expected, strict=True):
            assert bits(mask, MAX_NODES) == row + [False] * (MAX_NODES - len(row))


@pytest.mark.parametrize("size", [1, 2, 33, 63, 64])
def test_masks_of_chains(size: int) -> None:
    """Node 63's own bit is the sign."""
    parents = [-1, *range(size - 1)]
    parent_T, _, local_T = pack([parents, parents[:3]])
    expected = [row for each in (parents, parents[:3]) for row in tree.ancestor_mask(each)]
    for depth_T, mask_T in (chain_masks(local_T), tree_masks(parent_T, local_T, max(size - 1, 2))):
        assert depth_T.tolist() == local_T.tolist()
        assert [bits(mask, len(row)) for mask, row in zip(mask_T.tolist(), expected, strict=True)] == expected
        assert (int(mask_T[size - 1]) < 0) == (size == 64)


def nodes_with_tokens(rng: random.Random, parents: list[int], vocab: int) -> list[tree.Node]:
    """Siblings carry different tokens, as drafted ones do."""
    used: dict[int, set[int]] = {}
    nodes = [tree.Node(rng.randrange(vocab), -1, 0, 0.0, -1)]
    for parent in parents[1:]:
        token = rng.choice([t for t in range(vocab) if t not in used.get(parent, set())])
        used.setdefault(parent, set()).add(token)
        nodes.append(tree.Node(token, parent, 0, 0.0, 0))
    return nodes


def test_the_walk_in_a_batch() -> None:
    rng = random.Random(1)
    longest = 0
    for _ in range(120):
        levels, vocab = rng.randint(1, 6), 70
        sizes = [rng.randint(1, MAX_NODES) for _ in range(rng.randint(1, 5))]
        slots = [random_parents(rng, size, levels) for size in sizes]
        trees = [nodes_with_tokens(rng, parents, vocab) for parents in slots]
        chosen: list[list[int]] = []
        for nodes in trees:  # mostly a child's token, so that walks go deep
            row = []
            for node in range(len(nodes)):
                children = [each.token for each in nodes if each.parent == node]
                row.append(rng.choice(children) if children and rng.random() < 0.8 else rng.randrange(vocab))
            chosen.append(row)
        parent_T, slot_T, local_T = pack(slots)
        token_T = torch.tensor([node.token for nodes in trees for node in nodes])
        chosen_T = torch.tensor([token for row in chosen for token in row])
        # Left-over nodes: slot B, local 0, any parent among themselves, and they agree with anything.
        spare = rng.randint(0, 3)
        parent_T = torch.cat([parent_T, torch.full((spare,), len(parent_T))])
        slot_T = torch.cat([slot_T, torch.full((spare,), len(slots))])
        local_T, token_T, chosen_T = (
            torch.cat([t, t.new_zeros(spare)]) for t in (local_T, token_T, chosen_T)
        )
        masks = tree_masks(parent_T, local_T, levels)
        path, count = accept_walk(
            tree_of(token_T, (parent_T, slot_T, local_T), masks, levels), chosen_T, len(slots)
        )
        assert path.shape == (len(slots), levels + 1)
        for slot, (nodes, row) in enumerate(zip(trees, chosen, strict=True)):
            accepted, _ = tree.walk(nodes, row)
            start = sum(sizes[:slot])
            assert count[slot] == 1 + len(accepted)
            wanted = [start, *(start + node for node in accepted)]
            assert path[slot].tolist() == wanted + [0] * (levels + 1 - len(wanted))
            longest = max(longest, len(accepted))
    assert longest >= 4


def test_a_walk_through_the_last_bit() -> None:
    """A chain of 64 nodes accepted whole, and cut at its last node."""
    parents = [-1, *range(MAX_NODES - 1)]
    parent_T, slot_T, local_T = pack([parents])
    token_T = torch.arange(100, 100 + MAX_NODES)
    whole = tree_of(token_T, (parent_T, slot_T, local_T), chain_masks(local_T), MAX_NODES - 1)
    for wrong_from, expected in ((MAX_NODES, MAX_NODES), (MAX_NODES - 2, MAX_NODES - 1), (0, 1)):
        chosen_T = torch.where(local_T < wrong_from, token_T + 1, 0)
        path, count = accept_walk(whole, chosen_T, 1)
        assert count.tolist() == [expected]
        assert path[0, :expected].tolist() == list(range(expected))
