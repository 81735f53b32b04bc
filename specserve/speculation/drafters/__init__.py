"""Drafters, one file each; ``specserve.methods`` says which method loads which."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter
from pathlib import Path

import torch

from specserve.methods import method_of
from specserve.models.llama import LlamaModel
from specserve.speculation.context import Drafter
from specserve.speculation.drafters.options import DraftOptions


def load_drafter(
    name: str,
    path: Path,
    target: LlamaModel,
    layer: int,
    max_positions: int,
    dtype: torch.dtype,
    options: DraftOptions,
) -> Drafter:
    """Load a method's drafter for a target. Its KV layers start at pool layer ``layer``.

    Raises ValueError naming what does not fit.
    """
    method = method_of(name)
    assert method is not None
    load = method.load
    if isinstance(load, str):
        module, _, path_in_it = load.partition(":")
        load = attrgetter(path_in_it)(import_module(module))
    drafter: Drafter = load(name, path, target, layer, max_positions, dtype, options)
    return drafter
