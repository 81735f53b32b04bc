"""Weight formats: how a checkpoint stores a model's projections, and how they are multiplied.

A format is one module that calls ``register``. Shapes: T tokens, I inputs, O outputs, H hidden size, R picked outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from specserve_kernels import Rounded
from torch import Tensor, nn


class Projection(nn.Module):
    """``x @ weight.T + bias`` in one weight format; the base class of all formats.

    ``parts``: the projections of a file that are stacked in this one, by name, with their numbers of outputs. Empty: it
    is a single projection of the same name.
    """

    parts: Mapping[str, int]

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def stored(self) -> list[dict[str, Tensor]]:
        """Return what a file holds of each part: views of the parameters, by the last part of their names."""
        raise NotImplementedError

    def loaded(self) -> None:
        """Prepare for ``forward``, after the tensors of ``stored`` have been filled."""

    def forward(self, x_TI: Tensor | Rounded, gated: bool = False, out: Tensor | None = None) -> Tensor:
        """Return ``[T, O]``, or its ``silu_and_mul`` if ``gated``; written to ``out`` if given."""
        raise NotImplementedError

    def quantizes(self, tokens: int) -> bool:
        """Return whether it multiplies integers at this number of tokens, so that the preceding norm may quantize."""
        return False

    def outputs_from(self, start: int, x_TI: Tensor | Rounded) -> Tensor:
        """Return the outputs from ``start`` on."""
        out_TO: Tensor = self(x_TI)
        return out_TO[:, start:]

    def outputs_at(self, ids_R: Tensor, x_TI: Tensor) -> Tensor:
        """Return the outputs ``ids_R``."""
        out_TO: Tensor = self(x_TI)
        return out_TO[:, ids_R]

    def rows(self, ids_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return weight ``[R, I]`` and bias ``[R]`` of these outputs in the model's dtype. They are copies, unless None
        asks for all outputs and the format holds them this way."""
        raise NotImplementedError


class WeightFormat:
    """What a ``config.json`` says about its weights. Immutable; equal if it means the same.

    ``words``: its description in logs, empty for plain weights. ``unread``: tensors that a file may have beyond those
    that projections read, by the ends of their names.
    """

    unread: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return ""

    def projection(self, name: str, inputs: int, parts: Mapping[str, int], bias: bool) -> Projection:
        """Make a projection whose weights are not loaded yet. ``name``: its module, as files call it without
        ``model.``; ``parts`` as in ``Projection``, but never empty."""
        raise NotImplementedError


Reader = Callable[[Mapping[str, Any], Collection[str]], WeightFormat]
FORMATS: dict[str, Reader] = {}
"""Readers of a ``quantization_config``, given the names of the checkpoint's tensors without ``model.``, by its
``quant_method``; ValueError names a field that one can't serve."""


def register(quant_method: str, reader: Reader) -> None:
    """Make checkpoints of this ``quant_method`` loadable."""
    assert quant_method not in FORMATS, f"two weight formats are called {quant_method}"
    FORMATS[quant_method] = reader
