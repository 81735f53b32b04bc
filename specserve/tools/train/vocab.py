"""The draft vocabulary: the target's tokens that the draft can propose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specserve.tools.train.packing import Documents


def draft_vocabulary(sources: Sequence[Documents], vocab_size: int, size: int) -> Tensor:
    """Return the ``size`` most frequent learned tokens, ascending, int64. Ties and gaps go to the lowest ids."""
    if not 0 < size <= vocab_size:
        raise ValueError(f"--draft-vocab-size must be in [1, {vocab_size}], found {size}")
    counts = _count([np.asarray(each.tokens)[np.asarray(each.mask, bool)] for each in sources], vocab_size)
    chosen = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(chosen))


def unused_token(sources: Sequence[Documents], vocab_size: int) -> int:
    """Return the last token that no text contains, to use as mask token. Raises ValueError if there is none."""
    (unused,) = np.nonzero(_count([np.asarray(each.tokens) for each in sources], vocab_size) == 0)
    if not len(unused):
        raise ValueError(
            "--mask-token: the data contain all tokens of the vocabulary; give one that is rare in texts"
        )
    return int(unused[-1])


def _count(texts: Sequence[npt.NDArray[Any]], vocab_size: int) -> npt.NDArray[np.int64]:
    """Return how often each token occurs. Raises ValueError for one that the target lacks."""
    counts = np.zeros(vocab_size, np.int64)
    for text in texts:
        if len(text) and text.max() >= vocab_size:
            raise ValueError(f"the data holds token {text.max()}, the target's vocabulary is {vocab_size}")
        counts += np.bincount(text.astype(np.int64), minlength=vocab_size)
    return counts


def offsets(draft_ids: Tensor) -> Tensor:
    """Return ``d2t`` of a published file, int64 ``[Vd]``: target id minus draft id."""
    return draft_ids - torch.arange(len(draft_ids), device=draft_ids.device)


def membership(draft_ids: Tensor, vocab_size: int) -> Tensor:
    """Return ``t2d`` of a published file, bool ``[V]``: which target tokens are in the draft vocabulary."""
    inside = torch.zeros(vocab_size, dtype=torch.bool, device=draft_ids.device)
    inside[draft_ids] = True
    return inside
