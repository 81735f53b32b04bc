"""Weight formats: how a checkpoint stores the projections of a model, and how they are multiplied.

A format is one module that calls ``register``. Shapes: T tokens, I inputs, O outputs, H hidden size, R picked outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from specserve_kernels import Rounded
from torch import Tensor, nn


class Projection(nn.Module):
    """``x @ weight.T + bias`` in one weight format, the base class of all.

    ``parts``: the projections of a file that lie in it one above the other, by their names next to it, and their
    numbers of outputs; empty: it is one of the same name.
    """

    parts: Mapping[str, int]

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def stored(self) -> list[dict[str, Tensor]]:
        """Return what a file holds of each part: views of the parameters, by the last part of their names."""
        raise NotImplementedError

    def loaded(self) -> None:
        """Prepare for ``forward``: ``stored`` has been filled."""

    def forward(self, x_TI: Tensor | Rounded, gated: bool = False, out: Tensor | None = None) -> Tensor:
        """Return ``[T, O]``, or ``silu_and_mul`` of that where ``gated``; in ``out`` if it is given."""
        raise NotImplementedError

    def quantizes(self, tokens: int) -> bool:
        """Return whether it multiplies integers at this number of tokens, so that the norm before it may quantize."""
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
        """Return weight ``[R, I]`` and bias ``[R]`` of these outputs in the model's dtype: copies, but where None asks
        for all and the format holds them so."""
        raise NotImplementedError


class WeightFormat(Protocol):
    """What a ``config.json`` says of its weights. Immutable, equal where it means the same."""

    def projection(self, name: str, inputs: int, parts: Mapping[str, int], bias: bool) -> Projection:
        """Make a projection without numbers. ``name``: the module that it is in, as files call it without ``model.``;
        ``parts`` as in ``Projection``, and never empty."""
        ...


Reader = Callable[[Mapping[str, Any]], WeightFormat]
FORMATS: dict[str, Reader] = {}
"""Readers of a ``quantization_config`` by its ``quant_method``; ValueError names a field that one can't serve."""


def register(quant_method: str, reader: Reader) -> None:
    """Make checkpoints of this ``quant_method`` loadable."""
    assert quant_method not in FORMATS, f"two weight formats are called {quant_method}"
    FORMATS[quant_method] = reader


def read_format(quantization_config: object) -> WeightFormat:
    """Return the format of a ``quantization_config``. Raises ValueError naming the methods that are known."""
    method = quantization_config.get("quant_method") if isinstance(quantization_config, Mapping) else None
    if not isinstance(method, str) or method not in FORMATS:
        known = ", or of quant_method " + ", ".join(FORMATS) if FORMATS else ""
        raise ValueError(
            f"quantization_config is not supported for quant_method {method!r}; weights must be float16, bfloat16 or "
            f"float32{known}"
        )
    assert isinstance(quantization_config, Mapping)
    return FORMATS[method](quantization_config)
