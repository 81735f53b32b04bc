"""Which experts a token's state goes through.

Shapes: T tokens, H hidden size, E experts, K chosen for each token, P = T * K pairs of a token and one of its experts,
X tiles of pairs with the same expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token chooses ``chosen`` of ``experts`` by their logits.

    ``scores`` of logits: softmax over all experts, or a sigmoid of each. With ``groups`` of neighbouring experts, only
    those of the ``chosen_groups`` best can be chosen: a group is as good as the sum of its ``group_best`` best experts.
    Weights are scores, divided by their sum if they are to ``normalize``, times ``scale``. ``shared``: experts after
    these that every token goes through too, with a weight of 1 or of a gate of their own.
    """

    experts: int
    chosen: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 1
    shared: int = 0


class Tiles(NamedTuple):
    """The pairs of a token and one of its experts in the order in which kernels multiply them: by expert, then token.

    ``order_P``: int32, the pairs as indices of ``expert_TK``. ``tile_X3``: int32, of each tile the expert, and the
    first and the end of its pairs in this order. Unused tiles have no expert (the number of experts); last comes a row
    that begins with the number of those in use.
    """

    order_P: Tensor
    tile_X3: Tensor


class Routes(NamedTuple):
    """``expert_TK``: int32, ascending, because outputs are added in this order; ``weight_TK``: float32. ``tiles``: for
    kernels."""

    expert_TK: Tensor
    weight_TK: Tensor
    tiles: Tiles | None = None


def route(
    x_TH: Tensor,
    weight_EH: Tensor,
    routing: Routing,
    bias_E: Tensor | None = None,
    correction_E: Tensor | None = None,
    shared_gate_1H: Tensor | None = None,
) -> Routes:
    """Choose experts, in float32 at least. ``correction_E`` is added to scores for the choice alone. Of equal experts
    the first ones are chosen. The weight of shared ones is the sigmoid of ``shared_gate_1H``'s product, if given."""
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
    weight_TK = weight_TK * routing.scale
    if routing.shared:
        share_T1 = torch.ones_like(weight_TK[:, :1])
        if shared_gate_1H is not None:
            share_T1 = F.linear(x_TH.to(wide), shared_gate_1H.to(wide)).sigmoid()
        behind_S = torch.arange(routing.experts, routing.experts + routing.shared, device=x_TH.device)
        expert_TK = torch.cat([expert_TK, behind_S.expand(len(x_TH), -1)], -1)
        weight_TK = torch.cat([weight_TK, share_T1.expand(-1, routing.shared)], -1)
    return Routes(expert_TK.int(), weight_TK)


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
