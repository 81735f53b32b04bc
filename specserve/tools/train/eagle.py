"""Training of an EAGLE head. Li et al. 2024, arXiv 2401.15077; several levels as in HASS, arXiv 2408.15766.

Shapes: T tokens of all rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specserve.models.draft.eagle import EagleHead
from specserve.models.llama import LlamaModel
from specserve.tools.train.attend import TestTimeAttend
from specserve.tools.train.level import Level, Levels
from specserve.tools.train.loop import Metrics
from specserve.tools.train.packing import Batch
from specserve.tools.train.target import run_target
from specserve.tools.train.windows import Windows, masked_mean, soft_cross_entropy

NOISE, NOISE_LENGTH = 0.2, 512  # width of the uniform noise on features, in rows of at most that length


class EagleTrainer(nn.Module):
    """Hold the draft and its loss. The frozen target, whose embedding and head the draft uses, is not a submodule.

    Level i's loss is ``feature_weight * SmoothL1(output, target's next feature) + ce_weight * cross-entropy`` of the
    target's head on both, averaged over the columns that count; the published head is one level.
    """

    def __init__(
        self,
        target: LlamaModel,
        draft: EagleHead,
        levels: int,
        decay: float,
        feature_weight: float = 1.0,
        ce_weight: float = 0.1,
    ) -> None:
        super().__init__()
        self._target = (target,)
        self.draft, self.levels, self.decay = draft, levels, decay
        self.feature_weight, self.ce_weight = feature_weight, ce_weight

    def _noisy(self, features_TH: Tensor, row_length: int) -> Tensor:
        if not self.training:
            return features_TH
        width = NOISE * min(1.0, NOISE_LENGTH / row_length)
        return features_TH + (torch.rand_like(features_TH) - 0.5) * width

    def unroll(self, batch: Batch, levels: int) -> Levels:
        """Run the target and ``levels`` levels of the draft."""
        target = self._target[0]
        hidden_TH, _ = run_target(target, batch, ())
        with torch.no_grad():
            logits_TV = target.logits(hidden_TH)
            greedy_T = logits_TV.argmax(-1)
            probs_TV = torch.softmax(logits_TV.float(), dim=-1)
        windows, attend = Windows(batch), TestTimeAttend(batch.packing)
        features_TH = self._noisy(self.draft.fuse(hidden_TH, []), windows.length)
        found = []
        for i in range(levels):
            features_TH = self.draft(windows.inputs(i), features_TH, batch.positions_T + i, attend)
            output = windows.columns(features_TH, i)
            logits = self.draft.logits(output)
            wanted = windows.labels(hidden_TH, i)
            distance = F.smooth_l1_loss(output.float(), wanted.float(), reduction="none").mean(-1)
            entropy = soft_cross_entropy(logits, windows.labels(probs_TV, i))
            losses = self.feature_weight * distance + self.ce_weight * entropy
            guess, greedy, valid = logits.detach().argmax(-1), windows.labels(greedy_T, i), windows.valid(i)
            found.append(Level(masked_mean(losses, valid), guess, greedy, valid))
        return Levels(windows, found)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        return self.unroll(batch, self.levels).total(self.decay)
