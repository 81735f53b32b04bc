"""A projection. Shapes: T tokens, O outputs, I inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from specserve_kernels.reference.layer.activation import silu_and_mul


def linear(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    gated: bool = False,
    out_TO: Tensor | None = None,
) -> Tensor:
    """``x @ weight.T + bias``, and ``silu_and_mul`` of that if it is gated: half as wide. ``out_TO``: contiguous, where
    it goes that has neither bias nor gate; ValueError for another."""
    if out_TO is not None:
        check_place(out_TO, x_TI, weight_OI, bias_O, gated)
        return torch.mm(x_TI, weight_OI.t(), out=out_TO)
    out_TO = torch.nn.functional.linear(x_TI, weight_OI, bias_O)
    return silu_and_mul(out_TO) if gated else out_TO


def check_place(out_TO: Tensor, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, gated: bool) -> None:
    """Raise ValueError for an ``out_TO`` that ``linear`` does not write to."""
    shape = len(x_TI), len(weight_OI)
    if bias_O is not None or gated or out_TO.shape != shape or not out_TO.is_contiguous():
        raise ValueError(f"out_TO: without bias and gate, contiguous, {shape}, not {tuple(out_TO.shape)}")
