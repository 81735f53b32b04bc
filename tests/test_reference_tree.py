import math
import random
from collections.abc import Sequence

import pytest
import torch

from tests.reference.tree import (
    ROOT,
    Candidate,
    DraftFn,
    Node,
    Pool,
    ancestor_mask,
    build_tree,
    depths,
    eagle_parents,
    expand,
    nodes_of,
    select,
    sglang_parents,
    walk,
)

SHAPES = [(1, 1, 2), (1, 4, 4), (4, 1, 5), (2, 2, 5), (3, 3, 10), (5, 4, 16), (5, 8, 32), (6, 10, 60)]


def random_draft(seed: int, vocab: int, coarse: bool = False) -> DraftFn:
    """Log-probs that depend on the whole path; `coarse` draws from few values so that ties abound."""

    def draft(path: tuple[int, ...]) -> torch.Tensor:
        rng = random.Random(f"{seed}{path}")
        logits = [float(rng.randrange(3)) if coarse else rng.gauss(0, 2) for _ in range(vocab)]
        return torch.log_softmax(torch.tensor(logits, dtype=torch.float64), dim=0)

    return draft


def table_draft(table: dict[tuple[int, ...], Sequence[float]]) -> DraftFn:
    return lambda path: [math.log(p) for p in table[path]]


def test_a_tree_worked_by_hand() -> None:
    draft = table_draft({(): (0.5, 0.1, 0.4), (0,): (0.2, 0.5, 0.3), (2,): (0.9, 0.06, 0.04)})
    pool = expand(draft, steps=2, topk=2)
    expected = [(0, ROOT, 0.5), (2, ROOT, 0.4), (1, 0, 0.25), (2, 0, 0.15), (0, 1, 0.36), (1, 1, 0.024)]
    assert [(c.token, c.parent) for c in pool.candidates] == [
        (token, parent) for token, parent, _ in expected
    ]
    assert [math.exp(c.score) for c in pool.candidates] == pytest.approx([p for _, _, p in expected])
    assert pool.frontiers == [[0, 1], [2, 0]]
    nodes = build_tree(draft, steps=2, topk=2, total_tokens=4, root_token=7)
    assert [(n.token, n.parent, n.depth, n.pool) for n in nodes] == [
        (7, -1, 0, ROOT),
        (0, 0, 1, 0),
        (2, 0, 1, 1),
        (0, 2, 2, 4),
    ]


@pytest.mark.parametrize(("steps", "topk", "total"), SHAPES)
@pytest.mark.parametrize("coarse", [False, True])
def test_both_parent_arithmetics_agree_with_the_explicit_tree(
    steps: int, topk: int, total: int, coarse: bool
) -> None:
    for seed in range(10):
        pool = expand(random_draft(seed, max(12, topk), coarse), steps, topk)
        assert len(pool.candidates) == topk + (steps - 1) * topk**2
        (selected,) = select([pool], total - 1)
        explicit = [node.parent for node in nodes_of(pool, selected, 0)]
        assert len(explicit) == min(total, len(pool.candidates) + 1)
        assert eagle_parents(selected, pool.frontiers, topk) == explicit
        assert sglang_parents(selected, pool.frontiers, topk) == explicit


@pytest.mark.parametrize(("steps", "topk", "total"), SHAPES)
def test_scores_depths_and_masks(steps: int, topk: int, total: int) -> None:
    draft = random_draft(99, 12)
    nodes = build_tree(draft, steps, topk, total)
    parents = [node.parent for node in nodes]
    mask = ancestor_mask(parents)
    pool = expand(draft, steps, topk)
    for index, node in enumerate(nodes):
        assert sum(mask[index]) - 1 == depths(parents)[index] == node.depth
        assert mask[index][0]
        assert mask[index][index]
        if index:
            assert mask[index] == [a or j == index for j, a in enumerate(mask[node.parent])]
            path = pool.path(node.pool)
            total_score = sum(float(draft(path[:i])[token]) for i, token in enumerate(path))
            assert node.score == pytest.approx(total_score)
    assert len({(node.parent, node.token) for node in nodes}) == len(nodes)  # siblings are distinct


def test_wide_enough_expansion_finds_the_globally_best_paths() -> None:
    """With K = V and a frontier that never drops a winner, the tree holds the best prefixes of all."""
    draft = random_draft(4, 4)
    every: dict[tuple[int, ...], float] = {}
    level: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(3):
        level = {(*path, t): s + float(draft(path)[t]) for path, s in level.items() for t in range(4)}
        every |= level
    best = sorted(every, key=lambda path: -every[path])[:6]
    pool = expand(draft, steps=3, topk=4)
    (selected,) = select([pool], 6)
    assert {pool.path(index) for index in selected} == set(best)


