"""Medusa: heads that guess all levels at once from the target's state before the root.

Cai et al. 2024, arXiv 2401.10774. A level's guesses depend on the prefix alone, not on the path to a node, and that
state is all it keeps: a step runs the heads once and reads no cache. The paper verifies a static tree of ranks; here
the trees of the whole batch are selected from one budget by the sums of the heads' log-probabilities.

Shapes: B slots, L levels, T target tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import logging

from specserve_kernels import Pool

from specserve.models.draft.medusa import MedusaHeads, load_medusa
from specserve.speculation.context import Context, View
from specserve.speculation.drafters.config import DrafterConfig
from specserve.speculation.drafters.last_state import LastStateDrafter
from specserve.speculation.expand import expand_levels
from specserve.speculation.sampler import Sampling, VocabMap
from specserve.speculation.shape import StepShape

log = logging.getLogger(__name__)


class MedusaDrafter(LastStateDrafter):
    """Runs ``MedusaHeads``, one for each level."""

    def __init__(self, name: str, heads: MedusaHeads, hidden_size: int, vocab: VocabMap | None) -> None:
        super().__init__(name, hidden_size)
        self.heads = heads
        self._vocab = vocab

    @classmethod
    def load(cls, config: DrafterConfig) -> MedusaDrafter:
        """Load the heads. Raises ValueError for heads that do not fit."""
        heads, ids, notes = load_medusa(
            config.path, config.target, config.dtype, config.quantization, config.overrides
        )
        for note in notes:
            log.info("%s", note)
        size = config.target.config.vocab_size
        vocab = None if ids is None else VocabMap.of(ids.to(config.target.device), size)
        return cls(config.name, heads, config.target.config.hidden_size, vocab)

    @property
    def vocab_size(self) -> int:
        return self.heads.vocab_size

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        hidden_BH = context.state.slots.feature[view.slots.rows_B]
        logits_LBV = self.heads(hidden_BH, shape.levels)
        return expand_levels(context, view, shape, sampling, self._vocab, logits_LBV.transpose(0, 1))
