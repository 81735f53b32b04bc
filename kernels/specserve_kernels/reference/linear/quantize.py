"""A projection's inputs rounded to int8. Shapes: T tokens, I inputs, G groups of inputs.

As weights are in ``quantized_linear``, by groups of 128 inputs: a group with a number that is far larger than the rest
loses those, and no other group does.
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
    """A projection's inputs as ``values_TI`` int8, of which one stands for ``unit_GT`` float32 in each group of each
    token; ``dtype``: what they were rounded from, and what is computed from them."""

    values_TI: Tensor
    unit_GT: Tensor
    dtype: torch.dtype

    @property
    def plain_TI(self) -> Tensor:
        """What they were rounded to, float32."""
        return self.values_TI * self.unit_GT.T.repeat_interleave(GROUP, 1)[:, : self.values_TI.shape[1]]


def round_inputs(x_TI: Tensor) -> Rounded:
    """Each group of 128 inputs of a token in 127ths of its largest number. Where numbers are not finite, anything may
    come out."""
    groups_TGI = pad(x_TI.float(), (0, -x_TI.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    unit_TG = (groups_TGI.abs().amax(2) * (1 / LARGEST)).clamp_min(LEAST_UNIT)
    values_TI = (groups_TGI / unit_TG[:, :, None]).round().flatten(1)[:, : x_TI.shape[1]]
    return Rounded(values_TI.to(torch.int8), unit_TG.T.contiguous(), x_TI.dtype)
