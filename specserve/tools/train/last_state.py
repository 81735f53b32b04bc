"""Training of drafts that read only the target's last state, against a frozen target's distributions.

Medusa heads: Cai et al. 2024, arXiv 2401.10774 (Medusa-1). MLP speculators: Wertheimer et al. 2024, arXiv 2404.19124.

Shapes: T tokens of all rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specserve.models.draft.medusa import MedusaHeads
from specserve.models.draft.mlp_speculator import MLPSpeculator
from specserve.models.llama import LlamaModel
from specserve.tools.train.level import Level, Levels
from specserve.tools.train.loop import Metrics
from specserve.tools.train.packing import Batch
from specserve.tools.train.target import run_target
from specserve.tools.train.windows import Windows, masked_mean, soft_cross_entropy


class LastStateTrainer(nn.Module):
    """Hold the draft and its loss. The frozen target is not a submodule. A level's loss is the cross-entropy against
    the target's distribution at its position; the authors' codes use the text's token instead. An MLP speculator's
    levels are given the text's own tokens."""

    def __init__(self, target: LlamaModel, draft: MedusaHeads | MLPSpeculator, decay: float) -> None:
        super().__init__()
        self._target = (target,)
        self.draft, self.decay = draft, decay
        self.levels = len(draft.heads) if isinstance(draft, MedusaHeads) else draft.config.levels

    def unroll(self, batch: Batch, levels: int) -> Levels:
        """Run the target and up to ``levels`` levels."""
        target = self._target[0]
        states, _ = run_target(target, batch, ())
        with torch.no_grad():
            logits_TV = target.logits(states)
            greedy_T, probs_TV = logits_TV.argmax(-1), torch.softmax(logits_TV.float(), dim=-1)
        windows, found = Windows(batch), []
        own_T = torch.arange(len(states), device=states.device)
        for i in range(min(levels, self.levels)):
            if isinstance(self.draft, MLPSpeculator):
                states = self.draft(i, windows.inputs(i), states, own_T)
            logits = self.draft.scores(i, windows.columns(states, i))
            losses, valid = soft_cross_entropy(logits, windows.labels(probs_TV, i)), windows.valid(i)
            guess, greedy = logits.detach().argmax(-1), windows.labels(greedy_T, i)
            found.append(Level(masked_mean(losses, valid), guess, greedy, valid))
        return Levels(windows, found)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        return self.unroll(batch, self.levels).total(self.decay)
