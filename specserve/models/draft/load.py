"""Load published draft heads: EAGLE (1 and 2), EAGLE-3, P-EAGLE and MiMo's MTP.

Anything that does not fit the target raises a ValueError that names the file, the tensor or field, and what is
expected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specserve.models.checkpoint import building, file_tensors, load_parameters
from specserve.models.draft.block_source import check_window
from specserve.models.draft.eagle import EagleHead
from specserve.models.draft.eagle3 import Eagle3Head
from specserve.models.draft.mtp import MTPHead
from specserve.models.draft.p_eagle import PEagleHead
from specserve.models.draft.reader import Eagle3Reading, open_draft
from specserve.models.llama import LlamaModel

Head = EagleHead | Eagle3Head | MTPHead
_HEADS: dict[str, Callable[..., Head]] = {
    "EAGLE": EagleHead,
    "EAGLE3": Eagle3Head,
    "MTP": MTPHead,
    "P_EAGLE": PEagleHead,
}


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """``ids``: the target ids of the draft vocabulary, on the CPU; None if it is the target's. ``notes``: the choices
    made."""

    head: Head
    ids: Tensor | None
    notes: list[str]


def load_draft(
    path: Path,
    algorithm: str,
    target: LlamaModel,
    layer: int,
    max_positions: int,
    dtype: torch.dtype,
    overrides: Mapping[str, Any] | None = None,
) -> LoadedDraft:
    """Load the head at ``path`` for ``algorithm``, to run as pool layer ``layer``. ``overrides`` replace fields of its
    config."""
    reading = open_draft(path, algorithm, overrides or {}, target.config)
    source, config = reading.source, reading.config()
    if reading.kind == "P_EAGLE":
        check_window(source.config, source.config_file, max_positions)
    own = isinstance(reading, Eagle3Reading) and (config.tied or "lm_head.weight" in source)
    lm_head = None if own else target.lm_head
    with building(dtype, target.device):
        head = _HEADS[reading.kind](config, layer, max_positions, target.embed_tokens, lm_head)
    load_parameters(head, source.files, source.stored)
    source.note_unread(file_tensors(head))
    if isinstance(head, MTPHead):
        head.read_embedding_first()
    return LoadedDraft(head, reading.ids, source.notes)
