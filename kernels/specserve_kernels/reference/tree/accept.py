"""Accept: the walk down each tree along the target's own choices. Shapes as in ``types``."""

from __future__ import annotations

import torch
from torch import Tensor

from specserve_kernels.reference.tree.nodes import first_children, first_places
from specserve_kernels.types import Accepted, Slots, Tree


def accept_path(tree: Tree, chosen_T: Tensor, slots: Slots) -> Accepted:
    """Walk down each tree. ``chosen_T``: the token that the target chose after each node. A child that carries it is
    accepted; the choice at the last accepted node is the bonus token."""
    length_B, levels = slots.length_B, tree.levels
    path_BS, count_B = accept_walk(tree, chosen_T, len(length_B))
    column_S = path_BS.new_ones(levels + 1).cumsum(0) - 1
    live_BS = column_S < count_B[:, None]
    position_BS = length_B[:, None] + column_S
    first_place_B1 = first_places(slots)[:, None]
    place_BS, source_BS = first_place_B1 + position_BS, length_B[:, None] + tree.local_T[path_BS]
    token_BS = chosen_T[path_BS].where(live_BS, -1)
    drafted_B1 = (tree.q_start.diff() - 1)[:, None]
    first_B1, followed_B1 = drafted_B1, count_B[:, None] - 1
    if not tree.is_chain:
        first_B1, followed_B1 = first_choices(tree, path_BS, live_BS)
    return Accepted(
        path_BS=path_BS,
        count_B=count_B,
        packed_BX=torch.cat([token_BS, drafted_B1, first_B1, followed_B1], dim=1),
        place_BS=place_BS.where(live_BS, -1),
        source_place_BS=(first_place_B1 + source_BS).where(live_BS, -1),
        next_token_BS=token_BS.clamp(min=0),
        next_place_BS=(place_BS + 1).where(live_BS, -1),
        next_position_BS=position_BS + 1,
    )


def first_choices(tree: Tree, path_BS: Tensor, live_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many first choices each tree has ``[B, 1]``, and how many of them were accepted."""
    index_T = torch.arange(len(tree.parent_T), device=tree.parent_T.device)
    is_first_T = (first_children(tree)[tree.parent_T] == index_T) | (tree.local_T == 0)
    followed_B1 = (is_first_T[path_BS[:, 1:]] & live_BS[:, 1:]).long().cumprod(1).sum(1, keepdim=True)
    bits_B = tree.mask_T.new_zeros(len(path_BS) + 1)
    bits_B.scatter_add_(0, tree.slot_T, is_first_T.long() << tree.local_T)
    chain_T = (tree.mask_T & bits_B[tree.slot_T]) == tree.mask_T
    count_B1 = torch.zeros_like(bits_B).scatter_add_(0, tree.slot_T, chain_T.long())[:-1, None]
    return count_B1 - 1, followed_B1


def accept_walk(tree: Tree, chosen_T: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Follow, from each root, the child that carries the token chosen at its parent. Return ``path`` ``[B, S + 1]``,
    packed indices of the accepted nodes by depth (0 after the end), and their number ``[B]``, the root included."""
    slot_T, levels, device = tree.slot_T, tree.levels, chosen_T.device
    agrees_T = (tree.token_T == chosen_T[tree.parent_T]) | (tree.local_T == 0)
    bits = torch.zeros(slots + 1, dtype=torch.int64, device=device)
    bits.scatter_add_(0, slot_T, agrees_T.long() << tree.local_T)
    accepted_T = (tree.mask_T & bits[slot_T]) == tree.mask_T
    path = torch.zeros(slots + 1, levels + 2, dtype=torch.int64, device=device)
    column_T = torch.where(accepted_T, tree.depth_T, levels + 1)
    path[slot_T, column_T] = torch.arange(len(slot_T), device=device)
    count = torch.zeros(slots + 1, dtype=torch.int64, device=device)
    count.scatter_add_(0, slot_T, accepted_T.long())
    return path[:slots, : levels + 1], count[:slots]
