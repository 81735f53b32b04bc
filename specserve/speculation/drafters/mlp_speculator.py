"""IBM's MLP speculator and Snowflake's Arctic LSTM: small recurrent networks over the target's state and their own
drafts.

Wertheimer et al. 2024, arXiv 2404.19124. They start from the state before the root. A level is a few matrix products
with weights of its own, so the checkpoint limits the number of levels. There is no cache.

Shapes: N nodes of a level, X rows of states, H their size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from specserve_kernels import Level, Pool
from torch import Tensor

from specserve.models.draft.arctic_lstm import ArcticLSTM, load_arctic
from specserve.models.draft.mlp_speculator import MLPSpeculator, load_speculator
from specserve.speculation.context import Context, View
from specserve.speculation.drafters.config import DrafterConfig
from specserve.speculation.drafters.last_state import LastStateDrafter
from specserve.speculation.expand import expand
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape

log = logging.getLogger(__name__)

Reads = Callable[..., tuple[MLPSpeculator | ArcticLSTM, list[str]]]


class MLPDrafter(LastStateDrafter):
    """Runs an ``MLPSpeculator``, one layer for each level."""

    reads: Reads = staticmethod(load_speculator)

    def __init__(self, name: str, speculator: MLPSpeculator | ArcticLSTM, hidden_size: int) -> None:
        super().__init__(name, hidden_size)
        self._speculator = speculator

    @classmethod
    def load(cls, config: DrafterConfig) -> MLPDrafter:
        """Load the speculator. Raises ValueError for one that does not fit."""
        speculator, notes = cls.reads(
            config.path, config.target, config.dtype, config.quantization, config.overrides
        )
        for note in notes:
            log.info("%s", note)
        return cls(config.name, speculator, config.target.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return self._speculator.vocab_size

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        states_XH = context.state.slots.feature

        def forward(level: Level, depth: int) -> Tensor:
            nonlocal states_XH
            states_XH = self._speculator(depth, level.token_N, states_XH, level.source_N)
            return self._speculator.scores(depth, states_XH)

        return expand(context, view, shape, sampling, None, forward)


class ArcticLSTMDrafter(MLPDrafter):
    """Runs an ``ArcticLSTM``, at most as deep as it was trained to draft."""

    reads: Reads = staticmethod(load_arctic)
