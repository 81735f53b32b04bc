"""A projection with int8 weights and int8 activations. Shapes: T tokens, O outputs, I inputs, G groups of inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from specserve_kernels.reference.layer.activation import Gate
from specserve_kernels.reference.linear.quantize import Rounded, round_inputs
from specserve_kernels.reference.linear.quantized import quantized_linear


def integer_linear(
    x_TI: Tensor | Rounded,
    weight_OI: Tensor,
    scale_OG: Tensor,
    bias_O: Tensor | None = None,
    gated: Gate = None,
) -> Tensor:
    """Return ``quantized_linear`` of int8 weights and activations, which are quantized by ``round_inputs`` first if
    needed."""
    x = round_inputs(x_TI, torch.int8) if isinstance(x_TI, Tensor) else x_TI
    return quantized_linear(x.plain_TI, weight_OI, scale_OG, bias_O, gated).to(x.dtype)
