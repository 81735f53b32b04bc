"""A projection. Shapes: T tokens, O outputs, I inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from specserve_kernels.reference.activation import silu_and_mul


def linear(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    gated: bool = False,
    out_TO: Tensor | None = None,
) -> Tensor:
    """``x @ weight.T + bias``, and ``silu_and_mul`` of that if it is gated: half as wide. ``out_TO``: contiguous, where
    it goes that has neither bias nor gate."""
    if out_TO is not None:
        return torch.mm(x_TI, weight_OI.t(), out=out_TO)
    out_TO = torch.nn.functional.linear(x_TI, weight_OI, bias_O)
    return silu_and_mul(out_TO) if gated else out_TO
