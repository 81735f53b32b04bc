"""What a user may say of a draft."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specserve.speculation.dynamic_map import MapPlan


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """It drafts only the tokens that the file ``token_map`` lists, or those that a plan's live map chooses;
    ``config_override``: a JSON object that goes before its config; ``quantization`` of its weights:
    none, int8 (with what they multiply) or fp8."""

    token_map: Path | MapPlan | None = None
    config_override: str | None = None
    quantization: str = "none"
