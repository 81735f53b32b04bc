"""Select: which drafted candidates the target verifies. One budget for the whole batch.

A slot that accepts well gets more nodes than one that does not; what a request must not have (drafting off, its cap,
the end of its context) has no score.
"""

from __future__ import annotations

import torch
from specserve_kernels import chain_masks, select_nodes, tree_masks
from torch import Tensor

from specserve.spec.tree import Pool, StepShape, Tree, pool_depths


def select(pool: Pool, root_B: Tensor, room_B: Tensor, cap_B: Tensor, shape: StepShape) -> Tree:
    """Cuts the batch's trees from its pools. ``room_B``: deepest node of use before a request's limit; ``cap_B``: most
    candidates of a request."""
    device = root_B.device
    too_deep_BP = pool_depths(shape.levels, shape.branching, device) > room_B[:, None]
    scores_BP = pool.scores_BP.masked_fill(too_deep_BP, -torch.inf)
    slot_T, pool_T, local_T, q_start = select_nodes(scores_BP, cap_B, shape.nodes, shape.max_nodes)
    index_T = torch.arange(shape.nodes, device=device)
    source_T = slot_T * (shape.pool_size + 1) + pool_T + 1
    # Column 0 is the root, row B what is left over.
    token_T = _with_roots(pool.tokens_BP, root_B[:, None])[source_T]
    if shape.is_chain:
        parent_T = index_T - (local_T > 0).long()
        depth_T, mask_T = chain_masks(local_T)
    else:
        roots_B1 = torch.full_like(root_B, -1)[:, None]
        parent_pool_T = _with_roots(pool.parents_BP, roots_B1)[source_T]
        packed = torch.zeros((shape.slots + 1) * (shape.pool_size + 1), dtype=torch.int64, device=device)
        packed[source_T] = index_T
        parent_T = packed[slot_T * (shape.pool_size + 1) + parent_pool_T + 1]
        depth_T, mask_T = tree_masks(parent_T, local_T, shape.levels)
    return Tree(token_T, parent_T, slot_T, local_T, depth_T, mask_T, q_start, shape.levels, shape.is_chain)


def single_nodes(root_B: Tensor) -> Tree:
    """Plain decoding: the tree of the root alone."""
    index_B = torch.arange(len(root_B), device=root_B.device)
    zero_B = torch.zeros_like(index_B)
    q_start = torch.arange(len(root_B) + 1, device=root_B.device)
    return Tree(root_B, index_B, index_B, zero_B, zero_B, zero_B + 1, q_start, 0, True)


def _with_roots(table_BP: Tensor, roots_B1: Tensor) -> Tensor:
    """A flat table of B + 1 rows and P + 1 columns: roots, pool entries, and a last row like the first root."""
    rows = torch.cat([roots_B1, table_BP], dim=1)
    left_over = roots_B1[:1].expand(1, rows.shape[1])
    return torch.cat([rows, left_over]).flatten()
