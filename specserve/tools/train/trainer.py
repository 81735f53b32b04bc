"""What the trainers of all drafts share: a draft and its loss, and inputs, labels and results of its levels.

Shapes: B rows, S row length, T = B * S, C columns that have a label. Column t of level i reads the feature of token t
(level 0; deeper levels read their own output) and token t + 1 + i, and predicts token t + 2 + i, whose label is the
target's output at t + 1 + i.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specserve.models.base import TargetModel
from specserve.models.draft.load import Borrowed
from specserve.tools.train.loop import Metrics
from specserve.tools.train.packing import Batch
from specserve.tools.train.target import TapSizes

D = TypeVar("D", bound=nn.Module)


class Windows:
    """Inputs and labels of a batch by level."""

    def __init__(self, batch: Batch) -> None:
        self.length = batch.packing.row_length
        self.tokens_BS = batch.tokens_T.view(-1, self.length)
        self.mask_BS = batch.mask_T.view(-1, self.length)
        self.document_BS = batch.packing.documents(batch.tokens_T.shape[0]).view(-1, self.length)

    def inputs(self, level: int) -> Tensor:
        """Return the input tokens ``[T]`` of a level: the true ones, 0 past the row's end."""
        return F.pad(self.tokens_BS[:, 1 + level :], (0, 1 + level)).flatten()

    def columns(self, x: Tensor, level: int) -> Tensor:
        """Cut ``[T, ...]`` to the columns that have a label at this level, ``[B, S - 2 - level, ...]``."""
        return torch.unflatten(x, 0, (-1, self.length))[:, : self.length - 2 - level]

    def labels(self, x: Tensor, level: int) -> Tensor:
        """Return the entries of ``[T, ...]`` at t + 1 + level for those columns, ``[B, S - 2 - level, ...]``."""
        return torch.unflatten(x, 0, (-1, self.length))[:, 1 + level : self.length - 1]

    def predicted(self, level: int) -> Tensor:
        """Return the true token t + 2 + level of those columns, ``[B, S - 2 - level]``."""
        return self.tokens_BS[:, 2 + level :]

    def valid(self, level: int) -> Tensor:
        """Return where a level counts, bool ``[B, S - 2 - level]``: the root token t + 1 and the predicted one are both
        learned tokens of column t's document."""
        end = self.length - 2 - level
        same = self.document_BS[:, :end] == self.document_BS[:, 2 + level :]
        return same & self.mask_BS[:, 1 : 1 + end] & self.mask_BS[:, 2 + level :]


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of ``values`` where ``mask`` is set; 0 if it never is."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def soft_cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    """Return ``-sum(probs * log_softmax(logits))`` over the last dimension, in at least float32."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.logsumexp(-1) - (probs * logits).sum(-1)


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


class Trainer(nn.Module, ABC, Generic[D]):
    """Hold a draft and its loss. The frozen target, whose embedding and head a draft may use, is not a submodule."""

    def __init__(self, target: TargetModel, draft: D, levels: int, decay: float) -> None:
        super().__init__()
        self._target = Borrowed(target)
        self.draft, self.levels, self.decay = draft, levels, decay

    @property
    def target(self) -> TargetModel:
        return self._target.module

    @abstractmethod
    def unroll(self, batch: Batch, levels: int) -> Levels:
        """Run the target and up to ``levels`` levels of the draft."""

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        return self.unroll(batch, self.levels).total(self.decay)

    def begin(self, batch: Batch) -> None:
        """Take what scales the draft's inputs from a batch."""

    def finish(self) -> None:
        """Make what scaled the draft's inputs a part of the draft."""


class TappedTrainer(Trainer[D]):
    """Trains a draft that reads the target's states at taps."""

    def __init__(
        self, target: TargetModel, draft: D, taps: tuple[int, ...], levels: int, decay: float
    ) -> None:
        super().__init__(target, draft, levels, decay)
        self.taps, self.sizes = taps, TapSizes(len(taps), target)

    def begin(self, batch: Batch) -> None:
        self.sizes.measure(self.target, batch, self.taps)

    def finish(self) -> None:
        self.sizes.fold(self.draft.get_submodule("fc"))
