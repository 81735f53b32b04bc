"""Token trees over a batch: packing by budget, ancestor masks, the walk down.

Shapes: B slots in the batch, P pool entries a slot, T packed nodes of the whole batch (roots included),
S draft levels. Nodes of a slot stand together, its root first, parents before children. A node's *local* index
counts within its slot. Nodes left over when the pools offer fewer than T - B live candidates have slot B and
local index 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_NODES = 64  # ancestors of a node are the bits of one int64


def select_nodes(
    scores_BP: Tensor, cap_B: Tensor, total: int, max_nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Chooses the ``total - B`` best live candidates of all pools together and packs them behind their roots.

    ``scores_BP``: cumulative log-probabilities, falling along every path, -inf for what must not be verified;
    equal scores go to the lower pool index, so that parents come with their children. ``cap_B`` bounds the
    candidates taken from a slot; so does ``max_nodes - 1``.

    Returns ``slot_T`` (B for left-over nodes), ``pool_T`` (pool index, -1 for roots and left-overs), ``local_T``
    and ``q_start`` ``[B + 1]``.
    """
    slots, size = scores_BP.shape
    device = scores_BP.device
    cap_B1 = cap_B.clamp(max=max_nodes - 1)[:, None]
    order_BP = scores_BP.argsort(dim=1, descending=True, stable=True)
    rank_BP = torch.empty_like(order_BP).scatter_(
        1, order_BP, torch.arange(size, device=device).expand(slots, -1)
    )
    scores_BP = scores_BP.masked_fill(rank_BP >= cap_B1, -torch.inf)
    best = scores_BP.flatten().argsort(descending=True, stable=True)[: total - slots]
    stride = size + 1
    roots = torch.arange(slots, device=device) * stride
    live = scores_BP.flatten()[best] > -torch.inf
    keys = torch.where(live, best + best // size + 1, slots * stride)
    missing = total - slots - len(best)
    keys_T = torch.cat([roots, keys, keys.new_full((missing,), slots * stride)]).sort().values
    slot_T = keys_T // stride
    q_start = torch.searchsorted(keys_T, torch.arange(slots + 1, device=device) * stride)
    local_T = torch.where(slot_T < slots, torch.arange(total, device=device) - q_start[slot_T], 0)
    return slot_T, keys_T % stride - 1, local_T, q_start


def tree_masks(parent_T: Tensor, local_T: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Derives each node's depth and its ancestor mask (bit j: local node j is an ancestor or the node itself).

    ``parent_T``: packed index of the parent, a root's own index for roots. Returns int64 ``depth_T, mask_T``;
    bit 63 is the sign.
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
    """``tree_masks`` where every node's parent is the node before it: no walk needed."""
    return local_T, (torch.full_like(local_T, 2) << local_T) - 1


def accept_walk(
    token_T: Tensor,
    chosen_T: Tensor,
    parent_T: Tensor,
    slot_T: Tensor,
    local_T: Tensor,
    depth_T: Tensor,
    mask_T: Tensor,
    slots: int,
    levels: int,
) -> tuple[Tensor, Tensor]:
    """Follows, from each root, the child that carries the token chosen at its parent.

    Returns ``path`` ``[B, S + 1]``, packed indices of the accepted nodes by depth (0 beyond the end), and their
    number ``[B]``, the root included.
    """
    agrees_T = (token_T == chosen_T[parent_T]) | (local_T == 0)
    bits = torch.zeros(slots + 1, dtype=torch.int64, device=token_T.device)
    bits.scatter_add_(0, slot_T, agrees_T.long() << local_T)
    accepted_T = (mask_T & bits[slot_T]) == mask_T
    path = torch.zeros(slots + 1, levels + 2, dtype=torch.int64, device=token_T.device)
    column_T = torch.where(accepted_T, depth_T, levels + 1)
    path[slot_T, column_T] = torch.arange(len(token_T), device=token_T.device)
    count = torch.zeros(slots + 1, dtype=torch.int64, device=token_T.device)
    count.scatter_add_(0, slot_T, accepted_T.long())
    return path[:slots, : levels + 1], count[:slots]
