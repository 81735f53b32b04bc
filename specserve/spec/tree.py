"""Candidate pools and the token trees cut from them, for a whole batch.

Shapes: B slots, S draft levels, K branching, P pool entries a slot, T packed nodes of the batch (roots included).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from specserve_kernels import MAX_NODES
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step is captured for. ``levels`` 0 is plain decoding: a tree of one node a slot."""

    slots: int
    nodes: int
    levels: int
    branching: int

    @classmethod
    def plain(cls, slots: int) -> StepShape:
        return cls(slots=slots, nodes=slots, levels=0, branching=1)

    @property
    def is_chain(self) -> bool:
        return self.branching == 1

    @property
    def pool_size(self) -> int:
        """Candidates a slot's draft offers: K of the root, then K of each of K frontier nodes a level."""
        k = self.branching
        return k + (self.levels - 1) * k * k if self.levels else 0

    @property
    def max_nodes(self) -> int:
        """Most nodes one slot can get, its root included."""
        return min(MAX_NODES, self.nodes - self.slots + 1, self.pool_size + 1)

    @property
    def reserve(self) -> int:
        """Positions from ``length`` on that a step may write in a slot: nodes, draft scratch, the bonus token's
        entry."""
        return max(self.max_nodes, 1 + max(self.levels - 1, 0) * self.branching, self.levels + 2)


@cache
def pool_depths(levels: int, branching: int, device: torch.device) -> Tensor:
    """Depth of each pool entry ``[P]``: the root's children are at 1. Made once, outside any graph."""
    widths = torch.tensor([branching] + [branching * branching] * (levels - 1))
    return torch.repeat_interleave(torch.arange(1, levels + 1), widths).to(device)


@dataclass(frozen=True, slots=True)
class Pool:
    """Drafted candidates in breadth-first order. ``parents``: pool index of the parent, -1 for the root."""

    tokens_BP: Tensor
    parents_BP: Tensor
    scores_BP: Tensor


@dataclass(frozen=True, slots=True)
class Tree:
    """The nodes to verify, packed by slot, roots first; what is left over has slot B. ``parent_T`` is a packed index,
    a root's its own; ``depth_T`` and ``mask_T`` (ancestor bits by local index) are derived from it."""

    token_T: Tensor
    parent_T: Tensor
    slot_T: Tensor
    local_T: Tensor
    depth_T: Tensor
    mask_T: Tensor
    q_start: Tensor  # [B + 1]
    max_depth: int
    is_chain: bool  # every accepted node already lies at its final slot

    def path_tokens(self, hole: int) -> Tensor:
        """Tokens on the path to each node, itself included and the root not: ``[T, S]``, ``hole`` past the root."""
        columns, node_T = [], torch.arange(len(self.token_T), device=self.token_T.device)
        for _ in range(self.max_depth):
            columns.append(self.token_T[node_T].masked_fill(self.local_T[node_T] == 0, hole))
            node_T = self.parent_T[node_T]
        return torch.stack(columns, dim=1) if columns else self.token_T[:, None][:, :0]
