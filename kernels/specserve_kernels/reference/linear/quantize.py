"""Quantize a projection's activations to 8 bits. Shapes: T tokens, I inputs, G groups of inputs.

To int8 in groups of 128, like the weights in ``quantized_linear``: an outlier costs precision in its own group only. To
FP8, whose precision is relative, with one scale a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 128
FP8 = torch.float8_e4m3fn
LARGEST = {torch.int8: 127, FP8: 448}
LEAST_UNIT = 1e-30  # scale of a group of zeros


class Rounded(NamedTuple):
    """A projection's quantized activations: ``values_TI`` int8 or float8_e4m3fn, and ``unit_GT``, the scale of each
    token's group, float32 at least; a single group has all inputs. ``dtype``: the original dtype, which the result
    gets."""

    values_TI: Tensor
    unit_GT: Tensor
    dtype: torch.dtype

    @property
    def plain_TI(self) -> Tensor:
        """The dequantized activations, float32 at least."""
        unit_TG = self.unit_GT.T
        if unit_TG.shape[1] > 1:
            unit_TG = unit_TG.repeat_interleave(GROUP, 1)[:, : self.values_TI.shape[1]]
        return self.values_TI.to(unit_TG.dtype) * unit_TG


def round_inputs(x_TI: Tensor, dtype: torch.dtype) -> Rounded:
    """Quantize each group of 128 activations of a token to int8, or all of them to float8_e4m3fn. The scale maps the
    largest magnitude to the largest number. For numbers that are not finite, int8 is undefined; with FP8,
    the token's products are not finite either."""
    size = x_TI.shape[1] if dtype == FP8 else GROUP
    wide = torch.promote_types(x_TI.dtype, torch.float32)
    groups_TGI = pad(x_TI.to(wide), (0, -x_TI.shape[1] % size)).unflatten(1, (-1, size))
    unit_TG = (groups_TGI.abs().amax(2) * (1 / LARGEST[dtype])).clamp_min(LEAST_UNIT)
    values_TI = (groups_TGI / unit_TG[:, :, None]).flatten(1)[:, : x_TI.shape[1]]
    values_TI = values_TI if dtype == FP8 else values_TI.round()
    return Rounded(values_TI.to(dtype), unit_TG.T.contiguous(), x_TI.dtype)


def rounded_inputs(x_TI: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the activations as ``round_inputs`` represents them, in float32 at least. Gradients pass as if they were
    not rounded."""
    plain_TI = round_inputs(x_TI.detach(), dtype).plain_TI
    return x_TI + (plain_TI - x_TI).detach() if x_TI.requires_grad else plain_TI
