"""Training-time test of an EAGLE-3 head. Li et al. 2025, arXiv 2503.01840.

Shapes: T tokens of all rows, H hidden size, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specserve.models.draft.eagle3 import Eagle3Head
from specserve.models.llama import LlamaModel
from specserve.tools.train.attend import TestTimeAttend
from specserve.tools.train.level import Level, Levels
from specserve.tools.train.loop import Metrics
from specserve.tools.train.packing import Batch
from specserve.tools.train.target import TapSizes, run_target
from specserve.tools.train.vocab import membership
from specserve.tools.train.windows import Windows, masked_mean, soft_cross_entropy


class Eagle3Trainer(nn.Module):
    """Hold the draft, its vocabulary and its loss. The frozen target is not a submodule.

    The loss is ``sum(decay^i * L_i)``, L_i the cross-entropy of level i against the target's distribution over the
    draft vocabulary. L_i is the mean over the columns that count (``Windows.valid``, and the target's greedy token is
    in the draft vocabulary). EAGLE's code divides by all columns instead, which only scales the learning rate.
    """

    def __init__(
        self, target: LlamaModel, draft: Eagle3Head, draft_ids: Tensor, levels: int, decay: float
    ) -> None:
        super().__init__()
        self._target = (target,)
        self.draft, self.levels, self.decay = draft, levels, decay
        self.sizes = TapSizes(len(draft.config.taps), target)
        self.register_buffer("draft_ids", draft_ids)
        self.register_buffer("inside", membership(draft_ids, target.config.vocab_size))
        self.draft_ids: Tensor
        self.inside: Tensor

    def unroll(self, batch: Batch, levels: int) -> Levels:
        """Run the target and ``levels`` levels of the draft."""
        target = self._target[0]
        hidden_TH, tapped = run_target(target, batch, self.draft.config.taps)
        with torch.no_grad():
            logits_TV = target.logits(hidden_TH)
            greedy_T = logits_TV.argmax(-1)
            probs_TV = torch.softmax(logits_TV[:, self.draft_ids].float(), dim=-1)
        windows, attend = Windows(batch), TestTimeAttend(batch.packing)
        features_TH = self.draft.fuse(hidden_TH, self.sizes(tapped))
        found = []
        for i in range(levels):
            features_TH = self.draft(windows.inputs(i), features_TH, batch.positions_T + i, attend)
            logits = windows.columns(self.draft.logits(features_TH), i)
            greedy = windows.labels(greedy_T, i)
            losses = soft_cross_entropy(logits, windows.labels(probs_TV, i))
            guess = self.draft_ids[logits.detach().argmax(-1)]
            learned = windows.valid(i) & self.inside[greedy]
            found.append(Level(masked_mean(losses, learned), guess, greedy, windows.valid(i)))
        return Levels(windows, found)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        return self.unroll(batch, self.levels).total(self.decay)
