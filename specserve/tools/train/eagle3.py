"""Training-time test of an EAGLE-3 head. Li et al. 2025, arXiv 2503.01840.

Shapes: T tokens of all rows, H hidden size, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specserve.models.checkpoint import DTYPES
from specserve.models.draft.eagle3 import Eagle3Head
from specserve.models.llama import LlamaModel
from specserve.tools.train.attend import TestTimeAttend
from specserve.tools.train.export import Files, layer_config, layer_tensors
from specserve.tools.train.heads import HeadOptions, draft_config, spread
from specserve.tools.train.level import Level, Levels
from specserve.tools.train.packing import Batch, Documents
from specserve.tools.train.report import CHAIN
from specserve.tools.train.target import check_taps, default_taps, predictions, run_target
from specserve.tools.train.trainer import TappedTrainer
from specserve.tools.train.vocab import draft_vocabulary, membership, offsets
from specserve.tools.train.windows import Windows, masked_mean, soft_cross_entropy


class Eagle3Trainer(TappedTrainer[Eagle3Head]):
    """Holds the draft's vocabulary too.

    The loss is ``sum(decay^i * L_i)``, L_i the cross-entropy of level i against the target's distribution over the
    draft vocabulary. L_i is the mean over the columns that count (``Windows.valid``, and the target's greedy token is
    in the draft vocabulary). EAGLE's code divides by all columns instead, which only scales the learning rate.
    """

    def __init__(
        self, target: LlamaModel, draft: Eagle3Head, draft_ids: Tensor, levels: int, decay: float
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
    target: LlamaModel, options: HeadOptions, max_positions: int, draft_ids: Tensor
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


def eagle3_trainer(args: Namespace, target: LlamaModel, data: Sequence[Documents]) -> Eagle3Trainer:
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
