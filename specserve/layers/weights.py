"""The interface of weight formats: how a checkpoint stores a model's projections, and how they are multiplied.

A format is one module that calls ``register``. Shapes: T tokens, I inputs, O outputs, H hidden size, R selected
outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from specserve_kernels import Gate, Packed, Rounded
from torch import Tensor, nn

from specserve.layers.ranks import Cut

T = TypeVar("T")


class Projection(nn.Module):
    """``x @ weight.T + bias`` in one weight format; the base class of all formats.

    ``parts``: the file's projections that are stacked in this one, with their numbers of outputs. Empty: a single
    projection of the same name. ``stacked``: its rows are weights of several experts, and are never used together.
    ``kept_plain``: its rows are read in the model's dtype, by ``rows``, at every step, so it is held in that form.
    ``shares_inputs``: others read its inputs, too, as they are. ``place``: where else its weight is stored.
    ``order_O``: which of the file's outputs each of its own is, on the CPU; None: the same. It has then one part.
    """

    parts: Mapping[str, int]
    stacked: bool = False
    kept_plain: bool = False
    shares_inputs: bool = False
    place: Place | None = None
    order_O: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device if self.place is None else self.place.behind.device

    def stored(self) -> list[dict[str, Tensor]]:
        """Return the tensors that a file holds for each part, by the last part of their names: views of the parameters,
        or on ``meta`` if they are not kept as they are."""
        raise NotImplementedError

    def cuts(self) -> list[dict[str, Cut]]:
        """Return for each part which tensors of ``stored`` are a part of a file's, and which: none in a format whose
        sizes can't be ``Share``."""
        return [{} for _ in self.parts or [None]]

    def load(self, files: Sequence[Mapping[str, Tensor]]) -> None:
        """Take the tensors of ``stored`` from a file. They may be mapped from it, and floats may have another dtype.
        Raises ValueError for values that they can't have."""
        for part, found in zip(self.stored(), files, strict=True):
            for name, target in part.items():
                target.copy_(found[name] if self.order_O is None else found[name][self.order_O])

    def forward(self, x_TI: Tensor | Rounded, gated: Gate = None, out: Tensor | None = None) -> Tensor:
        """Return ``[T, O]``, or its ``apply_gate`` if ``gated``; written to ``out`` if given."""
        raise NotImplementedError

    def gate_for(self, reader: Projection, x_TI: Tensor | Rounded, gated: Gate) -> Tensor | Rounded:
        """Return the gated result, quantized as ``reader`` does if this format can."""
        out: Tensor = self(x_TI, gated)
        return out

    def rounds_to(self, tokens: int) -> torch.dtype | None:
        """Return the dtype that it quantizes this number of tokens to, so that the preceding norm can, or None if it
        does not quantize."""
        return None

    def outputs_from(self, start: int, x_TI: Tensor | Rounded) -> Tensor:
        """Return the outputs from ``start`` on."""
        out_TO: Tensor = self(x_TI)
        return out_TO[:, start:]

    def outputs_at(self, ids_R: Tensor, x_TI: Tensor) -> Tensor:
        """Return the outputs ``ids_R``."""
        out_TO: Tensor = self(x_TI)
        return out_TO[:, ids_R]

    def rows(self, ids_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return weight ``[R, I]`` and bias ``[R]`` of these outputs (None: all) in the model's dtype. They are copies,
        except for all outputs of a format that holds them in this form."""
        raise NotImplementedError

    def of_experts(self, count: int) -> tuple[Tensor | Packed, Tensor | None, bool]:
        """Return the weights of ``count`` experts, which are stacked in this projection, as ``ExpertWeights`` has them,
        their biases, and whether they are plain numbers whose inputs are rounded to FP8.
        Raises NotImplementedError if this format can't hold experts."""
        raise NotImplementedError

    def fits(self, place: Place) -> bool:
        """Return whether this weight can be stored at a place."""
        return False

    def move(self, place: Place) -> None:
        """Have it stored there when it is loaded, and hold nothing. It ``fits``."""
        raise NotImplementedError


class Place(NamedTuple):
    """Behind a ``stacked`` weight, as ``many`` more experts: cut ``along`` 0, outputs, or 1, inputs."""

    behind: Projection
    many: int
    along: int

    def order(self, parts: Iterable[Sequence[T]]) -> list[T]:
        """Return the pieces of parts expert by expert."""
        return [piece for pieces in zip(*parts, strict=True) for piece in pieces]


class WeightFormat:
    """The weight format that a ``config.json`` describes. Immutable; equal if it means the same.

    ``words``: its description in logs, empty for plain weights. ``unread``: ends of the names of tensors that a file
    may have although no projection reads them.
    """

    unread: tuple[str, ...] = ()

    @property
    def unit(self) -> int:
        """At multiples of how many inputs ranks can cut its weights."""
        return 1

    @property
    def words(self) -> str:
        return ""

    def stores(self, module: str) -> bool:
        """Return whether a module's weight is in this format, given its name in files, without ``model.``."""
        return False

    def projection(self, name: str, inputs: int, parts: Mapping[str, int], bias: bool) -> Projection:
        """Make a projection whose weights are not loaded yet. ``name``: its module in files, without ``model.``;
        ``parts`` as in ``Projection``, but never empty. Either the parts' sizes or ``inputs`` may be a ``Share``."""
        raise NotImplementedError


FLOATS = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""Dtypes of unquantized numbers, in models and in files."""
Dtypes = Mapping[str, torch.dtype | None]
"""The dtypes of a checkpoint's tensors, by name without ``model.``; None unless it is one of ``FLOATS``."""
Reader = Callable[[Mapping[str, Any], Dtypes], WeightFormat]
FORMATS: dict[str, Reader] = {}
"""Readers by ``quant_method``. They take the ``quantization_config`` and the checkpoint's tensors, and raise ValueError
naming a field that they can't serve."""


def register(quant_method: str, reader: Reader) -> None:
    """Make checkpoints of this ``quant_method`` loadable."""
    assert quant_method not in FORMATS, f"two weight formats are called {quant_method}"
    FORMATS[quant_method] = reader
