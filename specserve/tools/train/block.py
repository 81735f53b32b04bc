"""Training of block drafts: DFlash, arXiv 2602.06036, and DSpark, arXiv 2607.05147.

Blocks begin at anchors: columns drawn anew for each batch. As in drafting, a block attends to the tokens before its
anchor in its document, and to itself. Levels read the text's own tokens.

Shapes: B rows, S row length, A anchors a row, X = B * A blocks, K tokens of a block, T tokens of all rows, H hidden
size, V vocabulary.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.layers.rotary import Rope
from specserve.models.base import TargetModel
from specserve.models.checkpoint import DTYPES, file_tensors
from specserve.models.config import ModelConfig
from specserve.models.draft.block import BlockConfig, BlockHead
from specserve.tools.train.attend import BlockAttend
from specserve.tools.train.export import Files, layer_config
from specserve.tools.train.heads import HeadOptions, draft_config, spread, unused_token
from specserve.tools.train.packing import Batch, Documents
from specserve.tools.train.target import check_block_taps, default_block_taps, predictions, run_target
from specserve.tools.train.trainer import Level, Levels, TappedTrainer, masked_mean, soft_cross_entropy

log = logging.getLogger("specserve.tools.train")


@dataclass(frozen=True, slots=True)
class Anchored:
    """A batch as blocks. ``token_XL``: the anchor's token and those after it. ``column_XL``: their indices in the
    batch, clamped to the row's last. ``valid_XL``: level i counts, because the anchor and the guessed token are both
    learned tokens of one document."""

    anchor_BA: Tensor
    column_XL: Tensor
    token_XL: Tensor
    valid_XL: Tensor

    def predicted(self, level: int) -> Tensor:
        """Return the true token ``[X, 1]`` that a level guesses."""
        return self.token_XL[:, level + 1, None]


def draw_anchors(batch: Batch, count: int, levels: int, training: bool) -> Anchored:
    """Draw up to ``count`` anchors per row among the columns whose first level counts; the draw is random only if
    ``training``."""
    length = batch.packing.row_length
    mask_BS = batch.mask_T.view(-1, length)
    document_BS = batch.packing.documents(len(batch.tokens_T)).view(-1, length)
    here_BS = mask_BS[:, :-1] & mask_BS[:, 1:] & (document_BS[:, :-1] == document_BS[:, 1:])
    generator = None if training else torch.Generator(mask_BS.device).manual_seed(0)
    drawn_BS = torch.rand(here_BS.shape, generator=generator, device=here_BS.device)
    anchor_BA = drawn_BS.masked_fill(~here_BS, -1).topk(min(count, length - 1)).indices
    first_B1 = torch.arange(len(mask_BS), device=anchor_BA.device)[:, None] * length
    ahead_L = torch.arange(levels + 1, device=anchor_BA.device)
    place_XL = anchor_BA.flatten()[:, None] + ahead_L
    column_XL = (first_B1 + anchor_BA).flatten()[:, None] + ahead_L
    column_XL = column_XL - (place_XL - (length - 1)).clamp(min=0)
    document_T = document_BS.flatten()
    learned_XL = batch.mask_T[column_XL] & (place_XL < length)
    same_XL = document_T[column_XL] == document_T[column_XL[:, :1]]
    valid_XL = (learned_XL & same_XL)[:, 1:] & learned_XL[:, :1] & here_BS.gather(1, anchor_BA).view(-1, 1)
    return Anchored(anchor_BA, column_XL, batch.tokens_T[column_XL], valid_XL)


class BlockTrainer(TappedTrainer[BlockHead]):
    """A level's loss is ``ce_weight * cross-entropy + (1 - ce_weight) * L1`` against the target's distribution,
    averaged over the blocks in which it counts. A confidence head adds its binary cross-entropy against the share of
    guesses that would be accepted, ``1 - L1 / 2``.
    """

    def __init__(
        self, target: TargetModel, draft: BlockHead, anchors: int, decay: float, ce_weight: float
    ) -> None:
        super().__init__(target, draft, draft.config.taps, draft.config.levels, decay)
        self._anchors, self._ce_weight = anchors, ce_weight

    def unroll(self, batch: Batch, levels: int) -> Levels:
        target, draft, config = self.target, self.draft, self.draft.config
        levels = min(levels, config.levels)
        hidden_TH, tapped = run_target(target, batch, self.taps)
        anchored = draw_anchors(batch, self._anchors, levels, self.training)
        states_XLH = self._blocks(batch, anchored, self.sizes(tapped))
        memory_XR: Tensor | None = None
        found = []
        for i in range(levels):
            states_XH, before_X = states_XLH[:, i], anchored.token_XL[:, i]
            greedy_X, probs_XV = predictions(target, hidden_TH[anchored.column_XL[:, i]])
            logits_XV, memory_XR = draft.correct(draft.logits(states_XH), before_X, states_XH, memory_XR)
            losses_X = self._losses(logits_XV, probs_XV, before_X, states_XH)
            valid_X = anchored.valid_XL[:, i]
            guess_X = logits_XV.detach().argmax(-1)
            loss = masked_mean(losses_X, valid_X)
            found.append(Level(loss, guess_X[:, None], greedy_X[:, None], valid_X[:, None]))
        return Levels(anchored, found)

    def _blocks(self, batch: Batch, anchored: Anchored, tapped: list[Tensor]) -> Tensor:
        """Return the states ``[X, levels, H]``."""
        draft, size = self.draft, self.draft.config.block_size
        past = draft.project_kv(draft.past(tapped))
        attend = BlockAttend(
            batch.packing, anchored.anchor_BA, size, past, Rope(draft.rope_P2R, batch.positions_T)
        )
        ahead_K = torch.arange(size, device=batch.tokens_T.device)
        position_N = (anchored.anchor_BA.flatten()[:, None] + ahead_K).flatten()
        return draft.scored(draft(anchored.token_XL[:, 0], position_N, attend))

    def _losses(self, logits_XV: Tensor, probs_XV: Tensor, before_X: Tensor, states_XH: Tensor) -> Tensor:
        losses_X = self._ce_weight * soft_cross_entropy(logits_XV, probs_XV)
        if self._ce_weight == 1 and not self.draft.config.confidence:
            return losses_X
        apart_X = (torch.softmax(logits_XV.float(), -1) - probs_XV).abs().sum(-1)
        losses_X = losses_X + (1 - self._ce_weight) * apart_X
        if self.draft.config.confidence:
            odds_X = self.draft.confidence(before_X, states_XH).float()
            accepted_X = (1 - apart_X.detach() / 2).clamp(0, 1)
            losses_X = losses_X + F.binary_cross_entropy_with_logits(odds_X, accepted_X, reduction="none")
        return losses_X


@torch.no_grad()
def block_trainer(
    args: Namespace, target: TargetModel, data: Sequence[Documents], *, size: int, markov: bool
) -> BlockTrainer:
    """Return the trainer of a DFlash draft, or with ``markov`` of a DSpark draft with a confidence head. ``size``: of a
    block by default. The norm starts as the target's, with scores of deviation 1, the Markov head's output as 0, the
    rest random."""
    size, vocab = args.block_size or size, target.config.vocab_size
    mask = unused_token(data, vocab) if args.mask_token is None else args.mask_token
    if size < 2 or not 0 <= mask < vocab:
        raise ValueError(
            f"--block-size must be at least 2, --mask-token from 0 to {vocab - 1}; found {size} and {mask}"
        )
    log.info("blocks of %d tokens, mask token %d", size, mask)
    config = _config(args, target.config, size, mask, markov)
    with target.device:
        head = BlockHead(config, 0, args.max_length + size, target)
    norm = target.norm.weight
    head.norm.weight.copy_(norm / spread(target.lm_head.rows(None)[0] * norm))
    if markov:
        head.markov_head.markov_w2.weight.zero_()
    anchors = args.anchors or max(1, args.max_length // 8)
    return BlockTrainer(target, head, anchors, args.ttt_decay, args.ce_weight if markov else 1.0)


def _config(args: Namespace, target: ModelConfig, size: int, mask: int, markov: bool) -> BlockConfig:
    options, vocab, rank = HeadOptions.of(args), target.vocab_size, args.markov_rank if markov else 0
    base = draft_config(target, options, 1, vocab)
    taps = options.taps or default_block_taps(target.num_layers)
    check_block_taps(taps, target.num_layers)
    return BlockConfig(
        layer=replace(base.layer, qk_norm=True),
        num_layers=args.draft_layers,
        rope=base.rope,
        taps=taps,
        block_size=size,
        mask_id=mask,
        after=markov,
        levels=size - (not markov),
        draft_vocab_size=vocab,
        correction=args.markov_head if markov else None,
        rank=rank,
        confidence=base.layer.hidden_size + rank if markov else 0,
    )


def block_files(trainer: BlockTrainer, args: Namespace) -> Files:
    draft, dtype = trainer.draft, DTYPES[args.export_dtype]
    return Files(file_tensors(draft), block_config(draft.config, trainer.target.config, dtype))


def block_config(config: BlockConfig, target: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return z-lab's config for DFlash, or SpecForge's for DSpark, which adds fields of the heads."""
    dspark = {
        "projector_type": "dspark",
        "markov_rank": config.rank,
        "markov_head_type": config.correction,
        "enable_confidence_head": True,
        "confidence_head_with_markov": config.confidence > config.layer.hidden_size,
    }
    return {
        **layer_config(config, target, dtype),
        "architectures": ["DSparkDraftModel" if config.correction else "DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": config.num_layers,
        "num_target_layers": target.num_layers,
        "layer_types": ["full_attention"] * config.num_layers,
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_id,
            "target_layer_ids": [tap - 1 for tap in config.taps],
            "block_size": config.block_size,
            **(dspark if config.correction else {}),
        },
    }
