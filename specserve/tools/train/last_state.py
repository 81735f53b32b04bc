"""Training of drafts that read only the target's last state, against a frozen target's distributions.

Medusa heads: Cai et al. 2024, arXiv 2401.10774 (Medusa-1). MLP speculators: Wertheimer et al. 2024, arXiv 2404.19124.

Shapes: T tokens of all rows, V vocabulary.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specserve.layers.linear import Linear
from specserve.models.base import TargetModel
from specserve.models.checkpoint import file_tensors
from specserve.models.draft.medusa import MedusaHeads
from specserve.models.draft.mlp_speculator import MLPSpeculator, SpeculatorConfig
from specserve.tools.train.export import Files
from specserve.tools.train.packing import Batch, Documents
from specserve.tools.train.target import predictions, run_target
from specserve.tools.train.trainer import Level, Levels, Trainer, Windows, masked_mean, soft_cross_entropy


class LastStateTrainer(Trainer[Any]):
    """A level's loss is the cross-entropy against the target's distribution at its position; the authors' codes use the
    text's token instead."""

    def states(self, level: int, tokens_T: Tensor, states: Tensor) -> Tensor:
        """Return the states ``[T, ...]`` that a level scores, from the text's tokens and the states of the level before
        or the target's."""
        return states

    def unroll(self, batch: Batch, levels: int) -> Levels:
        states, _ = run_target(self.target, batch, ())
        greedy_T, probs_TV = predictions(self.target, states)
        windows, found = Windows(batch), []
        for i in range(min(levels, self.levels)):
            states = self.states(i, windows.inputs(i), states)
            logits = self.draft.scores(i, windows.columns(states, i))
            losses, valid = soft_cross_entropy(logits, windows.labels(probs_TV, i)), windows.valid(i)
            guess, greedy = logits.detach().argmax(-1), windows.labels(greedy_T, i)
            found.append(Level(masked_mean(losses, valid), guess, greedy, valid))
        return Levels(windows, found)


class MLPSpeculatorTrainer(LastStateTrainer):
    """Its levels are given the text's own tokens."""

    def states(self, level: int, tokens_T: Tensor, states: Tensor) -> Tensor:
        found: Tensor = self.draft(level, tokens_T, states, torch.arange(len(states), device=states.device))
        return found


@torch.no_grad()
def medusa_trainer(args: Namespace, target: TargetModel, _: Sequence[Documents]) -> LastStateTrainer:
    """Return the trainer of Medusa heads that start with the target's own predictions."""
    heads, rows = args.medusa_heads, target.config.vocab_size
    scorers = heads if args.medusa_scores == "own" else 0
    with target.device:
        made = MedusaHeads(target, heads, args.medusa_layers, bias=True, scorers=scorers, rows=rows)
    for block in made.heads.parameters():
        block.zero_()
    for scorer in made.lm_heads:
        assert isinstance(scorer, Linear)
        scorer.weight.copy_(target.lm_head.rows(None)[0])
    return LastStateTrainer(target, made, heads, args.ttt_decay)


def medusa_files(trainer: LastStateTrainer, args: Namespace) -> Files:
    """Return the authors' files, in which head i has its blocks and then, under the number of blocks, its scorer."""
    tensors = {}
    for name, tensor in file_tensors(trainer.draft).items():
        kind, i, rest = name.split(".", 2)
        tensors[f"{i}.{rest}" if kind == "heads" else f"{i}.{args.medusa_layers}.{rest}"] = tensor
    config = {
        "base_model_name_or_path": str(args.model_path),
        "medusa_num_heads": args.medusa_heads,
        "medusa_num_layers": args.medusa_layers,
    }
    return Files(tensors, config, ("medusa_lm_head.safetensors", "medusa_lm_head.pt"))


@torch.no_grad()
def mlp_speculator_trainer(
    args: Namespace, target: TargetModel, _: Sequence[Documents]
) -> MLPSpeculatorTrainer:
    """Return the trainer of a random MLP speculator whose levels share their weights."""
    inner = args.mlp_inner or target.config.hidden_size
    with target.device:
        made = MLPSpeculator(SpeculatorConfig(args.mlp_levels, inner, tied=True, scale_input=True), target)
    for name, parameter in made.named_parameters():
        if not name.startswith("ln."):
            parameter.normal_(0, inner**-0.5)
    return MLPSpeculatorTrainer(target, made, args.mlp_levels, args.ttt_decay)


def mlp_speculator_files(trainer: MLPSpeculatorTrainer, _: Namespace) -> Files:
    """Return the configuration under IBM's names."""
    config, target = trainer.draft.config, trainer.target.config
    fields = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": target.vocab_size,
        "emb_dim": target.hidden_size,
        "inner_dim": config.inner,
        "n_predict": config.levels,
        "tie_weights": config.tied,
        "scale_input": config.scale_input,
        "n_candidates": 1,
        "top_k_tokens_per_head": [1] * config.levels,
    }
    tensors = file_tensors(trainer.draft)
    return Files({f"speculator.{name}": tensors[name] for name in tensors}, fields)
