"""Drafters, one file each; ``specserve.methods`` says which method loads which."""

from __future__ import annotations

from specserve.methods import DraftSettings, named
from specserve.models.base import TargetModel
from specserve.speculation.context import Drafter


def load_drafter(draft: DraftSettings, target: TargetModel) -> Drafter:
    """Load a method's drafter for a target. Raises ValueError naming what does not fit."""
    drafter: Drafter = named(draft.method.load)(draft, target)
    return drafter
