"""Select the candidates to verify, with one budget for the whole batch, and pack them by slot. Shapes as in
``types``."""

from __future__ import annotations

import torch
from torch import Tensor

from specserve_kernels.reference.tree.nodes import chain_masks, first_places, path_tokens, tree_masks
from specserve_kernels.types import Pool, Slots, SlotTables, Tree


def select_tree(
    pool: Pool, slots: Slots, tables: SlotTables, total: int, max_nodes: int, pad_id: int
) -> Tree:
    """Select the batch's trees from its pools: the ``total - B`` best candidates that are allowed.

    Emitting n tokens takes n - 1 accepted nodes, and a request already holds length + 1 tokens, so nodes deeper than
    ``limit - length - 2`` are useless. No request gets more candidates than its ``draft_cap`` or ``max_nodes - 1``.
    ``path_TA`` is padded with ``pad_id``.
    """
    batch, size = pool.scores_BP.shape
    rows_B, root_B, length_B = slots.rows_B, slots.root_B, slots.length_B
    device = root_B.device
    room_B1 = (tables.limit[rows_B] - length_B - 2)[:, None]
    scores_BP = pool.scores_BP.masked_fill(pool.depths_BP > room_B1, -torch.inf)
    slot_T, pool_T, local_T, q_start = select_nodes(scores_BP, tables.draft_cap[rows_B], total, max_nodes)
    index_T = torch.arange(total, device=device)
    source_T = slot_T * (size + 1) + pool_T + 1
    # Column 0: roots; row B: unused nodes.
    token_T = _with_roots(pool.tokens_BP, root_B[:, None])[source_T]
    if pool.is_chain:
        parent_T = index_T - (local_T > 0).long()
        depth_T, mask_T = chain_masks(local_T)
    else:
        parent_pool_T = _with_roots(pool.parents_BP, torch.full_like(root_B, -1)[:, None])[source_T]
        packed = torch.zeros((batch + 1) * (size + 1), dtype=torch.int64, device=device)
        packed[source_T] = index_T
        parent_T = packed[slot_T * (size + 1) + parent_pool_T + 1]
        depth_T, mask_T = tree_masks(parent_T, local_T, pool.levels)
    batch_T = slot_T.clamp(max=batch - 1)
    length_T = length_B[batch_T]
    place_T = first_places(slots)[batch_T] + length_T + local_T
    return Tree(
        token_T=token_T,
        parent_T=parent_T,
        slot_T=slot_T,
        rows_T=rows_B[batch_T],
        local_T=local_T,
        depth_T=depth_T,
        mask_T=mask_T,
        position_T=length_T + depth_T,
        place_T=place_T.masked_fill(slot_T == batch, -1),
        path_TA=path_tokens(token_T, parent_T, local_T, pool.levels, pad_id),
        q_start=q_start,
        is_chain=pool.is_chain,
        parts=pool.parts,
    )


def single_nodes(slots: Slots) -> Tree:
    """Return the trees of plain decoding: roots alone."""
    root_B = slots.root_B
    index_B = torch.arange(len(root_B), device=root_B.device)
    zero_B = torch.zeros_like(index_B)
    return Tree(
        token_T=root_B,
        parent_T=index_B,
        slot_T=index_B,
        rows_T=slots.rows_B,
        local_T=zero_B,
        depth_T=zero_B,
        mask_T=zero_B + 1,
        position_T=slots.length_B,
        place_T=first_places(slots) + slots.length_B,
        path_TA=root_B[:, None][:, :0],
        q_start=torch.arange(len(root_B) + 1, device=root_B.device),
        is_chain=True,
    )


def select_nodes(
    scores_BP: Tensor, cap_B: Tensor, total: int, max_nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choose the ``total - B`` best live candidates of all pools together and pack them after their roots.

    ``scores_BP``: cumulative log-probabilities that fall along every path, -inf for candidates that must not be
    verified. Ties go to the lower pool index, so parents come with their children. A slot gets at most ``cap_B``
    candidates and ``max_nodes - 1``. Returns ``slot_T`` (B for unused nodes), ``pool_T`` (pool index, -1 for roots and
    unused nodes), ``local_T`` and ``q_start`` ``[B + 1]``.
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


def _with_roots(table_BP: Tensor, roots_B1: Tensor) -> Tensor:
    """Return a flat table of B + 1 rows and P + 1 columns: roots, pool entries, and a last row filled with the first
    root."""
    rows = torch.cat([roots_B1, table_BP], dim=1)
    left_over = roots_B1[:1].expand(1, rows.shape[1])
    return torch.cat([rows, left_over]).flatten()
