"""Quantize a projection's activations. Shapes: T tokens, I inputs, G groups of inputs.

To int8 in groups of 128, like the weights in ``quantized_linear``: an outlier costs precision in its own group only. To
FP8, whose precision is relative, with one scale a token. To 15 bits, also with one scale a token: two int8 numbers, of
which the first counts 128 times. That is more exact than bfloat16 for all but a token's smallest activations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 128
FP8 = torch.float8_e4m3fn
PAIRED = torch.int16  # stands for two int8 numbers
LARGEST = {torch.int8: 127, FP8: 448, PAIRED: 127 * 128}
LEAST_UNIT = 1e-30  # scale of a group of zeros


class Rounded(NamedTuple):
    """A projection's quantized activations: ``values``, int8 or float8_e4m3fn ``[T, I]``, or int8 ``[2T, I]`` with two
    rows a token, and ``unit_GT``, the scale of each token's group, float32 at least; a single group has all inputs.
    ``dtype``: the original dtype, which the result gets. ``given_TI``: what was quantized, if somebody reads that too.
    """

    values: Tensor
    unit_GT: Tensor
    dtype: torch.dtype
    given_TI: Tensor | None = None

    @property
    def plain_TI(self) -> Tensor:
        """The dequantized activations, float32 at least."""
        unit_TG = self.unit_GT.T
        values_TI = self.values.to(unit_TG.dtype)
        if len(values_TI) > len(unit_TG):
            values_TI = 128 * values_TI[::2] + values_TI[1::2]
        if unit_TG.shape[1] > 1:
            unit_TG = unit_TG.repeat_interleave(GROUP, 1)[:, : values_TI.shape[1]]
        return values_TI * unit_TG


def given(x_TI: Tensor | Rounded) -> Tensor:
    """Return activations as they were before they were quantized."""
    found = x_TI if isinstance(x_TI, Tensor) else x_TI.given_TI
    assert found is not None
    return found


def round_inputs(x_TI: Tensor, dtype: torch.dtype) -> Rounded:
    """Quantize each group of 128 activations of a token to int8, or all of them to float8_e4m3fn or 15 bits (int16).
    The scale maps the largest magnitude to the largest number. For numbers that are not finite, int8 is undefined; with
    the others, the token's products are not finite either."""
    size = GROUP if dtype == torch.int8 else x_TI.shape[1]
    wide = torch.promote_types(x_TI.dtype, torch.float32)
    groups_TGI = pad(x_TI.to(wide), (0, -x_TI.shape[1] % size)).unflatten(1, (-1, size))
    unit_TG = (groups_TGI.abs().amax(2) * (1 / LARGEST[dtype])).clamp_min(LEAST_UNIT)
    values = (groups_TGI / unit_TG[:, :, None]).flatten(1)[:, : x_TI.shape[1]]
    values = values if dtype == FP8 else values.round()
    if dtype == PAIRED:
        high_TI = ((values + 64) / 128).floor()
        values, dtype = torch.stack((high_TI, values - 128 * high_TI), 1).flatten(0, 1), torch.int8
    return Rounded(values.to(dtype), unit_TG.T.contiguous(), x_TI.dtype)


def rounded_inputs(x_TI: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the activations as ``round_inputs`` represents them, in float32 at least. Gradients pass as if they were
    not rounded."""
    plain_TI = round_inputs(x_TI.detach(), dtype).plain_TI
    return x_TI + (plain_TI - x_TI).detach() if x_TI.requires_grad else plain_TI
