"""Mixtures of experts: which experts a token's state goes through, and what they make of it.

Shapes: T tokens, H hidden size, E experts, K chosen for each token, I inner size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve_kernels.reference.layer.activation import Gate, apply_gate


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token chooses ``chosen`` of ``experts`` by their logits.

    ``scores`` of logits: softmax over all experts, or a sigmoid of each. With ``groups`` of neighbouring experts, only
    those of the ``chosen_groups`` best can be chosen: a group is as good as the sum of its ``group_best`` best experts.
    Weights are scores, divided by their sum if they are to ``normalize``, times ``scale``.
    """

    experts: int
    chosen: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 1


class Routes(NamedTuple):
    """``expert_TK``: int32, ascending, because outputs are added in this order; ``weight_TK``: float32."""

    expert_TK: Tensor
    weight_TK: Tensor


class ExpertWeights(NamedTuple):
    """Stacked weights: ``gate_up_EOH``, O = 2 I, gates first; ``down_EHI``; and their biases, or None."""

    gate_up_EOH: Tensor
    down_EHI: Tensor
    gate_up_bias_EO: Tensor | None = None
    down_bias_EH: Tensor | None = None


def route(
    x_TH: Tensor,
    weight_EH: Tensor,
    routing: Routing,
    bias_E: Tensor | None = None,
    correction_E: Tensor | None = None,
) -> Routes:
    """Choose experts, in float32 at least. ``correction_E`` is added to scores for the choice alone. Of equal experts
    the first ones are chosen."""
    wide = torch.promote_types(x_TH.dtype, torch.float32)
    logits_TE = F.linear(x_TH.to(wide), weight_EH.to(wide), None if bias_E is None else bias_E.to(wide))
    score_TE = logits_TE.softmax(-1) if routing.scores == "softmax" else logits_TE.sigmoid()
    wish_TE = score_TE if correction_E is None else score_TE + correction_E.to(wide)
    if routing.groups > 1:
        wish_TE = _within_groups(wish_TE, routing)
    expert_TK = _best(wish_TE, routing.chosen).sort(-1).values
    weight_TK = score_TE.gather(-1, expert_TK)
    if routing.normalize:
        weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20)
    return Routes(expert_TK.int(), weight_TK * routing.scale)


def _within_groups(wish_TE: Tensor, routing: Routing) -> Tensor:
    """Make experts of other groups than the best impossible."""
    wish_TGX = wish_TE.unflatten(-1, (routing.groups, -1))
    good_TG = wish_TGX.topk(routing.group_best).values.sum(-1)
    allowed_TG = torch.zeros_like(good_TG, dtype=torch.bool)
    allowed_TG.scatter_(-1, _best(good_TG, routing.chosen_groups), True)
    out_TE: Tensor = wish_TGX.masked_fill(~allowed_TG[..., None], -torch.inf).flatten(-2)
    return out_TE


def _best(value_TX: Tensor, count: int) -> Tensor:
    return value_TX.sort(dim=-1, descending=True, stable=True).indices[..., :count]


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
