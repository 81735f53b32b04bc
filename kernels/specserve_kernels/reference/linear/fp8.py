"""A projection with FP8 weights and FP8 activations. Shapes: T tokens, O outputs, I inputs.

Each token's activations have one scale, which is computed from them: scales in a checkpoint, which come from other
texts, are not used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specserve_kernels.reference.layer.activation import silu_and_mul
from specserve_kernels.reference.linear.quantize import FP8, Rounded, rounded_inputs
from specserve_kernels.reference.linear.weight_only import Packed, dequantize_packed


def fp8_linear(
    x_TI: Tensor | Rounded, weight: Packed, bias_O: Tensor | None = None, gated: bool = False
) -> Tensor:
    """Return ``x @ weight.T + bias`` in x's dtype, summed in float32 at least, and if ``gated`` its ``silu_and_mul``,
    which is half as wide. x is quantized by ``round_inputs`` first if needed; its rows may be strided."""
    plain_TI = rounded_inputs(x_TI, FP8) if isinstance(x_TI, Tensor) else x_TI.plain_TI
    wide = torch.promote_types(x_TI.dtype, torch.float32)
    out_TO = plain_TI.to(wide) @ dequantize_packed(weight, wide).T
    out_TO = (out_TO if bias_O is None else out_TO + bias_O).to(x_TI.dtype)
    return silu_and_mul(out_TO) if gated else out_TO
