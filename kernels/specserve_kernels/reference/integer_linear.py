"""A projection whose weight and inputs are int8. Shapes: T tokens, O outputs, I inputs, G groups of inputs."""

from __future__ import annotations

from torch import Tensor

from specserve_kernels.reference.activation import silu_and_mul
from specserve_kernels.reference.quantized_linear import dequantize
from specserve_kernels.reference.rounding import Rounded, round_inputs


def integer_linear(
    x_TI: Tensor | Rounded,
    weight_OI: Tensor,
    factor_OG: Tensor,
    bias_O: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """As ``quantized_linear`` by a weight in int8, of inputs as ``round_inputs`` rounds them, if they are not yet."""
    x = round_inputs(x_TI) if isinstance(x_TI, Tensor) else x_TI
    out_TO = x.plain_TI @ dequantize(weight_OI, factor_OG).T
    out_TO = (out_TO if bias_O is None else out_TO + bias_O).to(x.dtype)
    return silu_and_mul(out_TO) if gated else out_TO
