"""A projection. Shapes: T tokens, O outputs, I inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from specserve_kernels.reference.layer.activation import Gate, apply_gate


def linear(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    gated: Gate = None,
    out_TO: Tensor | None = None,
) -> Tensor:
    """Return ``x @ weight.T + bias``, and if ``gated`` its ``apply_gate``, which is half as wide. ``out_TO``: a
    contiguous output for a projection without bias and gate; raises ValueError for any other."""
    if out_TO is not None:
        check_place(out_TO, x_TI, weight_OI, bias_O, bool(gated))
        return torch.mm(x_TI, weight_OI.t(), out=out_TO)
    out_TO = torch.nn.functional.linear(x_TI, weight_OI, bias_O)
    return apply_gate(out_TO, gated)


def linear_ahead(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return ``linear``, for inputs that were written at least two launches ago: on a GPU few tokens are multiplied
    while the launch before still runs. What the next launch reads early must have been written before that one."""
    return linear(x_TI, weight_OI, None)


def check_place(out_TO: Tensor, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, gated: bool) -> None:
    """Raise ValueError for an ``out_TO`` that ``linear`` can't write to."""
    shape = len(x_TI), len(weight_OI)
    if bias_O is not None or gated or out_TO.shape != shape or not out_TO.is_contiguous():
        raise ValueError(
            f"out_TO: expected contiguous {shape}, no bias, no gate, found {tuple(out_TO.shape)}"
        )
