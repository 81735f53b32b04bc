"""A projection. Shapes: T tokens, O outputs, I inputs."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``."""
    return torch.nn.functional.linear(x_TI, weight_OI, bias_O)
