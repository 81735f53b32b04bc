"""Hydra++: a decoder layer over the target's states, then heads that read its output and the path to a node.

Ankner et al. 2024, arXiv 2402.05109. The layer's cache is EAGLE's: a token's entry holds the state of the token before
it, which is the same layer shifted by one position. The layer runs once a step; each level is a head over the rows of
its nodes.

Shapes: N nodes of a level, X rows, H hidden size.
"""

from __future__ import annotations

import logging

import torch
from specserve_kernels import Level, Pool
from torch import Tensor

from specserve.attention.base import Frontier
from specserve.attention.paged import PagedAttend
from specserve.layers.linear import pack_linears
from specserve.models.draft.hydra import HydraHeads, load_hydra
from specserve.speculation.context import Context, View
from specserve.speculation.drafters.config import DrafterConfig
from specserve.speculation.drafters.eagle import EagleDrafter, Vocabulary
from specserve.speculation.expand import expand
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape

log = logging.getLogger(__name__)


class HydraDrafter(EagleDrafter):
    """Runs ``HydraHeads``, one for each level."""

    head: HydraHeads

    @classmethod
    def load(cls, config: DrafterConfig) -> HydraDrafter:
        """Load the heads and their layer. Raises ValueError for heads that do not fit."""
        heads, notes = load_hydra(
            config.path, config.target, config.layer, config.max_positions, config.dtype, config.overrides
        )
        for note in notes:
            log.info("%s", note)
        heads.quantize(config.quantization)
        pack_linears(heads, keep=["qkv_proj"])  # ``project_kv`` reads its rows
        return cls(config.name, heads, config.layer, config.dtype, Vocabulary(None))

    def scratch(self, shape: StepShape) -> int:
        """Return 1, for the root's entry."""
        return 1

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        path_NX: Tensor

        def forward(level: Level, depth: int) -> Tensor:
            nonlocal path_NX
            if depth == 0:
                frontier = Frontier(
                    pages_BM=view.slots.pages_BM,
                    prefix_B=view.prefix_B,
                    kv_start=1,
                    scratch_BKA=level.scratch_BWA,
                    max_kv=view.max_length + 1,
                )
                plan = context.attention.plan_draft(frontier)
                attend = PagedAttend(context.pool, plan, level.page_N, level.offset_N)
                before_NX = self.head(
                    level.token_N, context.state.slots.feature, level.position_N, attend, level.source_N
                )
            else:
                before_NX = path_NX[level.source_N]
            path_NX = torch.cat([before_NX, self.head.embed(level.token_N)], 1)
            return self.head.scores(depth, path_NX)

        return expand(context, view, shape, sampling, None, forward)
