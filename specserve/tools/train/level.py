"""Results of the levels of training-time test on a batch. Shapes: B rows, C columns that have a label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specserve.tools.train.windows import masked_mean


@dataclass(frozen=True, slots=True)
class Level:
    """One level: its loss, the greedy tokens of draft and target ``[B, C]``, and where they count."""

    loss: Tensor
    guess_BC: Tensor
    greedy_BC: Tensor
    valid_BC: Tensor


class Text(Protocol):
    """The tokens that the levels guess."""

    def predicted(self, level: int) -> Tensor:
        """Return the true token ``[B, C]`` that each column of a level guesses."""
        ...


@dataclass(frozen=True, slots=True)
class Levels:
    """All levels of a batch, level 0 first."""

    text: Text
    levels: list[Level]

    def total(self, decay: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Return ``sum(decay^i * loss_i)``, and metrics: each level's loss and its share of columns where the draft's
        guess is the target's."""
        total = torch.stack([decay**i * level.loss for i, level in enumerate(self.levels)]).sum()
        metrics = {}
        for i, level in enumerate(self.levels):
            metrics[f"loss_{i + 1}"] = level.loss.detach()
            right = (level.guess_BC == level.greedy_BC).float()
            metrics[f"match_{i + 1}"] = masked_mean(right, level.valid_BC)
        return total, metrics

    def accepted(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return, per level, the chains that reach it and those that it continues (see ``report``)."""
        reached, kept = [], []
        alive_BC: Tensor | None = None
        for i, level in enumerate(self.levels):
            width = level.valid_BC.shape[1]
            here_BC = level.valid_BC if alive_BC is None else level.valid_BC & alive_BC[:, :width]
            right_BC = here_BC & (level.guess_BC == level.greedy_BC)
            reached.append(here_BC.sum())
            kept.append(right_BC.sum())
            alive_BC = right_BC & (self.text.predicted(i) == level.greedy_BC)
        return reached, kept
