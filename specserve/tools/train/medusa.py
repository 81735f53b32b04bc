"""Training of Medusa heads. Cai et al. 2024, arXiv 2401.10774, with a frozen target (Medusa-1).

Shapes: T tokens of all rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specserve.models.draft.medusa import MedusaHeads
from specserve.models.llama import LlamaModel
from specserve.tools.train.level import Level, Levels
from specserve.tools.train.loop import Metrics
from specserve.tools.train.packing import Batch
from specserve.tools.train.target import run_target
from specserve.tools.train.windows import Windows, masked_mean, soft_cross_entropy


class MedusaTrainer(nn.Module):
    """Hold the heads and their loss. The frozen target is not a submodule. A head's loss is the cross-entropy against
    the target's distribution at its position; the authors' code uses the text's token instead."""

    def __init__(self, target: LlamaModel, draft: MedusaHeads, decay: float) -> None:
        super().__init__()
        self._target = (target,)
        self.draft, self.levels, self.decay = draft, len(draft.heads), decay

    def unroll(self, batch: Batch, levels: int) -> Levels:
        """Run the target and up to ``levels`` heads."""
        target = self._target[0]
        hidden_TH, _ = run_target(target, batch, ())
        with torch.no_grad():
            logits_TV = target.logits(hidden_TH)
            greedy_T, probs_TV = logits_TV.argmax(-1), torch.softmax(logits_TV.float(), dim=-1)
        windows, found = Windows(batch), []
        for i in range(min(levels, self.levels)):
            logits = self.draft.scores(i, windows.columns(hidden_TH, i))
            losses, valid = soft_cross_entropy(logits, windows.labels(probs_TV, i)), windows.valid(i)
            guess, greedy = logits.detach().argmax(-1), windows.labels(greedy_T, i)
            found.append(Level(masked_mean(losses, valid), guess, greedy, valid))
        return Levels(windows, found)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        return self.unroll(batch, self.levels).total(self.decay)
