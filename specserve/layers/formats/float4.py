"""4-bit floats (e2m1) with scales of groups: MXFP4 and NVFP4, and ``quant_method: mxfp4``, as OpenAI stores experts.

A byte has two inputs, the first in the low half. In MXFP4, 32 inputs share an exponent of a power of two, plus 127, as
uint8. In NVFP4, 16 inputs share a float8_e4m3fn, and the tensor has a float32, which multiplies them or, in
compressed-tensors, divides them. Scales of activations are not used: these stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from specserve_kernels import FP8, Numbers
from torch import Tensor

from specserve.layers.formats.fp8 import named_by
from specserve.layers.formats.stored import (
    Layout,
    StoredWeights,
    check_cuts,
    check_left_out,
    modules_with,
    moved,
    stored_weights,
    texts,
)
from specserve.layers.weights import Dtypes

_BIAS = 127


@dataclass(frozen=True, slots=True)
class Float4Layout:
    """The names of a module's tensors: uint8 ``values`` ``[O, I / 2]``, ``blocks`` ``[O, I / 32, 16]``; ``scales`` of
    groups ``[O, G]``; in NVFP4, ``unit`` of the tensor."""

    values: str
    scales: str
    unit: str | None = None
    bits: ClassVar[int] = 4
    deviation: ClassVar[float] = 2.93  # of what random bits mean
    split: ClassVar[int] = 1

    @property
    def group(self) -> int:
        return 16 if self.unit else 32

    @property
    def words(self) -> str:
        kind, scales = ("NVFP4", " and one a tensor") if self.unit else ("MXFP4", "")
        return f"{kind} with a scale for {self.group} inputs{scales}, inputs as they are"

    def tensors(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        if inputs % self.group:
            raise ValueError(
                f"{self.words.split()[0]} needs a multiple of {self.group} inputs, found {inputs}"
            )
        values = torch.empty(outputs, inputs // 2, dtype=torch.uint8)
        scales = torch.empty(outputs, inputs // self.group, dtype=FP8 if self.unit else torch.uint8)
        values = values.view(*scales.shape, -1) if self.values == "blocks" else values
        units = {} if self.unit is None else {self.unit: torch.empty((), dtype=torch.float32)}
        return {self.values: values, self.scales: scales, **units}

    def fitted(self, outputs: int, inputs: int) -> Float4Layout:
        check_cuts(outputs, inputs, 1, self.group)
        return self

    def numbers(self, stored: Mapping[str, Tensor], device: torch.device) -> Numbers:
        bytes_OX = moved(stored[self.values], device).flatten(1)
        values_OI = torch.stack((bytes_OX & 15, bytes_OX >> 4), -1).flatten(1)
        scale_OG, unit_O1 = moved(stored[self.scales], device, torch.float32), None
        if self.unit is None:
            scale_OG = torch.exp2(scale_OG - _BIAS)
        else:
            unit = moved(stored[self.unit], device, torch.float64)
            unit_O1 = (1 / unit if self.unit == "weight_global_scale" else unit).expand(len(scale_OG), 1)
        return Numbers(values_OI, scale_OG.bfloat16(), None, self.group, floats=True, unit_O1=unit_O1)


MODELOPT = Float4Layout("weight", "weight_scale", "weight_scale_2")
NVFP4 = Float4Layout("weight_packed", "weight_scale", "weight_global_scale")
MXFP4 = Float4Layout("weight_packed", "weight_scale")


def read(config: Mapping[str, Any], files: Dtypes) -> StoredWeights:
    """Read ``quant_method: mxfp4``."""
    left = texts(config, "modules_to_not_convert")
    layouts: dict[str, Layout] = dict.fromkeys(
        modules_with(files, "blocks"), Float4Layout("blocks", "scales")
    )
    check_left_out(layouts, "modules_to_not_convert", named_by(left, (f"{name}*" for name in left)))
    return stored_weights("mxfp4", layouts, ())
