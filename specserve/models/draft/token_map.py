"""FR-Spec: a draft that uses only the rows of frequent tokens of the target's head.

Zhao et al. 2025, arXiv 2502.14856. A map's file lists target token ids, the most frequent first. It limits only what
the draft can guess; the target verifies over its whole vocabulary. Shapes: N rows, H hidden size, O rows of a head, R
ids kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from specserve_kernels import on_gpu
from torch import Tensor, nn

from specserve.layers.embedding import SharedHead
from specserve.layers.linear import Linear, pack_linears, pick_rows
from specserve.layers.weights import Projection
from specserve.models.draft.head import LayerHead
from specserve.models.draft.load import Borrowed

_EXPECTED = "expected a list of token ids: torch.save of ints, a JSON list, or a text of one id a line"


def read_named_map(flag: str, file: Path, vocab_size: int) -> Tensor:
    """Read the map that a flag names; errors name the flag too."""
    try:
        return read_token_map(file, vocab_size)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def read_token_map(file: Path, vocab_size: int) -> Tensor:
    """Return the ids that ``file`` lists, int64 ``[R]``, in its order, each once: some published maps repeat ids.

    ``.json`` and ``.txt`` are read as such, all others by ``torch.load`` as plain data. Raises ValueError naming the
    file and what is expected of it.
    """
    ids = list(dict.fromkeys(_integers(file, _read(file))))
    if not ids:
        raise ValueError(f"{file} lists no ids; {_EXPECTED}")
    if outside := [i for i in ids if not 0 <= i < vocab_size]:
        raise ValueError(
            f"{file} lists token id {outside[0]}; the target's ids run from 0 to {vocab_size - 1}"
        )
    return torch.tensor(ids, dtype=torch.int64)


def _read(file: Path) -> Any:
    try:
        if file.suffix == ".json":
            return json.loads(file.read_text())
        if file.suffix == ".txt":
            return [int(word) for word in file.read_text().split()]
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises nearly everything, and suggests running the code
        tells = isinstance(error, OSError) or file.suffix in (".json", ".txt")
        why = " ".join(str(error).split()) if tells else "can't be read as plain data"
        raise ValueError(f"{file} is not a token map ({why}); {_EXPECTED}") from None


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
    """The rows ``ids_R`` of another module's head, read in place: changing the ids copies no weights."""

    def __init__(self, lm_head: Projection, ids_R: Tensor) -> None:
        super().__init__()
        self._lm_head = Borrowed(lm_head)
        self.register_buffer("ids_R", ids_R.to(lm_head.device), persistent=False)
        self.ids_R: Tensor

    def forward(self, states_NH: Tensor) -> Tensor:
        return self._lm_head.module.outputs_at(self.ids_R, states_NH)

    def set_rows(self, rows_R: Tensor) -> None:
        """Score by these rows from now on: int64 on the head's device, as many as before. Written to the same buffer,
        because captured steps read it by its address."""
        self.ids_R.copy_(rows_R)


class CopiedRows(nn.Module):
    """The rows ``ids_R`` of another module's head, copied and packed for a CPU; each ``set_rows`` copies other rows. It
    keeps the head's plain weight, which the target drops when it is packed: a packed weight's rows can't be read."""

    def __init__(self, lm_head: Projection, ids_R: Tensor) -> None:
        super().__init__()
        weight_OH, bias_O = lm_head.rows(None)
        self._plain = weight_OH.detach(), None if bias_O is None else bias_O.detach()
        self.set_rows(ids_R)

    def forward(self, states_NH: Tensor) -> Tensor:
        out: Tensor = self._rows[0](states_NH)
        return out

    def set_rows(self, rows_R: Tensor) -> None:
        self._rows = (_packed(*pick_rows(*self._plain, rows_R)),)


class SharedRows(nn.Module):
    """The rows ``ids_R`` of a head that ranks share, of which each copies a part."""

    def __init__(self, lm_head: SharedHead, ids_R: Tensor) -> None:
        super().__init__()
        self._lm_head, self._rows = Borrowed(lm_head), lm_head.picked(ids_R)

    def forward(self, states_NH: Tensor) -> Tensor:
        out: Tensor = self._rows(states_NH)
        return out

    @torch.no_grad()
    def set_rows(self, rows_R: Tensor) -> None:
        """Write to the same weight, because captured steps read it by its address."""
        news = self._lm_head.module.picked(rows_R).own.rows(None)
        for own, new in zip(self._rows.own.rows(None), news, strict=True):
            if own is not None and new is not None:
                own.copy_(new)


PickedRows = IndexedHead | CopiedRows | SharedRows


def truncate(head: LayerHead, lm_head: Projection, ids_R: Tensor) -> None:
    """Make ``head`` score only the tokens ``ids_R``. Raises ValueError unless it uses the target's ``lm_head``."""
    if head._lm_head is None or head._lm_head.module is not lm_head:
        raise ValueError(
            f"--speculative-token-map: this draft, an {type(head).__name__}, has its own output head; "
            "expected one that uses the target's"
        )
    head._lm_head = Borrowed(truncated_head(lm_head, ids_R))


def truncated_head(lm_head: Projection, ids_R: Tensor) -> nn.Module:
    """Return the replacement of ``lm_head`` in a draft that knows only ``ids_R``. ``lm_head`` must still be unpacked.

    On a GPU no weight is copied. On a CPU the rows are: multiplication there takes weights packed in blocks of
    neighbouring rows, and gathering rows at every call would read and write as much as the smaller multiplication
    saves. Of several ranks each copies a part.
    """
    if isinstance(lm_head, SharedHead):
        shared = lm_head.picked(ids_R)
        pack_linears(shared)
        return shared
    return IndexedHead(lm_head, ids_R) if on_gpu(lm_head.device) else _packed(*lm_head.rows(ids_R))


def score_by(head: LayerHead, rows_R: Tensor) -> PickedRows:
    """Make ``head`` score by these rows of its output head. Return the object that exchanges the rows. On a GPU this
    only changes ids, of one rank; on a CPU it copies rows, for the reason in ``truncated_head``."""
    assert isinstance(head.reader, Projection)
    picked = picked_rows(head.reader, rows_R)
    if head._lm_head is None and isinstance(picked, CopiedRows):
        del head.lm_head  # ``picked`` keeps its plain weight; the packed one is unused
    head._lm_head = Borrowed(picked)
    return picked


def picked_rows(lm_head: Projection, rows_R: Tensor) -> PickedRows:
    if not on_gpu(lm_head.device):
        return CopiedRows(lm_head, rows_R)
    return SharedRows(lm_head, rows_R) if isinstance(lm_head, SharedHead) else IndexedHead(lm_head, rows_R)


@torch.no_grad()
def _packed(weight_RH: Tensor, bias_R: Tensor | None) -> Linear:
    rows = Linear.of(weight_RH, bias_R)
    pack_linears(rows)
    return rows
