"""Force acceptance, for timing: the target is made to agree with the first levels of a draft.

Shapes: T packed nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
from specserve_kernels import Accepted, Slots, Tree, accept_path
from torch import Tensor

NONE = -1


def force(tree: Tree, chosen_T: Tensor, levels: Tensor) -> tuple[Tree, Tensor]:
    """The tree and the target's choices, changed so that the first children of the first ``levels`` depths are accepted
    and nothing below them: the bonus token is the target's own choice. ``levels`` is one int64 on the device, ``NONE``
    changes nothing."""
    index_T = torch.arange(len(chosen_T), device=chosen_T.device)
    none = index_T.new_full(index_T.shape, len(index_T))
    child_T = torch.where(tree.local_T > 0, index_T, none)
    first_T = none.scatter_reduce(0, tree.parent_T, child_T, "amin")
    forced_T = (first_T < len(index_T)) & (tree.depth_T < levels)
    chosen_T = torch.where(forced_T, tree.token_T[first_T.clamp(max=len(index_T) - 1)], chosen_T)
    deeper_T = (tree.depth_T > levels) & (levels >= 0)
    return replace(tree, token_T=tree.token_T.masked_fill(deeper_T, -1)), chosen_T


@contextmanager
def forced_levels() -> Iterator[Callable[[int], None]]:
    """Engines built inside, their captured steps included, accept what the given function says: this many levels of
    each draft, or ``NONE``, at first, for what the target accepts by itself."""
    tables: dict[torch.device, Tensor] = {}
    current = NONE

    def patched(tree: Tree, chosen_T: Tensor, slots: Slots) -> Accepted:
        if tree.levels:
            device = chosen_T.device
            if device not in tables:
                tables[device] = torch.tensor(current, dtype=torch.int64, device=device)
            tree, chosen_T = force(tree, chosen_T, tables[device])
        return accept_path(tree, chosen_T, slots)

    def say(levels: int) -> None:
        nonlocal current
        current = levels
        with torch.inference_mode():
            for table in tables.values():
                table.fill_(levels)

    with patch("specserve.speculation.step.accept_path", patched):
        yield say
