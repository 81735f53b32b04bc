"""Hydra: heads that read a state and the path to a node. The state is the target's; in Hydra++ it is the output of a
decoder layer over the target's states.

Ankner et al. 2024, arXiv 2402.05109. The layer's cache is EAGLE's: a token's entry holds the state of the token before
it, which is the same layer shifted by one position. The layer runs once a step; each level is a head over the rows of
its nodes. Without the layer there is no cache.

Shapes: N nodes of a level, X rows, H hidden size.
"""

from __future__ import annotations

import torch
from specserve_kernels import Level, Pool
from torch import Tensor

from specserve.methods import DraftSettings
from specserve.models.base import TargetModel
from specserve.models.config import ModelConfig
from specserve.models.draft.hydra import HydraHeads, HydraLayer, open_hydra
from specserve.speculation.context import Context, View
from specserve.speculation.drafters.eagle import EagleDrafter, Vocabulary
from specserve.speculation.drafters.recurrent import RecurrentDrafter, load_network
from specserve.speculation.expand import attend_level, expand
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape


def load_hydra(draft: DraftSettings, target: TargetModel) -> HydraDrafter | RecurrentDrafter:
    """Load the heads, and their layer if they have one. Raises ValueError for heads that do not fit."""
    heads = load_network(draft, target, open_hydra, HydraHeads)
    if heads.layer is None:
        return RecurrentDrafter(draft.name, heads, target.config.hidden_size)
    return HydraDrafter(draft.name, heads, heads.layer, target.config)


class HydraDrafter(EagleDrafter):
    """Runs the layer and the heads of Hydra++."""

    def __init__(self, name: str, heads: HydraHeads, head: HydraLayer, target: ModelConfig) -> None:
        super().__init__(name, head, target, Vocabulary(None))
        self._heads = heads

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        path_NX: Tensor

        def forward(level: Level, depth: int) -> Tensor:
            nonlocal path_NX
            if depth == 0:
                attend = attend_level(context, view, level, depth, kv_start=1)
                path_NX = self.head(
                    level.token_N, context.state.slots.feature, level.position_N, attend, level.source_N
                )
            source_N = level.source_N if depth else torch.arange(len(path_NX), device=path_NX.device)
            path_NX = self._heads(depth, level.token_N, path_NX, source_N)
            return self._heads.scores(depth, path_NX)

        return expand(context, view, shape, sampling, None, forward)
