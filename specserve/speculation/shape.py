"""The shape of a step: how many slots, nodes, draft levels and candidates a node."""

from __future__ import annotations

from dataclasses import dataclass

import specserve_kernels
from specserve_kernels import tree_pool_size

from specserve.methods import MAX_NODES

assert MAX_NODES == specserve_kernels.MAX_NODES


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes that a step is captured for. ``nodes``: those of the whole batch, roots included. ``levels`` 0: plain
    decoding, a tree of one node a slot. ``copied``: levels of copied text next to a model's drafts, 0 without a merged
    drafter. ``block``: positions of a block drafter's block, whatever the levels; 0 for drafters that work level by
    level."""

    slots: int
    nodes: int
    levels: int
    branching: int
    copied: int = 0
    block: int = 0

    @classmethod
    def plain(cls, slots: int) -> StepShape:
        return cls(slots=slots, nodes=slots, levels=0, branching=1)

    @property
    def pool_size(self) -> int:
        """Most candidates that a drafter proposes for one slot."""
        return tree_pool_size(self.levels, self.branching) + self.copied * self.branching

    @property
    def depth(self) -> int:
        """Most tokens on a path after the root."""
        return max(self.levels, self.copied)

    @property
    def max_nodes(self) -> int:
        """Most nodes that one slot can get, its root included."""
        return min(MAX_NODES, self.nodes - self.slots + 1, self.pool_size + 1)

    @property
    def reserve(self) -> int:
        """Positions from ``length`` on that a step may write in a slot: nodes, drafts' scratch, the bonus token."""
        return max(self.max_nodes, 1 + max(self.levels - 1, 0) * self.branching, self.depth + 2, self.block)
