import math
import random
from collections.abc import Sequence

import pytest
import torch

from tests.reference.tree import (
    ROOT,
    DraftFn,
    Node,
    build_tree,
    expand,
    select,
    walk,
)


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
