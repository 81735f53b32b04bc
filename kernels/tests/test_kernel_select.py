"""The batch's budget against the slow selection, on pools whose scores fall along every path."""

from __future__ import annotations

import math
import random

import torch
from specserve_kernels.reference.tree.select import select_nodes

from tests.reference import tree

NEVER = -math.inf


def random_pool(rng: random.Random, steps: int, topk: int, ties: bool) -> tree.Pool:
    """By the reference's expansion, so that parents come before children and score at least as much."""

    def log_probs(path: tuple[int, ...]) -> list[float]:
        local = random.Random(f"{seed}{path}")
        steps_down = [0.0, -1.0, -1.0, -2.0] if ties else None
        values = [
            local.choice(steps_down) if steps_down else -local.expovariate(1.0) for _ in range(topk + 2)
        ]
        return [NEVER if local.random() < 0.2 else value for value in values]

    seed = rng.random()
    return tree.expand(log_probs, steps, topk)


def scores_of(pools: list[tree.Pool]) -> torch.Tensor:
    return torch.tensor([[c.score for c in pool.candidates] for pool in pools], dtype=torch.float64)


def check(
    scores_BP: torch.Tensor, caps: list[int], total: int, max_nodes: int, chosen: list[list[int]]
) -> None:
    """The packed result holds each root, then its chosen candidates in pool order, then what is left over."""
    slots = len(caps)
    slot_T, pool_T, local_T, q_start = select_nodes(scores_BP, torch.tensor(caps), total, max_nodes)
    expected = [
        (slot, index, local)
        for slot, indices in enumerate(chosen)
        for local, index in enumerate([-1, *indices])
    ]
    counts = [1 + len(indices) for indices in chosen]
    assert q_start.tolist() == [sum(counts[:i]) for i in range(slots + 1)]
    expected += [(slots, -1, 0)] * (total - len(expected))
    assert list(zip(slot_T.tolist(), pool_T.tolist(), local_T.tolist(), strict=True)) == expected


def test_against_the_reference() -> None:
    rng = random.Random(0)
    left_over = 0
    for _ in range(150):
        steps, topk, slots = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 4)
        pools = [random_pool(rng, steps, topk, ties=rng.random() < 0.5) for _ in range(slots)]
        budget, max_nodes = rng.randint(0, slots * 12), rng.choice([2, 5, 64])
        chosen = tree.select(pools, budget, max_nodes - 1)
        left_over += budget - sum(map(len, chosen)) > 0
        for pool, indices in zip(pools, chosen, strict=True):
            tree.nodes_of(pool, indices, 0)  # asserts that parents came along
        check(scores_of(pools), [2**62] * slots, slots + budget, max_nodes, chosen)
    assert left_over > 20


def test_caps_of_slots() -> None:
    """A slot's cap takes its best candidates; the budget it leaves goes to the others."""
    rng = random.Random(1)
    for _ in range(100):
        slots = rng.randint(1, 4)
        pools = [random_pool(rng, 3, 3, ties=rng.random() < 0.5) for _ in range(slots)]
        caps = [rng.choice([0, 0, 1, 3, 100]) for _ in range(slots)]
        budget = rng.randint(0, 30)
        ranked = sorted(
            (-candidate.score, slot, index)
            for slot, pool in enumerate(pools)
            for index, candidate in enumerate(pool.candidates)
            if candidate.score > NEVER
        )
        chosen: list[list[int]] = [[] for _ in pools]
        for _, slot, index in ranked:
            if sum(map(len, chosen)) < budget and len(chosen[slot]) < caps[slot]:
                chosen[slot].append(index)
        check(scores_of(pools), caps, slots + budget, 64, [sorted(indices) for indices in chosen])


def test_a_slot_gets_64_nodes_at_most() -> None:
    scores_BP = -torch.arange(200, dtype=torch.float64).view(2, 100) / 1000
    check(scores_BP, [2**62] * 2, 2 + 120, 64, [list(range(63)), list(range(57))])
