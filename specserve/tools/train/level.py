"""The outcome of the levels of training-time test on a batch. Shapes: B rows, C columns that have a label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specserve.tools.train.windows import masked_mean


@dataclass(frozen=True, slots=True)
class Level:
    """One level: its loss, the draft's and the target's greedy tokens ``[B, C]`` and where they count."""

    loss: Tensor
    guess_BC: Tensor
    greedy_BC: Tensor
    valid_BC: Tensor


class Text(Protocol):
    """What the levels guess."""

    def predicted(self, level: int) -> Tensor:
        """The true token ``[B, C]`` that each column of a level guesses."""
        ...


@dataclass(frozen=True, slots=True)
class Levels:
    """All levels of a batch, level 0 first."""

    text: Text
    levels: list[Level]

    def total(self, decay: float) -> tuple[Tensor, dict[str, Tensor]]:
        """``sum(decay^i * loss_i)``, and per level the share of columns where the draft guesses as the
        target.
        """
        total = torch.stack([decay**i * level.loss for i, level in enumerate(self.levels)]).sum()
        metrics = {}
        for i, level in enumerate(self.levels):
            metrics[f"loss_{i + 1}"] = level.loss.detach()
            right = (level.guess_BC == level.greedy_BC).float()
            metrics[f"match_{i + 1}"] = masked_mean(right, level.valid_BC)
        return total, metrics

    def accepted(self) -> tuple[list[Tensor], list[Tensor]]:
        """Per level: chains that reach it, and those of them that it continues (see ``report``)."""
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
