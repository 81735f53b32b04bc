"""Predicted text: how far a request has followed it, and which of its tokens is drafted next.

Shapes as in ``types``; P tokens that a prediction may have, N latest tokens of a text, C = K candidates a node.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specserve_kernels.types import RECENT, Level, Prediction

MIN_MATCH = 2  # shortest match by which a text is found in its prediction again
FORGET = 0.8  # decay of the counts at each step that tests the prediction
PRIOR = 2.0  # weight of the prior probability, in tokens
BELIEF = 0.9  # prior probability that a predicted token is right
CERTAIN = 0.9  # probability from which on the prediction goes before any draft


def force_predicted(
    level: Level, token_NC: Tensor, logp_NC: Tensor, prediction: Prediction
) -> tuple[Tensor, Tensor]:
    """Return candidates in which each node on its request's prediction has the predicted token, with the probability at
    which predictions have recently been right. It replaces the node's own equal candidate, or else the last, weakest
    one, unless that is likelier.

    Returns new tensors. A slot has at most one such node at a depth, since siblings carry different tokens.
    """
    rows_N, depth = level.rows_N, level.path_NA.shape[1]
    next_N, length_N = prediction.next_R[rows_N], prediction.length_R[rows_N]
    column_A = torch.arange(depth + 1, device=rows_N.device)
    last = prediction.tokens_RP.shape[1] - 1
    index_NA = (next_N[:, None] + column_A).clamp(0, last)
    predicted_NA = prediction.tokens_RP[rows_N[:, None], index_NA].long()
    on_path_N = (predicted_NA[:, :-1] == level.path_NA).all(1)
    forced_N = on_path_N & (next_N >= 0) & (next_N + depth < length_N)
    same_NC = token_NC == predicted_NA[:, -1:]
    count = token_NC.shape[1]
    column_N = torch.where(same_NC.any(1), same_NC.long().argmax(1), count - 1)
    hit_NC = forced_N[:, None] & (torch.arange(count, device=rows_N.device) == column_N[:, None])
    trust_N1 = prediction.trust_R[rows_N][:, None].to(logp_NC.dtype)
    better_NC = hit_NC & (trust_N1 >= logp_NC)
    return (
        torch.where(better_NC, predicted_NA[:, -1:], token_NC),
        torch.where(better_NC, trust_N1, logp_NC),
    )


def follow_prediction(
    prediction: Prediction,
    tokens_RC: Tensor,
    rows_B: Tensor,
    length_B: Tensor,
    token_BS: Tensor,
    count_B: Tensor,
) -> Tensor:
    """Move each request's place in its prediction past the ``count_B`` tokens of ``token_BS`` that were emitted.
    ``tokens_RC``: the texts, which already hold these tokens after position ``length_B``.

    A text that leaves its prediction is found in it again by the longest match of its last two to four tokens: the
    first such place at or after where it left, or else the first of all. Until there is one, nothing is predicted.
    Return ``[B, 2]``: the index of the token that was expected, and how many tokens from there on equal the emitted
    ones. Reads lengths on the host: all its tensors are integers, so on a GPU the kernel runs whatever the dtype is.
    """
    next_B, size_B = prediction.next_R[rows_B], prediction.length_R[rows_B]
    longest = max(int(size_B.max()), 1)
    predicted_BP = prediction.tokens_RP[:, :longest][rows_B]
    column_S = torch.arange(token_BS.shape[1], device=rows_B.device)
    at_BS = next_B[:, None] + column_S
    inside_BS = (at_BS < size_B[:, None]) & (column_S < count_B[:, None]) & (next_B[:, None] >= 0)
    agrees_BS = predicted_BP.gather(1, at_BS.clamp(0, predicted_BP.shape[1] - 1)) == token_BS
    followed_B = (agrees_BS & inside_BS).long().cumprod(1).sum(1)
    reached_B = torch.where(next_B >= 0, next_B + followed_B, -1 - next_B)
    index_BN = (length_B + count_B)[:, None] + torch.arange(1 - RECENT, 1, device=rows_B.device)
    recent_BN = tokens_RC[rows_B[:, None], index_BN.clamp(min=0)].where(index_BN >= 0, -1)
    has_B, moved_B = size_B > 0, next_B + count_B
    departed_B = has_B & (followed_B < count_B)
    if departed_B.any():
        found_B = _find(predicted_BP, size_B, recent_BN, reached_B)
        moved_B = torch.where(departed_B, found_B, moved_B)
    prediction.next_R[rows_B] = torch.where(has_B, moved_B, next_B)
    ahead_B = torch.where(next_B >= 0, size_B - next_B, 0)
    _learn(prediction, rows_B, followed_B, torch.minimum(torch.minimum(followed_B + 1, count_B), ahead_B))
    return torch.stack([next_B, followed_B], dim=1)


def _learn(prediction: Prediction, rows_B: Tensor, right_B: Tensor, tested_B: Tensor) -> None:
    """Count that ``right_B`` of ``tested_B`` predicted tokens were right, and update the probability."""
    before_B2, found_B2 = prediction.counts_R2[rows_B], torch.stack([right_B, tested_B], dim=1).float()
    counts_B2 = torch.where(tested_B[:, None] > 0, FORGET * before_B2 + found_B2, before_B2)
    prediction.counts_R2[rows_B] = counts_B2
    right_B, tested_B = counts_B2.unbind(1)
    chance_B = (right_B + PRIOR * BELIEF) / (tested_B + PRIOR)
    prediction.trust_R[rows_B] = torch.where(chance_B < CERTAIN, chance_B, 1).log()


def _find(predicted_BP: Tensor, length_B: Tensor, recent_BN: Tensor, reached_B: Tensor) -> Tensor:
    """Return the index of the token after the best match ``[B]``, ``-1 - reached`` without one."""
    size = predicted_BP.shape[1]
    index_P = torch.arange(size, device=predicted_BP.device)
    agrees_BP, matched_BP = index_P < length_B[:, None], torch.zeros_like(predicted_BP)
    for back in range(1, RECENT + 1):
        earlier_BP = torch.nn.functional.pad(predicted_BP, (back, 0), value=-2)[:, :size]
        agrees_BP = agrees_BP & (earlier_BP == recent_BN[:, -back, None])
        matched_BP += agrees_BP
    behind_BP = index_P >= reached_B[:, None]
    rank_BP = (2 * matched_BP.long() + behind_BP) * (size + 1) + (size - index_P)
    best_B = rank_BP.masked_fill(matched_BP < MIN_MATCH, -1).amax(1)
    return torch.where(best_B < 0, -1 - reached_B, size - best_B % (size + 1))
