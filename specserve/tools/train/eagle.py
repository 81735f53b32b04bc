"""Training of an EAGLE head. Li et al. 2024, arXiv 2401.15077; several levels as in HASS, arXiv 2408.15766.

Shapes: T tokens of all rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.models.checkpoint import DTYPES
from specserve.models.draft.eagle import EagleHead
from specserve.models.llama import LlamaModel
from specserve.tools.train.attend import TestTimeAttend
from specserve.tools.train.export import Files, layer_config, layer_tensors
from specserve.tools.train.heads import HeadOptions, draft_config, spread
from specserve.tools.train.level import Level, Levels
from specserve.tools.train.packing import Batch, Documents
from specserve.tools.train.report import CHAIN
from specserve.tools.train.target import predictions, run_target
from specserve.tools.train.trainer import Trainer
from specserve.tools.train.windows import Windows, masked_mean, soft_cross_entropy

NOISE, NOISE_LENGTH = 0.2, 512  # width of the uniform noise on features, in rows of at most that length


class EagleTrainer(Trainer[EagleHead]):
    """Level i's loss is ``feature_weight * SmoothL1(output, target's next feature) + ce_weight * cross-entropy`` of the
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
        super().__init__(target, draft, levels, decay)
        self.feature_weight, self.ce_weight = feature_weight, ce_weight

    def _noisy(self, features_TH: Tensor, row_length: int) -> Tensor:
        if not self.training:
            return features_TH
        width = NOISE * min(1.0, NOISE_LENGTH / row_length)
        return features_TH + (torch.rand_like(features_TH) - 0.5) * width

    def unroll(self, batch: Batch, levels: int) -> Levels:
        target = self.target
        hidden_TH, _ = run_target(target, batch, ())
        greedy_T, probs_TV = predictions(target, hidden_TH)
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


@torch.no_grad()
def make_eagle(target: LlamaModel, options: HeadOptions, max_positions: int) -> EagleHead:
    """Return a random EAGLE head on the target's device, in float32. ``fc`` starts such that embedding and feature
    count alike and scores have a deviation of about 1."""
    config = draft_config(target.config, options, 1, target.config.vocab_size)
    with target.device:
        head = EagleHead(config, 0, max_positions, target.embed_tokens, target.lm_head)
    embedding, feature = spread(target.embed_tokens.weight), target.norm.weight.norm()
    size = spread(target.lm_head.rows(None)[0]) * (3 * config.layer.hidden_size) ** -0.5
    for columns, of in zip(head.fc.get_parameter("weight").chunk(2, 1), (embedding, feature), strict=True):
        columns.div_(of * size)
    return head


def eagle_trainer(args: Namespace, target: LlamaModel, _: Sequence[Documents]) -> EagleTrainer:
    levels = args.ttt_length or 3
    draft = make_eagle(target, HeadOptions.of(args), args.max_length + max(levels, CHAIN))
    return EagleTrainer(target, draft, levels, args.ttt_decay, args.feature_weight, args.ce_weight)


def eagle_files(trainer: EagleTrainer, args: Namespace) -> Files:
    """Return ``fc``, ``layers.0`` without an input norm, and a copy of the target's embedding."""
    draft, target = trainer.draft, trainer.target
    config = layer_config(draft.config, target.config, DTYPES[args.export_dtype])
    embedding = target.embed_tokens.weight.detach()
    return Files(
        {"embed_tokens.weight": embedding, **layer_tensors(draft, "layers.0.")},
        {"architectures": ["LlamaForCausalLMEagle"], **config},
    )
