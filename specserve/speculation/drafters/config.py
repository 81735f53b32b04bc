"""What a drafter is loaded from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specserve.models.draft.fields import parse_overrides
from specserve.models.llama import LlamaModel
from specserve.speculation.dynamic_map import MapPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """``name``: the method's. ``path``: the checkpoint, for a method that has one. ``layer``: where its KV layers begin
    in the pool. It drafts only the tokens that the file ``token_map`` lists, or those that a plan's live map chooses.
    ``config_override``: a JSON object that goes before its config. ``quantization`` of its weights: none, int8 (with
    what they multiply) or fp8. ``tokenizer``: the directory of the target's."""

    name: str
    path: Path
    target: LlamaModel
    layer: int
    max_positions: int
    dtype: torch.dtype
    token_map: Path | MapPlan | None = None
    config_override: str | None = None
    quantization: str = "none"
    tokenizer: Path | None = None

    @property
    def overrides(self) -> Mapping[str, Any]:
        """The fields of ``config_override``. Raises ValueError for one that no draft has."""
        return parse_overrides(self.config_override)
