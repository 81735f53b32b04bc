"""FR-Spec: a draft that reads some rows of the target's head, those of frequent tokens.

Zhao et al. 2025, arXiv 2502.14856. A map's file lists target token ids, the most frequent first. Only what the draft
can guess is cut; the target verifies over its whole vocabulary. Shapes: N rows, H hidden size, R ids kept.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from specserve_kernels import indexed_linear
from torch import Tensor, nn

from specserve.layers.linear import Linear, pack_linears
from specserve.models.draft.head import LayerHead

_EXPECTED = "expected a list of token ids: torch.save of ints, a JSON list, or a text of one id a line"


def read_token_map(file: Path, vocab_size: int) -> Tensor:
    """The ids that ``file`` lists, int64 ``[R]``, in its order, each once: published maps repeat some.

    ``.json`` and ``.txt`` are read as what they are called, all others by ``torch.load`` as plain data. Raises
    ValueError naming the file and what is expected of it.
    """
    ids = list(dict.fromkeys(_integers(file, _READERS.get(file.suffix, _read_torch)(file))))
    if not ids:
        raise ValueError(f"{file} lists no ids; {_EXPECTED}")
    if outside := [i for i in ids if not 0 <= i < vocab_size]:
        raise ValueError(
            f"{file} lists token id {outside[0]}; the target's ids run from 0 to {vocab_size - 1}"
        )
    return torch.tensor(ids, dtype=torch.int64)


def _read_torch(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises nearly everything
        why = "can't be read as plain data" if isinstance(error, pickle.UnpicklingError) else _line(error)
        raise ValueError(f"{file} is no token map ({why}); {_EXPECTED}") from None


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is no token map ({_line(error)}); {_EXPECTED}") from None


def _read_text(file: Path) -> Any:
    try:
        return [int(word) for word in file.read_text().split()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is no token map ({_line(error)}); {_EXPECTED}") from None


_READERS = {".json": _read_json, ".txt": _read_text}


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _integers(file: Path, found: Any) -> list[int]:
    if isinstance(found, Tensor):
        whole = found.dim() == 1 and not found.dtype.is_floating_point and found.dtype != torch.bool
        if not whole or found.dtype.is_complex:
            raise ValueError(f"{file} holds a tensor {found.dtype} {list(found.shape)}; {_EXPECTED}")
        ids: list[int] = found.tolist()
        return ids
    if not isinstance(found, list | tuple):
        raise ValueError(f"{file} holds a {type(found).__name__}; {_EXPECTED}")
    for index, value in enumerate(found):
        if type(value) is not int:
            raise ValueError(f"{file}: entry {index} is {value!r}; {_EXPECTED}")
    return list(found)


class IndexedHead(nn.Module):
    """The rows ``ids_R`` of another module's head, read where they lie: changing the ids copies no weights."""

    def __init__(self, lm_head: Linear, ids_R: Tensor) -> None:
        super().__init__()
        self._lm_head = (lm_head,)  # in a tuple: used but not registered as a part of this module
        self.register_buffer("ids_R", ids_R.to(lm_head.weight.device), persistent=False)
        self.ids_R: Tensor

    def forward(self, states_NH: Tensor) -> Tensor:
        lm_head = self._lm_head[0]
        logits_NR = indexed_linear(states_NH, lm_head.weight, self.ids_R)
        return logits_NR if lm_head.bias is None else logits_NR + lm_head.bias[self.ids_R]


def truncate(head: LayerHead, lm_head: Linear, ids_R: Tensor) -> None:
    """From now on ``head`` scores the tokens ``ids_R`` alone. Raises ValueError unless it scores by the target's
    ``lm_head``."""
    if head._lm_head != (lm_head,):
        raise ValueError(
            f"--speculative-token-map: this draft, an {type(head).__name__}, scores by rows of its own; "
            "expected one that reads the target's head"
        )
    head._lm_head = (truncated_head(lm_head, ids_R),)


def truncated_head(lm_head: Linear, ids_R: Tensor) -> nn.Module:
    """What takes the place of ``lm_head`` in a draft that knows ``ids_R`` alone.

    On a GPU no weight is copied. On a CPU the rows are: a multiplication there takes its weight packed in blocks of
    neighbouring rows, so rows of the packed head can't be picked, and gathering them at every call would read and
    write as much as the multiplication saves. ``lm_head`` must still have its plain weight.
    """
    assert lm_head.weight.numel(), "the head was packed, and its rows can't be picked"
    if lm_head.weight.is_cuda:
        return IndexedHead(lm_head, ids_R)
    return _copied_rows(lm_head, ids_R)


@torch.no_grad()
def _copied_rows(lm_head: Linear, ids_R: Tensor) -> Linear:
    rows = Linear(lm_head.in_features, len(ids_R), bias=lm_head.bias is not None, device="meta")
    rows.weight = nn.Parameter(lm_head.weight[ids_R], requires_grad=False)
    if lm_head.bias is not None:
        rows.bias = nn.Parameter(lm_head.bias[ids_R], requires_grad=False)
    pack_linears(rows)
    return rows
