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


class ExpertWeights(NamedTuple):
    """Stacked weights: ``gate_up_EOH``, O = 2 I, gates first; ``down_EHI``; and their biases, or None."""

    gate_up_EOH: Tensor
    down_EHI: Tensor
    gate_up_bias_EO: Tensor | None = None
    down_bias_EH: Tensor | None = None


def run_experts(
    x_TH: Tensor, routes: Routes, experts: ExpertWeights, gate: Gate, shared_TH: Tensor | None = None
) -> Tensor:
    """Return the sum of each token's experts' outputs, times their weights, in the order of the experts, then
    ``shared_TH``: added in float32 at least, and rounded once."""
    wide = torch.promote_types(x_TH.dtype, torch.float32)
    out_TH = torch.zeros(x_TH.shape, dtype=wide, device=x_TH.device)
    chosen = routes.expert_TK.unique().tolist() if x_TH.is_cpu else range(len(experts.down_EHI))
    for number in chosen:
        yes_TK = routes.expert_TK == number
        # Elsewhere the host would have to wait for the tokens' numbers; the others have a weight of 0.
        token_X = yes_TK.any(-1).nonzero()[:, 0] if x_TH.is_cpu else slice(None)
        weight_X1 = (routes.weight_TK * yes_TK).sum(-1, keepdim=True)[token_X]
        bias_O, bias_H = (
            None if each is None else each[number] for each in (experts.gate_up_bias_EO, experts.down_bias_EH)
        )
        inner_XI = apply_gate(F.linear(x_TH[token_X], experts.gate_up_EOH[number], bias_O), gate)
        made_XH = F.linear(inner_XI, experts.down_EHI[number], bias_H).to(wide)
        out_TH[token_X] += weight_X1.to(wide) * made_XH
    return (out_TH if shared_TH is None else out_TH + shared_TH.to(wide)).to(x_TH.dtype)
