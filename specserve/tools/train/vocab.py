"""The draft vocabulary: the target's tokens that the draft can propose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specserve.tools.train.packing import Documents


def draft_vocabulary(sources: Sequence[Documents], vocab_size: int, size: int) -> Tensor:
    """The ``size`` most frequent learned tokens, ascending, int64. Ties and gaps go to the lowest ids."""
    if not 0 < size <= vocab_size:
        raise ValueError(f"--draft-vocab-size must be in [1, {vocab_size}], found {size}")
    counts = np.zeros(vocab_size, np.int64)
    for source in sources:
        learned = np.asarray(source.tokens)[np.asarray(source.mask, bool)].astype(np.int64)
        if len(learned) and learned.max() >= vocab_size:
            raise ValueError(f"the data holds token {learned.max()}, the target's vocabulary is {vocab_size}")
        counts += np.bincount(learned, minlength=vocab_size)
    chosen = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(chosen))


def offsets(draft_ids: Tensor) -> Tensor:
    """``d2t`` of a published file: what to add to a draft id to get the target's, int64 ``[Vd]``."""
    return draft_ids - torch.arange(len(draft_ids), device=draft_ids.device)


def membership(draft_ids: Tensor, vocab_size: int) -> Tensor:
    """``t2d`` of a published file: whether a target token is in the draft vocabulary, bool ``[V]``."""
    inside = torch.zeros(vocab_size, dtype=torch.bool, device=draft_ids.device)
    inside[draft_ids] = True
    return inside
