"""PARD: a separate model that drafts all levels in one pass, trained to see mask tokens in place of its own guesses.

An et al. 2025, arXiv 2504.18583. A step's only pass is that of ``window``, with masks. All else is as in
``standalone``.
"""

from __future__ import annotations

from pathlib import Path

from specserve_kernels import Pool

from specserve.methods import DraftSettings
from specserve.models.base import TargetModel
from specserve.models.config import COUNT, check, read_json
from specserve.speculation.context import Context, View
from specserve.speculation.drafters.standalone import StandaloneDrafter
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape

MOST_LEVELS = 16  # published models were trained for 8 to 12; a slot has at most 64 rows of a pass


def read_mask(path: Path) -> int:
    """Return the mask token of a checkpoint. Raises ValueError naming file and field if there is none."""
    file = path / "config.json"
    config = read_json(file)
    check(config, file, COUNT, "vocab_size")
    mask, kind = config.get("pard_token"), config.get("spd_type")
    if type(mask) is not int or not 0 <= mask < config["vocab_size"]:
        raise ValueError(
            f"{file}: pard_token must be a token id of the model, found {mask}: PARD needs a model that was trained "
            "with one; for others with the target's tokens use --speculative-algorithm STANDALONE"
        )
    if kind not in (None, "pard"):
        raise ValueError(f"{file}: spd_type must be pard, found {kind}")
    return mask


def count_levels(path: Path) -> int:
    """Return the most levels that are drafted."""
    read_mask(path)
    return MOST_LEVELS


class PardDrafter(StandaloneDrafter):
    """Runs a model whose mask token is ``mask``."""

    mask: int

    @classmethod
    def load(cls, draft: DraftSettings, target: TargetModel) -> PardDrafter:
        """Load the model. Raises ValueError for one that does not fit or has no mask token."""
        mask = read_mask(draft.path)
        drafter = super().load(draft, target)
        assert isinstance(drafter, PardDrafter)
        drafter.mask = mask
        return drafter

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        return self._propose_levels(context, view, shape, sampling, self.mask)
