"""EAGLE-2's dynamic tree (formats.md section 4) with explicit nodes, the walk of section 5.1, and design section 3's
selection over a batch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

DraftFn = Callable[[tuple[int, ...]], "Tensor | Sequence[float]"]
ROOT = -1  # a candidate's parent when it hangs off the root


@dataclass(frozen=True)
class Candidate:
    """An entry of a slot's pool. `parent` is a pool index or ROOT; the root's children have depth 1."""

    token: int
    parent: int
    depth: int
    score: float  # cumulative log-probability


@dataclass
class Pool:
    topk: int
    candidates: list[Candidate] = field(default_factory=list)
    frontiers: list[list[int]] = field(default_factory=list)
    """Per level, the expanded nodes as indices into that level's block of k (level 0) or k*k candidates."""

    def path(self, index: int) -> tuple[int, ...]:
        """Tokens from the root's child down to the candidate; the root itself is not in it."""
        tokens: list[int] = []
        while index != ROOT:
            tokens.append(self.candidates[index].token)
            index = self.candidates[index].parent
        return tuple(reversed(tokens))


@dataclass(frozen=True)
class Node:
    """A node of the verified tree. Node 0 is the root: parent -1, depth 0, score 0, pool -1."""

    token: int
    parent: int  # index in the list of nodes
    depth: int
    score: float
    pool: int  # index in the pool


def best_indices(scores: Sequence[float], count: int) -> list[int]:
    """The `count` largest, in falling order, ties to the lower index."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:count]


def children_of(pool: Pool, parent: int, draft_fn: DraftFn) -> list[Candidate]:
    depth = 1 if parent == ROOT else pool.candidates[parent].depth + 1
    base = 0.0 if parent == ROOT else pool.candidates[parent].score
    if base == -math.inf:  # a dead node keeps its k places in the pool and is never verified
        return [Candidate(0, parent, depth, -math.inf) for _ in range(pool.topk)]
    log_probs = [float(value) for value in draft_fn(pool.path(parent))]
    assert len(log_probs) >= pool.topk, "fewer draft tokens than the branching factor"
    best = best_indices(log_probs, pool.topk)
    return [Candidate(i, parent, depth, base + log_probs[i]) for i in best]


def expand(draft_fn: DraftFn, steps: int, topk: int) -> Pool:
    """`steps` levels. draft_fn(path) is asked afresh at every node for log-probs of the token after `path`,
    the drafted tokens below the root."""
    pool = Pool(topk)
    frontier = [ROOT]
    for level in range(steps):
        start = len(pool.candidates)
        for node in frontier:
            pool.candidates.extend(children_of(pool, node, draft_fn))
        block = pool.candidates[start:]
        chosen = best_indices([candidate.score for candidate in block], topk)
        pool.frontiers.append(chosen)
        assert level > 0 or chosen == list(range(topk))
        frontier = [start + index for index in chosen]
    return pool


def select(pools: Sequence[Pool], budget: int, max_per_slot: int = 63) -> list[list[int]]:
    """The best `budget` candidates of the whole batch, as ascending pool indices per slot. Ties go to the
    lower slot, then the lower pool index. A score of -inf is never taken. 63 and the root make 64 nodes."""
    ranked = [
        (-candidate.score, slot, index)
        for slot, pool in enumerate(pools)
        for index, candidate in enumerate(pool.candidates)
        if candidate.score > -math.inf
    ]
    chosen: list[list[int]] = [[] for _ in pools]
    left = budget
    for _, slot, index in sorted(ranked):
        if left > 0 and len(chosen[slot]) < max_per_slot:
            chosen[slot].append(index)
            left -= 1
    return [sorted(indices) for indices in chosen]


def nodes_of(pool: Pool, selected: Sequence[int], root_token: int) -> list[Node]:
    """The verified tree: root first, then the selected candidates in pool order."""
    nodes = [Node(root_token, -1, 0, 0.0, ROOT)]
    place = {ROOT: 0}
    for index in selected:
        candidate = pool.candidates[index]
        assert candidate.parent in place, "a selected node's parent must be selected before it"
        place[index] = len(nodes)
        parent = place[candidate.parent]
        assert candidate.depth == nodes[parent].depth + 1
        nodes.append(Node(candidate.token, parent, candidate.depth, candidate.score, index))
    return nodes


def build_tree(
    draft_fn: DraftFn, steps: int, topk: int, total_tokens: int, root_token: int = -1
) -> list[Node]:
    """Expansion and rerank of one request; `total_tokens` counts the root. A small pool is taken whole."""
    pool = expand(draft_fn, steps, topk)
    (selected,) = select([pool], total_tokens - 1, max_per_slot=total_tokens - 1)
    return nodes_of(pool, selected, root_token)


def depths(parents: Sequence[int]) -> list[int]:
    return [len(ancestors(parents, node)) - 1 for node in range(len(parents))]


def ancestors(parents: Sequence[int], node: int) -> list[int]:
    """From the root to the node itself; what the node may attend to next to the committed prefix."""
    path = []
    while node != -1:
        path.append(node)
        node = parents[node]
    return path[::-1]


def ancestor_mask(parents: Sequence[int]) -> list[list[bool]]:
    """mask[i][j]: node i sees node j."""
    rows = [set(ancestors(parents, node)) for node in range(len(parents))]
    return [[j in row for j in range(len(parents))] for row in rows]


def walk(nodes: Sequence[Node], target_tokens: Sequence[int]) -> tuple[list[int], int]:
    """(accepted node indices without the root, bonus token): follow the child with the target's token."""
    accepted: list[int] = []
    current = 0
    while True:
        wanted = target_tokens[current]
        matching = [i for i, node in enumerate(nodes) if node.parent == current and node.token == wanted]
        if not matching:
            return accepted, wanted
        current = matching[0]
        accepted.append(current)
