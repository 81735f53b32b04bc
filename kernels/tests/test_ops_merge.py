"""Merged pools and what their sources claim: the kernels against the references."""

from __future__ import annotations

import math

import pytest
import torch
from specserve_kernels import Pool, Sources
from specserve_kernels.reference.tree import merge as merge_reference
from specserve_kernels.reference.tree import sources as sources_reference
from torch import Tensor

pytest.importorskip("triton")
from specserve_kernels.ops.tree import merge, sources

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, SLOTS = 4, 5


def random_tree(levels: int, branching: int) -> Pool:
    """As drafters grow them: K candidates of K nodes a level, siblings of different tokens, some of them dead."""
    pool = Pool.of_tree(SLOTS, levels, branching, torch.float32, DEVICE)
    for slot in range(SLOTS):
        nodes, first = [(-1, 0.0)], 0
        for _ in range(levels):
            grown = []
            for node, score in nodes:
                tokens = torch.randperm(VOCAB)[:branching].tolist()
                falls = torch.rand(branching).sort().values.tolist()
                for token, fall in zip(tokens, falls, strict=True):
                    index = first + len(grown)
                    dead = torch.rand(()) < 0.1 or score == -math.inf
                    grown.append((index, -math.inf if dead else score - fall))
                    pool.tokens_BP[slot, index] = token
                    pool.parents_BP[slot, index] = node
                    pool.scores_BP[slot, index] = grown[-1][1]
            first += len(grown)
            nodes = sorted(grown, key=lambda each: -each[1])[:branching]
    return pool


def random_branches(levels: int, branching: int) -> Pool:
    """Texts that begin with different tokens; some end early, some never begin."""
    tokens = torch.randint(VOCAB, (SLOTS, branching, levels))
    tokens[..., 0] = torch.stack([torch.randperm(VOCAB)[:branching] for _ in range(SLOTS)])
    scores = -torch.rand(tokens.shape).cumsum(2)
    ends = torch.randint(levels + 1, (SLOTS, branching, 1))
    scores.masked_fill_(torch.arange(levels) >= ends, -math.inf)
    return Pool.of_branches(tokens.to(DEVICE), scores.to(DEVICE))


def emitted(pool: Pool, levels: int) -> tuple[Tensor, Tensor]:
    """Texts that follow a pool for a while, and how long they are."""
    tokens = torch.randint(VOCAB, (SLOTS, levels + 1))
    for slot in range(SLOTS):
        node = -1
        for depth in range(int(torch.randint(levels + 1, ()))):
            live = (pool.parents_BP[slot] == node) & (pool.scores_BP[slot] > -math.inf)
            children = live.nonzero()[:, 0].tolist()
            if not children:
                break
            node = children[0] if torch.rand(()) < 0.6 else children[-1]
            tokens[slot, depth] = pool.tokens_BP[slot, node]
    count_B = torch.randint(1, levels + 2, (SLOTS,))
    return tokens.masked_fill(torch.arange(levels + 1) >= count_B[:, None], -1).to(DEVICE), count_B.to(DEVICE)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("levels", "branching", "copied", "texts"), [(3, 1, 9, 1), (3, 3, 5, 2), (2, 4, 1, 4)]
)
def test_both_merge_alike(levels: int, branching: int, copied: int, texts: int, seed: int) -> None:
    torch.manual_seed(seed)
    first, second = random_tree(levels, branching), random_branches(copied, texts)
    actual, expected = merge.merge_pools(first, second), merge_reference.merge_pools(first, second)
    live = expected.scores_BP > -math.inf
    assert torch.equal(actual.scores_BP, expected.scores_BP)
    for name in ("tokens_BP", "parents_BP", "depths_BP"):
        assert torch.equal(getattr(actual, name)[live], getattr(expected, name)[live]), name
    assert (actual.levels, actual.is_chain) == (expected.levels, False)
    if branching > 1:
        assert (
            live.sum(1) < (first.scores_BP > -math.inf).sum(1) + (second.scores_BP > -math.inf).sum(1)
        ).any()


@pytest.mark.parametrize("seed", range(6))
def test_both_learn_alike(seed: int) -> None:
    torch.manual_seed(seed)
    found = [Sources.empty(SLOTS + 2, 2, DEVICE) for _ in range(2)]
    for table in found:
        table.begin(torch.arange(SLOTS + 1, device=DEVICE))
    rows_B = torch.randperm(SLOTS + 2)[:SLOTS].to(DEVICE)
    for number, pool in [(0, random_tree(3, 3)), (1, random_branches(4, 2)), (0, random_tree(3, 1))]:
        tokens_BS, count_B = emitted(pool, 5)
        told = [
            observe(pool, table, number, rows_B, tokens_BS, count_B)
            for observe, table in zip(
                (sources_reference.observe_source, sources.observe_source), found, strict=True
            )
        ]
        assert told[0].tolist() == told[1].tolist()
        torch.testing.assert_close(found[1].weight_RN, found[0].weight_RN, rtol=1e-5, atol=1e-6)


def test_what_a_source_says_is_held_against_the_text() -> None:
    """A tree of two levels: its first choices are 1 and, after it, 2; the text is 1, 3, then 0."""
    pool = Pool.of_tree(1, 2, 2, torch.float64, torch.device("cpu"))
    pool.tokens_BP[0] = torch.tensor([1, 0, 2, 3, 1, 2])
    pool.parents_BP[0] = torch.tensor([-1, -1, 0, 0, 1, 1])
    chances = torch.tensor([0.8, 0.1, 0.8 * 0.5, 0.8 * 0.25, 0.05, 0.01], dtype=torch.float64)
    pool.scores_BP[0] = chances.log()
    table, rows_B = Sources.empty(2, 2, torch.device("cpu")), torch.tensor([0])
    table.begin(rows_B)
    text_BS, count_B = torch.tensor([[1, 3, 0]]), torch.tensor([3])
    told = sources_reference.observe_source(pool, table, 1, rows_B, text_BS, count_B)
    assert told.tolist() == [[2, 1, 2]], (
        "of two first choices one was right; its other candidate was accepted"
    )
    residual = 0.8 - 1 + 0.5
    assert table.weight_RN[0].tolist() == pytest.approx([1, math.exp(0.25 * residual)])
    told = sources_reference.observe_source(pool, table, 1, rows_B, text_BS[:, :2], torch.tensor([1]))
    assert told.tolist() == [[1, 1, 0]], "the bonus token is no accepted node, and nothing after it is known"
    assert table.weight_RN[0, 1].item() < math.exp(0.25 * residual)


def test_requests_begin_as_others_are() -> None:
    """Rows 0 and 1 had requests, 2 had none, the last is padding's."""
    table = Sources.empty(4, 2, torch.device("cpu"))
    table.begin(torch.tensor([0, 1]))
    assert table.weight_RN.tolist() == [[1, 1], [1, 1], [0, 0], [1, 1]]
    table.weight_RN[:2] = torch.tensor([[2.0, 4.0], [0.5, 4.0]])
    table.begin(torch.tensor([2, 1]))
    assert table.weight_RN.flatten().tolist() == pytest.approx([2, 4, 1, 4, 1, 4, 1, 1])
