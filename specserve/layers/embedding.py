"""The embedding of tokens, and the output head. Each rank has a part of the vocabulary.

Shapes: T tokens, H hidden size, V vocabulary, R rows of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from specserve_kernels import Gate, Rounded
from torch import Tensor, nn
from torch.nn import functional as F

from specserve.layers.linear import Linear
from specserve.layers.ranks import ONE, Cut, Ranks, ranges_of, whole_of
from specserve.layers.weights import Projection, WeightFormat

_FEW = 4096  # rows that are copied from other ranks at a time


class Embedding(nn.Embedding):
    """An embedding whose rows are multiplied by ``scale`` when they are looked up."""

    def __init__(self, tokens: int, size: int, scale: float = 1.0, ranks: Ranks = ONE) -> None:
        rows = ranks.vocabulary(tokens)
        super().__init__(int(rows), size)
        self.scale, self.ranks = scale, ranks
        self.shares = {"weight": rows}

    def forward(self, tokens_T: Tensor) -> Tensor:
        """Return ``[T, H]``."""
        tokens_T, weight_RH = self.table(tokens_T)
        rows_TH = F.embedding(tokens_T, weight_RH)
        return rows_TH if self.scale == 1 else rows_TH * self.scale

    def table(self, tokens_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return a table ``[R, H]`` and which of its rows are the tokens', before ``scale``."""
        return self.ranks.pick(tokens_T, self.weight, ranges_of(self.shares["weight"])[0][0])

    def as_head(self) -> Projection:
        """Return the head that shares its rows."""
        head = Linear.of(self.weight)
        return head if self.ranks.count == 1 else SharedHead(head, self.shares["weight"], self.ranks)


def make_head(size: int, tokens: int, weights: WeightFormat, ranks: Ranks) -> Projection:
    """Return an output head that is called ``lm_head`` in files."""
    rows = ranks.vocabulary(tokens)
    own = weights.projection("", size, {"lm_head": rows}, bias=False)
    return own if ranks.count == 1 else SharedHead(own, rows, ranks)


class SharedHead(Projection):
    """An output head of which each rank has some rows, ``own``. It returns the logits of all."""

    def __init__(self, own: Projection, rows: int, ranks: Ranks) -> None:
        super().__init__()
        self.own, self.parts = own, own.parts
        self._rows, self._ranks = rows, ranks

    def of(self, own: Projection) -> SharedHead:
        """Return a head of the same rows."""
        return SharedHead(own, self._rows, self._ranks)

    @torch.no_grad()
    def picked(self, ids_R: Tensor) -> SharedHead:
        """Return a head of these rows alone, of which each rank copies a part."""
        rows, (weight_RH, bias_R) = self._ranks.vocabulary(len(ids_R)), self.rows(ids_R)
        own = slice(*ranges_of(rows)[0])
        copied = Linear.of(weight_RH[own].clone(), None if bias_R is None else bias_R[own].clone())
        return SharedHead(copied, rows, self._ranks)

    @property
    def device(self) -> torch.device:
        return self.own.device

    def stored(self) -> list[dict[str, Tensor]]:
        return self.own.stored()

    def cuts(self) -> list[dict[str, Cut]]:
        return self.own.cuts()

    def load(self, files: Sequence[Mapping[str, Tensor]]) -> None:
        self.own.load(files)

    def rounds_to(self, tokens: int) -> torch.dtype | None:
        return self.own.rounds_to(tokens)

    def forward(self, x_TI: Tensor | Rounded, gated: Gate = None, out: Tensor | None = None) -> Tensor:
        return self._ranks.join(self.own(x_TI), whole_of(self._rows), out)

    def rows(self, ids_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Copy them from all ranks."""
        (begin, end), (weight_RH, bias_R) = ranges_of(self._rows)[0], self.own.rows(None)
        if ids_R is None:
            ids_R = torch.arange(whole_of(self._rows), device=self.device)

        def copied(own: Tensor) -> Tensor:
            found = []
            for ids in ids_R.split(_FEW):
                here = ((ids >= begin) & (ids < end)).view(-1, *[1] * (own.dim() - 1))
                part = own[(ids - begin).clamp(0, len(own) - 1)]
                found.append(self._ranks.sum(torch.where(here, part, 0)))
            return torch.cat(found)

        return copied(weight_RH), None if bias_R is None else copied(bias_R)


def root_scale(size: int) -> float:
    """Return the root of a size, rounded to the default dtype. A number, for a tensor can't be made while a graph is
    captured."""
    return float(torch.tensor(size**0.5, dtype=torch.get_default_dtype(), device="cpu"))
