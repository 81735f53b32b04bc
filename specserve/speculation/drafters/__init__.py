"""Drafters, one file each; ``specserve.methods`` says which method loads which."""

from __future__ import annotations

from specserve.methods import DraftSettings, named
from specserve.models.llama import LlamaModel
from specserve.speculation.context import Drafter


def load_drafter(draft: DraftSettings, target: LlamaModel) -> Drafter:
    """Load a method's drafter for a target. Raises ValueError naming what does not fit."""
    drafter: Drafter = named(draft.method.load)(draft, target)
    return drafter
