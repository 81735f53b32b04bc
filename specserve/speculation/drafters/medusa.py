"""Medusa: heads that guess all levels at once from the target's state before the root.

Cai et al. 2024, arXiv 2401.10774. A level's guesses depend on the prefix alone, not on the path to a node, and that
state is all it keeps: a step runs the heads once and reads no cache. The paper verifies a static tree of ranks; here
the trees of the whole batch are selected from one budget by the sums of the heads' log-probabilities.

Shapes: B slots, L levels, T target tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from specserve_kernels import Pool

from specserve.methods import DraftSettings
from specserve.models.base import TargetModel
from specserve.models.draft.fields import check_kind
from specserve.models.draft.load import LoadedDraft, load_draft
from specserve.models.draft.medusa import MedusaHeads, heads_of, open_medusa
from specserve.speculation.context import Context, View
from specserve.speculation.drafters.recurrent import LastStateDrafter
from specserve.speculation.expand import expand_levels
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape


class MedusaDrafter(LastStateDrafter):
    """Runs ``MedusaHeads``, one for each level."""

    def __init__(self, name: str, loaded: LoadedDraft[MedusaHeads], hidden_size: int) -> None:
        self.heads = loaded.module
        super().__init__(name, hidden_size, self.heads.vocab_size)
        self._vocab = loaded.vocab

    @classmethod
    def load(cls, draft: DraftSettings, target: TargetModel) -> MedusaDrafter:
        """Load the heads. Raises ValueError for heads that do not fit, and for any override."""
        check_kind(draft.config_override, draft.name)
        source, size = open_medusa(draft.path), target.config.vocab_size
        loaded = load_draft(draft, target, source, heads_of, source.ids(size))
        return cls(draft.name, loaded, target.config.hidden_size)

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        hidden_BH = context.state.slots.feature[view.slots.rows_B]
        logits_LBV = self.heads(hidden_BH, shape.levels)
        return expand_levels(context, view, shape, sampling, self._vocab, logits_LBV.transpose(0, 1))