def test_one_branch_is_a_chain() -> None:
    nodes = build_tree(random_draft(1, 9), steps=5, topk=1, total_tokens=6)
    assert [node.parent for node in nodes] == [-1, 0, 1, 2, 3, 4]


def test_ties_go_to_the_lower_index() -> None:
    uniform = table_draft({(): (0.25,) * 4, (0,): (0.25,) * 4, (1,): (0.25,) * 4})
    nodes = build_tree(uniform, steps=2, topk=2, total_tokens=4)
    assert [(node.token, node.parent) for node in nodes[1:]] == [(0, 0), (1, 0), (0, 1)]


def test_ids_map_draft_ids_to_target_ids() -> None:
    seen = []

    def draft(path: tuple[int, ...]) -> list[float]:
        seen.append(path)
        return [math.log(0.3), math.log(0.7)]

    nodes = build_tree(draft, steps=2, topk=1, total_tokens=3, ids=[5, 9])
    assert [node.token for node in nodes[1:]] == [9, 9]
    assert seen == [(), (9,)]


def test_impossible_candidates_are_never_selected() -> None:
    def draft(path: tuple[int, ...]) -> list[float]:
        return [0.0, -math.inf, -math.inf]

    nodes = build_tree(draft, steps=3, topk=2, total_tokens=8)
    assert [(node.token, node.parent) for node in nodes[1:]] == [(0, 0), (0, 1), (0, 2)]


def pool_of(scores: Sequence[float]) -> Pool:
    return Pool(1, [Candidate(i, i - 1, i + 1, score) for i, score in enumerate(scores)])


def test_select_spends_one_budget_over_the_batch() -> None:
    sure, unsure = pool_of([-0.1, -0.2, -0.3]), pool_of([-0.25, -5.0, -6.0])
    off = pool_of([-math.inf] * 3)
    assert select([unsure, off, sure], 4) == [[0], [], [0, 1, 2]]
    assert select([unsure, off, sure], 99) == [[0, 1, 2], [], [0, 1, 2]]
    assert select([unsure, off, sure], 0) == [[], [], []]
    assert select([unsure, off, sure], 5, max_per_slot=2) == [[0, 1], [], [0, 1]]
    assert select([pool_of([-1.0]), pool_of([-1.0])], 1) == [[0], []]


def test_select_keeps_parents_with_children() -> None:
    for seed in range(30):
        pools = [expand(random_draft(seed * 3 + slot, 9, coarse=True), 4, 3) for slot in range(3)]
        for pool, selected in zip(pools, select(pools, 20), strict=True):
            nodes_of(pool, selected, 0)  # asserts it


NODES = [
    Node(t, p, d, 0.0, i - 1) for i, (t, p, d) in enumerate([(9, -1, 0), (1, 0, 1), (2, 0, 1), (3, 2, 2)])
]


@pytest.mark.parametrize(
    ("targets", "accepted", "bonus"),
    [
        ([5, 0, 0, 0], [], 5),
        ([1, 6, 0, 0], [1], 6),
        ([2, 0, 4, 0], [2], 4),
        ([2, 0, 3, 8], [2, 3], 8),
        ([3, 0, 3, 8], [], 3),  # token 3 is in the tree, but not under the root
    ],
)
def test_walk(targets: list[int], accepted: list[int], bonus: int) -> None:
    assert walk(NODES, targets) == (accepted, bonus)


def test_walk_emits_what_plain_decoding_would() -> None:
    """A deterministic target: next token = f(path). The walk's tokens are the target's own."""
    for seed in range(40):
        target = random.Random(seed)
        answers: dict[tuple[int, ...], int] = {}
        nodes = build_tree(random_draft(seed, 4), steps=4, topk=3, total_tokens=20)
        paths: list[tuple[int, ...]] = []
        for node in nodes:
            paths.append(() if node.parent < 0 else (*paths[node.parent], node.token))
            answers[paths[-1]] = target.randrange(4)
        accepted, bonus = walk(nodes, [answers[path] for path in paths])
        emitted = [nodes[index].token for index in accepted] + [bonus]
        for i, token in enumerate(emitted):
            assert answers[tuple(emitted[:i])] == token
        assert tuple(emitted) not in answers
