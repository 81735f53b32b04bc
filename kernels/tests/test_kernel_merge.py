"""Merged pools: the texts of both drafters, each once."""

from __future__ import annotations

import random

import pytest
import torch
from specserve_kernels import Pool, merge_pools

VOCAB = 3  # so that drafters agree


def random_pool(rng: random.Random, slots: int, size: int) -> Pool:
    """Parents before children, siblings of different tokens, scores that fall; some entries are dead."""
    rows = []
    for _ in range(slots):
        entries: list[tuple[int, int, int, float]] = []
        while len(entries) < size:
            parent = rng.randrange(-1, len(entries))
            depth, score = (entries[parent][2] + 1, entries[parent][3]) if parent >= 0 else (1, 0.0)
            taken = {token for token, above, _, _ in entries if above == parent}
            if free := sorted(set(range(VOCAB)) - taken):
                score = -torch.inf if rng.random() < 0.1 else score - rng.random()
                entries.append((rng.choice(free), parent, depth, score))
        rows.append(entries)
    tokens, parents, depths, scores = torch.tensor(rows, dtype=torch.float64).unbind(-1)
    levels = int(depths.max())
    return Pool(tokens.long(), parents.long(), depths.long(), scores, levels, is_chain=False)


def texts(pool: Pool, slot: int) -> dict[tuple[int, ...], float]:
    """The live texts of a slot and their scores. Raises AssertionError where an entry is no candidate."""
    found: dict[tuple[int, ...], float] = {}
    paths: list[tuple[int, ...]] = []
    rows = zip(
        *(x[slot].tolist() for x in (pool.tokens_BP, pool.parents_BP, pool.depths_BP, pool.scores_BP)),
        strict=True,
    )
    for index, (token, parent, depth, score) in enumerate(rows):
        assert parent < index
        path = (*(paths[parent] if parent >= 0 else ()), token)
        paths.append(path)
        if score > -torch.inf:
            assert len(path) == depth
            assert path not in found
            assert parent < 0 or score <= found[path[:-1]]
            found[path] = score
    return found


@pytest.mark.parametrize("seed", range(20))
def test_both_drafters_texts_are_there_once(seed: int) -> None:
    rng = random.Random(seed)
    first, second = random_pool(rng, 3, rng.randrange(1, 12)), random_pool(rng, 3, rng.randrange(1, 9))
    merged = merge_pools(first, second)
    assert merged.levels == max(first.levels, second.levels)
    for slot in range(3):
        one, other = texts(first, slot), texts(second, slot)
        expected = {path: max(one.get(path, -torch.inf), other.get(path, -torch.inf)) for path in one | other}
        assert texts(merged, slot) == expected


def test_a_text_beside_a_tree_is_merged_as_well() -> None:
    tree = Pool.of_tree(1, 2, 2, torch.float32, torch.device("cpu"))
    tree.tokens_BP[0] = torch.tensor([5, 6, 7, 8, 7, 8])
    tree.parents_BP[0] = torch.tensor([-1, -1, 0, 0, 1, 1])
    tree.scores_BP[0] = torch.tensor([-0.1, -1.0, -0.5, -0.6, -1.5, -1.6])
    text = Pool.of_text(torch.tensor([[5, 8, 9]]), torch.tensor([[-0.2, -0.3, -0.4]]))
    merged = texts(merge_pools(tree, text), 0)
    assert {path: round(score, 4) for path, score in merged.items()} == {
        (5,): -0.1,
        (6,): -1.0,
        (5, 7): -0.5,
        (5, 8): -0.3,
        (6, 7): -1.5,
        (6, 8): -1.6,
        (5, 8, 9): -0.4,
    }


@pytest.mark.parametrize("levels", [1, 2, 8, 9, 17])
@pytest.mark.parametrize("branching", [1, 3])
def test_entries_lie_level_by_level(levels: int, branching: int) -> None:
    """Whatever depths were asked for before."""
    grown = Pool.of_tree(2, levels, branching, torch.float32, torch.device("cpu"))
    depths = [1] * branching + [d for d in range(2, levels + 1) for _ in range(branching * branching)]
    assert grown.depths_BP.tolist() == [depths, depths]
    copied = Pool.of_branches(
        torch.zeros(2, branching, levels, dtype=torch.int64), torch.zeros(2, branching, levels)
    )
    entries = [(depth, k) for depth in range(levels) for k in range(branching)]
    parents = [entries.index((depth - 1, k)) if depth else -1 for depth, k in entries]
    assert copied.depths_BP.tolist() == 2 * [[depth + 1 for depth, _ in entries]]
    assert copied.parents_BP.tolist() == 2 * [parents]
