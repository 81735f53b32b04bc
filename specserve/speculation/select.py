"""Select: which drafted candidates the target verifies. One budget for the whole batch.

A slot that accepts well gets more nodes than one that does not; what a request must not have (drafting off, its cap,
the end of its context) is not live.
"""

from __future__ import annotations

from specserve_kernels import Pool, Tree, select_tree

from specserve.speculation.context import Context, View
from specserve.speculation.shape import StepShape


def select(context: Context, view: View, pool: Pool, shape: StepShape) -> Tree:
    """Cuts the batch's trees from its pools."""
    table = context.state.slots
    return select_tree(
        pool,
        view.rows_B,
        view.root_B,
        view.length_B,
        view.pages_BM,
        table.limit,
        table.draft_cap,
        total=shape.nodes,
        max_nodes=shape.max_nodes,
        levels=shape.levels,
        branching=shape.branching,
        page_size=context.pool.page_size,
        hole=context.vocab_size,
    )
