"""Quantize 16-bit weights to 8 or 4 bits at load: ``--quantization``.

In 8 bits each output has a scale that maps its largest weight to the format's largest number. In 4 bits each group of
128 inputs of an output has a scale that maps its largest weight to -8, the format's largest number. Of all scales
without a zero point this one has the least error: 10.3% for normally distributed weights, against 11.7% for mapping to
7. The head is not quantized, as in nearly all published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from specserve_kernels import Numbers
from torch import Tensor
from torch.nn.functional import pad

from specserve.layers.formats.stored import check_cuts, moved, stored_projection
from specserve.layers.linear import PLAIN, QUANTIZED
from specserve.layers.weights import Projection, WeightFormat

SYMMETRIC_ZERO = 8  # the 4-bit value that means 0 without a zero point
LARGEST = {"int8": 127.0, "fp8": 448.0}
DTYPES = {**QUANTIZED, "int4": torch.uint8}
GROUP = 128  # inputs that share a scale in 4 bits
_SLICE = 1 << 23  # weights quantized at a time, which bounds the float32 copies


@dataclass(frozen=True, slots=True)
class RoundedLayout:
    """The ``weight`` of the file, rounded from the dtype that it has there."""

    kind: str
    split: ClassVar[int] = 1

    @property
    def words(self) -> str:
        return (
            f"rounded to {self.kind}, a scale {f'for {GROUP} inputs' if self.kind == 'int4' else 'an output'}"
        )

    def tensors(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        return {"weight": torch.empty(outputs, inputs)}

    def fitted(self, outputs: int, inputs: int) -> RoundedLayout:
        check_cuts(outputs, inputs, 1, GROUP if self.kind == "int4" else 1)
        return self

    def numbers(self, stored: Mapping[str, Tensor], device: torch.device) -> Numbers:
        weight_OI, scales = stored["weight"], list[Tensor]()
        values_OI = torch.empty(weight_OI.shape, dtype=torch.uint8, device=device)
        rows = max(1, _SLICE // weight_OI.shape[1])
        round_part = _round_to_4 if self.kind == "int4" else self._round_to_8
        for part_OI, into_OI in zip(weight_OI.split(rows), values_OI.split(rows), strict=True):
            rounded_OI, scale = round_part(moved(part_OI, device, torch.float32))
            into_OI.copy_(rounded_OI)
            scales.append(scale)
        return Numbers(values_OI.view(DTYPES[self.kind]), torch.cat(scales), None, GROUP)

    def _round_to_8(self, wide_OI: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bytes, and the scales ``[O, 1]``."""
        largest_O1 = wide_OI.abs().amax(1, keepdim=True)
        scale_O1 = torch.where(largest_O1 == 0, 1.0, largest_O1 / LARGEST[self.kind])
        scaled_OI = wide_OI / scale_O1
        rounded_OI = scaled_OI.round() if self.kind == "int8" else scaled_OI
        return rounded_OI.to(DTYPES[self.kind]).view(torch.uint8), scale_O1


def _round_to_4(wide_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers from 0 on, with 8 as the zero, and the signed scales ``[O, G]``."""
    inputs = wide_OI.shape[1]
    wide_OGI = pad(wide_OI, (0, -inputs % GROUP)).unflatten(1, (-1, GROUP))
    largest_OG1 = wide_OGI.gather(2, wide_OGI.abs().argmax(2, keepdim=True))
    scale_OG1 = (largest_OG1 / -SYMMETRIC_ZERO).bfloat16()
    scale_OG1 = torch.where(scale_OG1 == 0, 1, scale_OG1)
    values_OGI = (wide_OGI / scale_OG1).round().clamp(-SYMMETRIC_ZERO, SYMMETRIC_ZERO - 1) + SYMMETRIC_ZERO
    return values_OGI.to(torch.uint8).flatten(1)[:, :inputs], scale_OG1.squeeze(2)


@dataclass(frozen=True, slots=True)
class RoundedWeights(WeightFormat):
    """``kind``: a key of ``DTYPES``."""

    kind: str

    @property
    def unit(self) -> int:
        return GROUP if self.kind == "int4" else 1

    @property
    def words(self) -> str:
        return RoundedLayout(self.kind).words

    def projection(self, name: str, inputs: int, parts: Mapping[str, int], bias: bool) -> Projection:
        if name:
            return stored_projection(RoundedLayout(self.kind), name, inputs, parts, bias)
        return PLAIN.projection(name, inputs, parts, bias)
