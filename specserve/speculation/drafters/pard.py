"""PARD: a separate model that drafts all levels in one pass, trained to see mask tokens in place of its own guesses.

An et al. 2025, arXiv 2504.18583. A step's only pass is that of ``catch_up``, with masks. All else is as in
``standalone``.
"""

from __future__ import annotations

from specserve_kernels import Pool

from specserve.methods import DraftSettings
from specserve.models.draft.pard import read_mask
from specserve.models.llama import LlamaModel
from specserve.speculation.context import Context, View
from specserve.speculation.drafters.standalone import StandaloneDrafter
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape


class PardDrafter(StandaloneDrafter):
    """Runs a model whose mask token is ``mask``."""

    mask: int

    @classmethod
    def load(cls, draft: DraftSettings, target: LlamaModel) -> PardDrafter:
        """Load the model. Raises ValueError for one that does not fit or has no mask token."""
        mask = read_mask(draft.path)
        drafter = super().load(draft, target)
        assert isinstance(drafter, PardDrafter)
        drafter.mask = mask
        return drafter

    def scratch(self, shape: StepShape) -> int:
        """Return the number of entries: the root's, then one for each mask."""
        return max(shape.levels, 1)

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        return self._propose_levels(context, view, shape, sampling, self.mask)
