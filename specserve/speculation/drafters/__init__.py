"""Draft methods by the name users give. Nothing outside this folder may branch on a method's name."""

from __future__ import annotations

from pathlib import Path

import torch

from specserve.models.llama import LlamaModel
from specserve.speculation.context import Drafter
from specserve.speculation.drafters.eagle import EagleDrafter
from specserve.speculation.drafters.options import DraftOptions

DRAFTERS = dict.fromkeys(("EAGLE", "EAGLE3", "NEXTN", "MTP", "NAIVE_EAGLE"), EagleDrafter.load)


def load_drafter(
    name: str,
    path: Path,
    target: LlamaModel,
    layer: int,
    max_positions: int,
    dtype: torch.dtype,
    options: DraftOptions,
) -> Drafter:
    """Loads a method's weights for a target. Its KV layers start at pool layer ``layer``.

    Raises ValueError naming what does not fit.
    """
    return DRAFTERS[name](name, path, target, layer, max_positions, dtype, options)
