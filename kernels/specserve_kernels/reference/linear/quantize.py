"""Quantize a projection's activations to int8. Shapes: T tokens, I inputs, G groups of inputs.

Like the weights in ``quantized_linear``, activations are quantized in groups of 128: an outlier costs precision in its
own group only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 128
LARGEST = 127
LEAST_UNIT = 1e-30  # scale of a group of zeros


class Rounded(NamedTuple):
    """A projection's quantized activations: ``values_TI`` int8, and ``unit_GT`` float32, the scale of each token's
    group. ``dtype``: the original dtype, which the result gets."""

    values_TI: Tensor
    unit_GT: Tensor
    dtype: torch.dtype

    @property
    def plain_TI(self) -> Tensor:
        """The dequantized activations, float32."""
        return self.values_TI * self.unit_GT.T.repeat_interleave(GROUP, 1)[:, : self.values_TI.shape[1]]


def round_inputs(x_TI: Tensor) -> Rounded:
    """Quantize each group of 128 activations of a token to int8, with 1/127 of its largest magnitude as the scale. The
    result is undefined for numbers that are not finite."""
    groups_TGI = pad(x_TI.float(), (0, -x_TI.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    unit_TG = (groups_TGI.abs().amax(2) * (1 / LARGEST)).clamp_min(LEAST_UNIT)
    values_TI = (groups_TGI / unit_TG[:, :, None]).round().flatten(1)[:, : x_TI.shape[1]]
    return Rounded(values_TI.to(torch.int8), unit_TG.T.contiguous(), x_TI.dtype)
