"""Training of EAGLE and EAGLE-3 heads. Li et al. 2024, arXiv 2401.15077, several levels as in HASS, arXiv 2408.15766;
Li et al. 2025, arXiv 2503.01840.

Shapes: T tokens of all rows, H hidden size, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.models.base import TargetModel
from specserve.models.checkpoint import DTYPES
from specserve.models.draft.eagle import EagleHead
from specserve.models.draft.eagle3 import Eagle3Head
from specserve.tools.train.attend import TestTimeAttend
from specserve.tools.train.export import Files, layer_config, layer_tensors
from specserve.tools.train.heads import (
    HeadOptions,
    draft_config,
    draft_vocabulary,
    membership,
    offsets,
    spread,
)
from specserve.tools.train.packing import Batch, Documents
from specserve.tools.train.report import CHAIN
from specserve.tools.train.target import check_taps, default_taps, predictions, run_target
from specserve.tools.train.trainer import (
    Level,
    Levels,
    TappedTrainer,
    Trainer,
    Windows,
    masked_mean,
    soft_cross_entropy,
)

NOISE, NOISE_LENGTH = 0.2, 512  # width of the uniform noise on features, in rows of at most that length


class EagleTrainer(Trainer[EagleHead]):
    """Level i's loss is ``feature_weight * SmoothL1(output, target's next feature) + ce_weight * cross-entropy`` of the
    target's head on both, averaged over the columns that count; the published head is one level.
    """

    def __init__(
        self,
        target: TargetModel,
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
def make_eagle(target: TargetModel, options: HeadOptions, max_positions: int) -> EagleHead:
    """Return a random EAGLE head on the target's device, in float32. ``fc`` starts such that embedding and feature
    count alike and scores have a deviation of about 1."""
    config = draft_config(target.config, options, 1, target.config.vocab_size)
    with target.device:
        head = EagleHead(config, 0, max_positions, target.embed_tokens, target.lm_head)
    embed, feature = target.embed_tokens, target.norm.weight.norm()
    size = spread(target.lm_head.rows(None)[0]) * (3 * config.layer.hidden_size) ** -0.5
    for columns, of in zip(
        head.fc.get_parameter("weight").chunk(2, 1),
        (spread(embed.weight) * embed.scale, feature),
        strict=True,
    ):
        columns.div_(of * size)
    return head


def eagle_trainer(args: Namespace, target: TargetModel, _: Sequence[Documents]) -> EagleTrainer:
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


class Eagle3Trainer(TappedTrainer[Eagle3Head]):
    """Holds the draft's vocabulary too.

    The loss is ``sum(decay^i * L_i)``, L_i the cross-entropy of level i against the target's distribution over the
    draft vocabulary. L_i is the mean over the columns that count (``Windows.valid``, and the target's greedy token is
    in the draft vocabulary). EAGLE's code divides by all columns instead, which only scales the learning rate.
    """

    def __init__(
        self, target: TargetModel, draft: Eagle3Head, draft_ids: Tensor, levels: int, decay: float
    ) -> None:
        super().__init__(target, draft, draft.config.taps, levels, decay)
        self.register_buffer("draft_ids", draft_ids)
        self.register_buffer("inside", membership(draft_ids, target.config.vocab_size))
        self.draft_ids: Tensor
        self.inside: Tensor

    def unroll(self, batch: Batch, levels: int) -> Levels:
        target = self.target
        hidden_TH, tapped = run_target(target, batch, self.taps)
        greedy_T, probs_TV = predictions(target, hidden_TH, self.draft_ids)
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


@torch.no_grad()
def make_eagle3(
    target: TargetModel, options: HeadOptions, max_positions: int, draft_ids: Tensor
) -> Eagle3Head:
    """Return an EAGLE-3 head on the target's device, in float32. Its output head starts as the target's, times the
    target's norm, with scores of deviation 1; the rest starts random."""
    taps = options.taps or default_taps(target.config.num_layers)
    check_taps(taps, target.config.num_layers)
    config = replace(draft_config(target.config, options, 2, len(draft_ids)), taps=taps)
    with target.device:
        head = Eagle3Head(config, 0, max_positions, target.embed_tokens)
    rows_VH = target.lm_head.rows(draft_ids)[0] * target.norm.weight
    head.lm_head.rows(None)[0].copy_(rows_VH / spread(rows_VH))
    return head


def eagle3_trainer(args: Namespace, target: TargetModel, data: Sequence[Documents]) -> Eagle3Trainer:
    levels, vocab = args.ttt_length or 7, target.config.vocab_size
    ids = draft_vocabulary(data, vocab, args.draft_vocab_size or min(32000, vocab)).to(target.device)
    draft = make_eagle3(target, HeadOptions.of(args), args.max_length + max(levels, CHAIN), ids)
    return Eagle3Trainer(target, draft, ids, levels, args.ttt_decay)


def eagle3_files(trainer: Eagle3Trainer, args: Namespace) -> Files:
    """Return ``fc``, ``midlayer``, ``norm``, ``lm_head``, the offsets ``d2t`` and the mask ``t2d``.

    Aux layer ids are boundaries: k is the input of layer k. They appear twice: SGLang reads them in ``eagle_config``,
    vLLM at the top, where it would otherwise take a default and accept next to nothing."""
    ids, config = trainer.draft_ids, trainer.draft.config
    maps = {"d2t": offsets(ids), "t2d": membership(ids, config.target_vocab_size)}
    taps = list(config.taps)
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_config(config, trainer.target.config, DTYPES[args.export_dtype]),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": taps,
        },
        "eagle_aux_hidden_state_layer_ids": taps,
    }
    return Files({**layer_tensors(trainer.draft, "midlayer."), **maps}, fields)
