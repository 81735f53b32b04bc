"""A drafter without weights in one file: it proposes that the last tokens repeat.

Shapes: B slots, S levels.
"""

from __future__ import annotations

import torch
from specserve_kernels import Pool

from specserve.methods import DraftSettings, Method
from specserve.models.base import TargetModel
from specserve.speculation.context import Context, Drafter, View
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape

SURE = -0.1  # log-probability of each token


class CopyDrafter(Drafter):
    name = "COPY"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        slots = view.slots
        level_S = torch.arange(shape.levels, device=slots.rows_B.device)
        index_BS = slots.length_B[:, None] + 1 - shape.levels + level_S
        token_BS = context.state.slots.tokens[slots.rows_B[:, None], index_BS.clamp(min=0)].long()
        score_BS = (SURE * (level_S + 1)).to(context.state.sampling.temperature.dtype).expand_as(token_BS)
        return Pool.of_text(token_BS, score_BS.where(index_BS[:, :1] >= 0, -torch.inf))


def load(draft: DraftSettings, target: TargetModel) -> CopyDrafter:
    return CopyDrafter(target.config.vocab_size)


METHOD = Method("COPY", load)
