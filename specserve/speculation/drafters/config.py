"""The settings that a drafter is loaded with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specserve.methods import Lookahead
from specserve.models.draft.fields import parse_overrides
from specserve.models.llama import LlamaModel
from specserve.speculation.dynamic_map import MapPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """``name``: the method. ``path``: the checkpoint, if the method has one. ``layer``: the pool index of its first KV
    layer. ``token_map``: a file of the only tokens to draft, or the plan of a dynamic map. ``config_override``: a JSON
    object that overrides fields of its config. ``quantization`` of its weights: none, int8 (with int8 activations) or
    fp8. ``tokenizer``: the directory of the target's tokenizer. ``lookahead``: its sizes, for the method that has
    them."""

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
    lookahead: Lookahead | None = None

    @property
    def overrides(self) -> Mapping[str, Any]:
        """The fields of ``config_override``. Raises ValueError for a field that no draft has."""
        return parse_overrides(self.config_override)
