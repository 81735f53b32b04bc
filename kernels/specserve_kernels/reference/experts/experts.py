"""What experts make of a token's state. Shapes: T tokens, H hidden size, E experts, K chosen for each token, I inner
size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve_kernels.reference.experts.route import Routes
from specserve_kernels.reference.layer.activation import Gate, apply_gate
from specserve_kernels.reference.linear.packed import Packed, dequantize_packed
from specserve_kernels.reference.linear.quantize import FP8, Rounded, given, rounded_inputs


class ExpertWeights(NamedTuple):
    """Stacked weights: ``gate_up`` ``[E, O, H]``, O = 2 I, gates first, and ``down`` ``[E, H, I]``; as in a file, with
    the same rows, but two dimensions. And their biases, or None. ``rounded``: whether they are plain numbers of FP8
    weights, whose inputs are rounded to FP8 as those of ``Packed`` are."""

    gate_up: Tensor | Packed
    down: Tensor | Packed
    gate_up_bias_EO: Tensor | None = None
    down_bias_EH: Tensor | None = None
    rounded: tuple[bool, bool] = (False, False)

    def sizes(self, hidden: int) -> tuple[int, int]:
        """Return E and I."""
        count = _rows(self.down) // hidden
        return count, _rows(self.gate_up) // (2 * count)


def _rows(weight: Tensor | Packed) -> int:
    return len(weight.values if isinstance(weight, Packed) else weight.flatten(0, 1))


def _weight_of(weight: Tensor | Packed, number: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return an expert's weight."""
    if isinstance(weight, Tensor):
        return weight[number]
    row_O = torch.arange(len(weight.values) // count, device=weight.values.device)
    return dequantize_packed(weight, dtype, row_O + number * len(row_O))


def _as_read(x_TI: Tensor, weight: Tensor | Packed, rounded: bool) -> Tensor:
    """Return what an expert's weight multiplies."""
    if rounded or (isinstance(weight, Packed) and weight.values.dtype == FP8):
        return rounded_inputs(x_TI, FP8).to(x_TI.dtype)
    return x_TI


def run_experts(
    x_TH: Tensor | Rounded,
    routes: Routes,
    experts: ExpertWeights,
    gate: Gate,
    shared_TH: Tensor | None = None,
    first: int = 0,
    total: int | None = None,
) -> Tensor:
    """Return the sum of each token's experts' outputs, times their weights, in the order of the experts, then
    ``shared_TH``, the output of another expert of all tokens: added in float32 at least, and rounded once.
    ``experts``: those from ``first`` on, of ``total``, or all; others add nothing. Inputs of FP8 weights, x and each
    expert's own, are rounded to FP8, with a scale for each token. ``Rounded`` x must have what was rounded."""
    x_TH = given(x_TH)
    wide = torch.promote_types(x_TH.dtype, torch.float32)
    out_TH = torch.zeros(x_TH.shape, dtype=wide, device=x_TH.device)
    count, _ = experts.sizes(x_TH.shape[1])
    read_TH = _as_read(x_TH, experts.gate_up, experts.rounded[0])
    here, own_TK = range(count), routes.expert_TK - first
    for number in (each for each in own_TK.unique().tolist() if each in here) if x_TH.is_cpu else here:
        yes_TK = own_TK == number
        # Elsewhere the host would have to wait for the tokens' numbers; the others have a weight of 0.
        token_X = yes_TK.any(-1).nonzero()[:, 0] if x_TH.is_cpu else slice(None)
        weight_X1 = (routes.weight_TK * yes_TK).sum(-1, keepdim=True)[token_X]
        bias_O, bias_H = (
            None if each is None else each[number] for each in (experts.gate_up_bias_EO, experts.down_bias_EH)
        )
        gate_up_OH, down_HI = (
            _weight_of(each, number, count, x_TH.dtype) for each in (experts.gate_up, experts.down)
        )
        inner_XI = apply_gate(F.linear(read_TH[token_X], gate_up_OH, bias_O), gate)
        inner_XI = _as_read(inner_XI, experts.down, experts.rounded[1])
        made_XH = F.linear(inner_XI, down_HI, bias_H).to(wide)
        out_TH[token_X] += weight_X1.to(wide) * made_XH
    return (out_TH if shared_TH is None else out_TH + shared_TH.to(wide)).to(x_TH.dtype)
