"""Drafters, one file each; ``specserve.methods`` says which method loads which."""

from __future__ import annotations

from specserve.methods import method_of, named
from specserve.speculation.context import Drafter
from specserve.speculation.drafters.config import DrafterConfig


def load_drafter(config: DrafterConfig) -> Drafter:
    """Load a method's drafter for a target. Raises ValueError naming what does not fit."""
    method = method_of(config.name)
    assert method is not None
    drafter: Drafter = named(method.load)(config)
    return drafter
