"""What the trainers of all drafts share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from torch import Tensor, nn

from specserve.models.llama import LlamaModel
from specserve.tools.train.levels import Levels
from specserve.tools.train.loop import Metrics
from specserve.tools.train.packing import Batch
from specserve.tools.train.target import TapSizes

D = TypeVar("D", bound=nn.Module)


class Trainer(nn.Module, ABC, Generic[D]):
    """Hold a draft and its loss. The frozen target, whose embedding and head a draft may use, is not a submodule."""

    def __init__(self, target: LlamaModel, draft: D, levels: int, decay: float) -> None:
        super().__init__()
        self._target = (target,)
        self.draft, self.levels, self.decay = draft, levels, decay

    @property
    def target(self) -> LlamaModel:
        return self._target[0]

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
        self, target: LlamaModel, draft: D, taps: tuple[int, ...], levels: int, decay: float
    ) -> None:
        super().__init__(target, draft, levels, decay)
        self.taps, self.sizes = taps, TapSizes(len(taps), target)

    def begin(self, batch: Batch) -> None:
        self.sizes.measure(self.target, batch, self.taps)

    def finish(self) -> None:
        self.sizes.fold(self.draft.get_submodule("fc"))
