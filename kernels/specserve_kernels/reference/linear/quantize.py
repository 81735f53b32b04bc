"""Quantize a projection's inputs to int8. Shapes: T tokens, I inputs, G groups of inputs.

Like the weights in ``quantized_linear``, inputs are quantized in groups of 128: a number far larger than the rest costs
precision in its own group only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 128
LARGEST = 127
LEAST_UNIT = 1e-30  # that of a group of zeros


class Rounded(NamedTuple):
    """A projection's quantized inputs: ``values_TI`` int8, and ``unit_GT`` float32, the scale of each token's group.
    ``dtype``: the original type, in which the result is computed."""

    values_TI: Tensor
    unit_GT: Tensor
    dtype: torch.dtype

    @property
    def plain_TI(self) -> Tensor:
        """The values that the quantized inputs stand for, float32."""
        return self.values_TI * self.unit_GT.T.repeat_interleave(GROUP, 1)[:, : self.values_TI.shape[1]]


def round_inputs(x_TI: Tensor) -> Rounded:
    """Quantize each group of 128 inputs of a token to 127ths of its largest number. The result is undefined where
    numbers are not finite."""
    groups_TGI = pad(x_TI.float(), (0, -x_TI.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    unit_TG = (groups_TGI.abs().amax(2) * (1 / LARGEST)).clamp_min(LEAST_UNIT)
    values_TI = (groups_TGI / unit_TG[:, :, None]).round().flatten(1)[:, : x_TI.shape[1]]
    return Rounded(values_TI.to(torch.int8), unit_TG.T.contiguous(), x_TI.dtype)
