"""A projection with 8-bit weights. Shapes: T tokens, O outputs, I inputs, G groups of inputs.

Each row of the weight is stored as int8 or float8_e4m3fn (Micikevicius et al. 2022, arXiv 2209.05433) in groups of 128
inputs, each with a scale that maps its largest weight to the format's largest number. Groups matter because a head that
reads an embedding next to a feature has rows of two very different magnitudes. For normally distributed weights the
error is 0.7% (int8) or 2.6% (FP8) of the root mean square. If activations are quantized too, in the same groups of each
token, integers are multiplied by integers: see ``integer_linear``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from specserve_kernels.reference.layer.activation import Gate, apply_gate
from specserve_kernels.reference.linear.quantize import GROUP, LARGEST

SLICE = 1 << 24  # weights quantized at a time, which bounds the float32 copies


def quantize(weight_OI: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the weight in ``dtype`` (int8 or float8_e4m3fn) ``[O, I]``, and its scales, float32 ``[O, G]``, with those
    of a group contiguous, as kernels read them."""
    rows = max(1, SLICE // weight_OI.shape[1])
    values, scales = zip(*(_quantize(part, dtype) for part in weight_OI.split(rows)), strict=True)
    return torch.cat(values), torch.cat(scales).T.contiguous().T


def _quantize(weight_OI: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    outputs, inputs = weight_OI.shape
    groups_OGI = pad(weight_OI.float(), (0, -inputs % GROUP)).view(outputs, -1, GROUP)
    largest_OG = groups_OGI.abs().amax(2)
    scale_OG = torch.where(largest_OG > 0, largest_OG / LARGEST[dtype], 1.0)
    scaled_OI = (groups_OGI / scale_OG[:, :, None]).flatten(1)[:, :inputs]
    return (scaled_OI.round() if dtype == torch.int8 else scaled_OI).to(dtype), scale_OG


def dequantize(weight_OI: Tensor, scale_OG: Tensor) -> Tensor:
    """Return the dequantized weight, float32 ``[O, I]``."""
    return weight_OI.float() * scale_OG.repeat_interleave(GROUP, 1)[:, : weight_OI.shape[1]]


def quantized_linear(
    x_TI: Tensor, weight_OI: Tensor, scale_OG: Tensor, bias_O: Tensor | None = None, gated: Gate = None
) -> Tensor:
    """Return ``x @ dequantize(weight, scale).T + bias`` in x's dtype, summed in float32 at least, and if ``gated`` its
    ``apply_gate``, which is half as wide."""
    wide = torch.promote_types(x_TI.dtype, torch.float32)
    out_TO = x_TI.to(wide) @ dequantize(weight_OI, scale_OG).to(wide).T
    out_TO = (out_TO if bias_O is None else out_TO + bias_O).to(x_TI.dtype)
    return apply_gate(out_TO, gated)
