"""Accept: walk down each tree along the target's own choices."""

from __future__ import annotations

from dataclasses import dataclass

from specserve_kernels import accept_walk
from torch import Tensor

from specserve.spec.tree import Tree


@dataclass(frozen=True, slots=True)
class Accepted:
    """``path_BS``: packed index of the accepted node at each depth 0 .. S (0 beyond the end); ``count_B``: how many,
    the root included, which is how many tokens the step emits; ``token_BS``: those tokens, -1 beyond the end."""

    path_BS: Tensor
    count_B: Tensor
    token_BS: Tensor


def accept(tree: Tree, chosen_T: Tensor, slots: int) -> Accepted:
    """``chosen_T``: the token the target chose after each node. A child that carries it is accepted; the choice at the
    last accepted node is the bonus token."""
    path_BS, count_B = accept_walk(
        tree.token_T,
        chosen_T,
        tree.parent_T,
        tree.slot_T,
        tree.local_T,
        tree.depth_T,
        tree.mask_T,
        slots,
        tree.max_depth,
    )
    beyond_BS = depth_columns(path_BS) >= count_B[:, None]
    return Accepted(path_BS, count_B, chosen_T[path_BS].masked_fill(beyond_BS, -1))


def depth_columns(path_BS: Tensor) -> Tensor:
    """0 .. S, the depth each column of a path stands for."""
    return path_BS.new_ones(path_BS.shape[1]).cumsum(0) - 1
