"""PARD: a separate model that drafts all levels in one pass, trained to see mask tokens in place of its own guesses.

An et al. 2025, arXiv 2504.18583. The pass takes the tokens emitted since the last one, ending with the root, and then a
mask token for each level but the first, at the following positions. Each level's row is that of the token before it.
The next pass overwrites the masks' cache entries. The rest is as in ``standalone``.

Shapes: B slots, S levels, V vocabulary.
"""

from __future__ import annotations

import torch
from specserve_kernels import Pool

from specserve.models.draft.pard import read_mask
from specserve.speculation.context import Context, View
from specserve.speculation.drafters.config import DrafterConfig
from specserve.speculation.drafters.standalone import StandaloneDrafter
from specserve.speculation.expand import expand_levels
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape


class PardDrafter(StandaloneDrafter):
    """Runs a model whose mask token is ``mask``."""

    mask: int

    @classmethod
    def load(cls, config: DrafterConfig) -> PardDrafter:
        """Load the model. Raises ValueError for one that does not fit or has no mask token."""
        mask = read_mask(config.path)
        drafter = super().load(config)
        assert isinstance(drafter, PardDrafter)
        drafter.mask = mask
        return drafter

    def scratch(self, shape: StepShape) -> int:
        """Return the number of entries: the root's, then one for each mask."""
        return max(shape.levels, 1)

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        window = self._window(context, view, shape, shape.levels - 1, self.mask)
        hidden_TH = self._run(window.batch)
        row_SB = torch.arange(shape.levels, device=window.root_B.device)[:, None] + window.root_B
        logits_SBV = self._scores(hidden_TH[row_SB.flatten()]).unflatten(0, row_SB.shape)
        pool = expand_levels(context, view, shape, sampling, self._vocab, logits_SBV.transpose(0, 1))
        return self._proposed(context, view, window, pool)
