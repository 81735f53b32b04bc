"""Prompt lookup: propose what followed the text's last tokens earlier in the same text.

Saxena 2023, "Prompt lookup decoding". It has no weights and reads the state's texts on the device, within the step's
graph. A chain holds the best continuation, a tree several, which branch at the root.

Shapes: B slots, K continuations, S levels.
"""

from __future__ import annotations

import torch
from specserve_kernels import Pool, Prediction, find_continuations
from torch import Tensor

from specserve.methods import DraftSettings
from specserve.models.base import TargetModel
from specserve.speculation.context import Context, Drafter, View
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape

DOUBT = 0.5  # probability that a token is wrong after a match of one token; divided by n after n


class NgramDrafter(Drafter):
    """Proposes what followed the longest match of the text's end; ties go to the latest match."""

    def __init__(self, name: str, vocab_size: int) -> None:
        self.name = name
        self.vocab_size = vocab_size

    @classmethod
    def load(cls, draft: DraftSettings, target: TargetModel) -> NgramDrafter:
        """Return a drafter for the target's vocabulary; there are no files to read."""
        return cls(draft.name, target.config.vocab_size)

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        return Pool.of_branches(*self.branches(context, view, shape.branching, shape.levels))

    def branches(self, context: Context, view: View, count: int, size: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of the best continuations and their cumulative log-probabilities, ``[B, K, S]`` each; -inf:
        none. Their first tokens differ; the best comes first."""
        slots = view.slots
        rows_B, dtype = slots.rows_B, context.state.sampling.temperature.dtype
        text_RC = context.state.slots.tokens[:, : view.max_length + 1]
        prediction, taken_B = view.prediction(context), torch.full_like(rows_B, -1)
        if prediction is not None:
            given_BS, trust_BS = predicted(prediction, rows_B, size, dtype)
            taken_B = given_BS[:, 0].where(trust_BS[:, 0].isfinite(), -1)
        token_BKS, matched_BK = find_continuations(text_RC, rows_B, slots.length_B, taken_B, count, size)
        ahead_S = torch.arange(size, device=rows_B.device)
        matched_BKS = (matched_BK[..., None] + ahead_S).where(matched_BK[..., None] > 0, 0)
        score_BKS = scores_of(matched_BKS, dtype)
        if prediction is None:
            return token_BKS, score_BKS
        return best_of(
            torch.cat([given_BS[:, None], token_BKS], 1), torch.cat([trust_BS[:, None], score_BKS], 1), count
        )


def scores_of(matched_BKS: Tensor, dtype: torch.dtype) -> Tensor:
    """Return cumulative log-probabilities ``[B, K, S]``, -inf from the first token that has no match before it. A token
    is right more often the longer the match before it, and each right token extends the match by one. A continuation
    starts only where all better ones are wrong."""
    right_BKS = 1 - DOUBT / matched_BKS.clamp(min=1).to(dtype)
    wrong_BK = (1 - right_BKS[..., 0]).log().cumsum(1)
    logp_BKS = right_BKS.log().masked_fill(matched_BKS == 0, -torch.inf).cumsum(2)
    logp_BKS[:, 1:] += wrong_BK[:, :-1, None]
    return logp_BKS


def best_of(token_BXS: Tensor, score_BXS: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` best of several continuations; ties go to the first."""
    best_BK1 = score_BXS[:, :, 0].argsort(dim=1, descending=True, stable=True)[:, :count, None]
    return token_BXS.take_along_dim(best_BK1, 1), score_BXS.take_along_dim(best_BK1, 1)


def predicted(prediction: Prediction, rows_B: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the predicted tokens ``[B, S]`` and their cumulative log-probabilities, -inf where there are none."""
    next_B1, length_B1 = prediction.next_R[rows_B][:, None], prediction.length_R[rows_B][:, None]
    ahead_S = torch.arange(size, device=rows_B.device)
    at_BS = next_B1 + ahead_S
    token_BS = prediction.tokens_RP[rows_B[:, None], at_BS.clamp(0, prediction.tokens_RP.shape[1] - 1)]
    score_BS = prediction.trust_R[rows_B][:, None].to(dtype) * (ahead_S + 1)
    return token_BS.long(), score_BS.masked_fill((next_B1 < 0) | (at_BS >= length_B1), -torch.inf)
