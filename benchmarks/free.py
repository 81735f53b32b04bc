"""Drafts that cost nothing and drafts that are never accepted, for timing.

Shapes: B slots, S levels, T packed nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
from specserve_kernels import Accepted, Pool, Slots, Tree, accept_path
from torch import Tensor

from specserve.methods import METHOD_NAMES, METHODS, Method, register
from specserve.speculation import step
from specserve.speculation.context import Context, View
from specserve.speculation.drafters.config import DrafterConfig
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape
from tests.toys.drafter import CopyDrafter


class FreeDrafter(CopyDrafter):
    """Proposes the root again, whatever the text."""

    name = "FREE"

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        token_BS = view.slots.root_B.long()[:, None].expand(-1, shape.levels)
        score_BS = torch.full_like(token_BS, -1.0, dtype=context.state.sampling.temperature.dtype)
        return Pool.of_text(token_BS, score_BS)


def load_free(config: DrafterConfig) -> FreeDrafter:
    return FreeDrafter(config.target.config.vocab_size)


@contextmanager
def free_offered() -> Iterator[None]:
    """``FREE`` is a method."""
    method = Method("FREE", load_free, copies="all")
    register(method)
    try:
        yield
    finally:
        METHOD_NAMES.remove(method.name)
        del METHODS[method.name]


@contextmanager
def none_accepted() -> Iterator[None]:
    """Engines built inside, their captured steps included, accept no draft, at the cost of two small launches a
    step."""

    def patched(tree: Tree, chosen_T: Tensor, slots: Slots) -> Accepted:
        if tree.levels:
            tree = replace(tree, token_T=tree.token_T.masked_fill(tree.local_T > 0, -1))
        return accept_path(tree, chosen_T, slots)

    with patch.object(step, "accept_path", patched):
        yield
