"""Nodes of a tree: their cache positions, depths, ancestor masks and paths. Shapes as in ``types``."""

from __future__ import annotations

import torch
from torch import Tensor

from specserve_kernels.types import Slots, Tree


def first_places(slots: Slots) -> Tensor:
    """Return the place of each slot's position 0, ``[B]`` int64."""
    return torch.arange(len(slots.rows_B), device=slots.rows_B.device) * slots.capacity


def address(pages_BM: Tensor, place_N: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Return page and offset of each place; 0 and 0 of -1."""
    within_N = place_N.clamp(min=0)
    page_N = pages_BM.flatten()[within_N // page_size].where(place_N >= 0, 0)
    return page_N, within_N % page_size


def tree_masks(parent_T: Tensor, local_T: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Derive each node's depth and its ancestor mask (bit j: local node j is an ancestor or the node itself).

    ``parent_T``: the parent's packed index; a root's is its own. Returns int64 ``depth_T, mask_T``; bit 63 is the sign.
    """
    own_T = torch.ones_like(local_T) << local_T
    index_T = torch.arange(len(parent_T), device=parent_T.device)
    child_T = (parent_T != index_T).long()
    depth_T, mask_T = child_T, own_T | own_T[parent_T]
    for _ in range(levels - 1):
        depth_T = child_T + depth_T[parent_T] * child_T
        mask_T = own_T | mask_T[parent_T]
    return depth_T, mask_T


def chain_masks(local_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``tree_masks`` of nodes whose parent is the node before them, which needs no walk."""
    return local_T, (torch.full_like(local_T, 2) << local_T) - 1


def path_tokens(token_T: Tensor, parent_T: Tensor, local_T: Tensor, levels: int, pad_id: int) -> Tensor:
    """Return the tokens on the path to each node, with the node and without the root: ``[T, levels]``, padded with
    ``pad_id``."""
    columns, node_T = [], torch.arange(len(token_T), device=token_T.device)
    for _ in range(levels):
        columns.append(token_T[node_T].masked_fill(local_T[node_T] == 0, pad_id))
        node_T = parent_T[node_T]
    return torch.stack(columns, dim=1) if columns else token_T[:, None][:, :0]


def first_children(tree: Tree) -> Tensor:
    """Return the index of each node's first choice ``[T]``: its own for a node that is nobody's parent, T for a root
    without children."""
    index_T = torch.arange(len(tree.parent_T), device=tree.parent_T.device)
    child_T = index_T.where(tree.local_T > 0, len(index_T))
    return index_T.scatter_reduce(0, tree.parent_T, child_T, "amin", include_self=False)
